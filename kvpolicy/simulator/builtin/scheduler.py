"""vLLM V1's ``Scheduler.schedule``, rule by rule, for one group of full-attention blocks.

The scheduler knows neither time nor policies: it calls ``preempting`` with a victim before the victim's blocks are
freed. The module begins with the choice of victims.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple, Protocol

from kvpolicy.events import Cause
from kvpolicy.load_growth import LoadGrowth
from kvpolicy.order import decodes_first
from kvpolicy.simulator.base import NULL_BLOCK, Scheduling, Server
from kvpolicy.simulator.builtin.blocks import Pool
from kvpolicy.simulator.builtin.host_copies import HostPool
from kvpolicy.simulator.builtin.live_request import KeyedBlock, LiveRequest, Status, Step
from kvpolicy.simulator.builtin.ordering import Ordering
from kvpolicy.simulator.builtin.room_needs import Room
from kvpolicy.simulator.builtin.waiting_queues import Queue, queue_for

TURN = attrgetter("turn")


class Victims(Protocol):
    """Chooses the victim among the running requests. Pure: equal arguments give equal choices."""

    def choose(self, running: Sequence[LiveRequest]) -> int:
        """Index of the victim. ``running`` is in scheduling order and must not be changed."""
        ...


@dataclass(frozen=True, slots=True)
class VllmVictims:
    """vLLM's choice: the last of the running requests; under priority scheduling the least urgent, latest request."""

    scheduling: Scheduling

    def choose(self, running: Sequence[LiveRequest]) -> int:
        if self.scheduling == "fcfs":
            return len(running) - 1
        ranks = [(live.request.priority, live.arrival_s) for live in running]
        return ranks.index(max(ranks))


class Demand(NamedTuple):
    """What a waiting request takes when it is admitted."""

    hits: Sequence[KeyedBlock]
    computed: int
    """Tokens that it has with the local hit and the load."""
    load_tokens: int
    """To be loaded first; 0 where its next chunk can be computed."""
    new_tokens: int
    """Tokens of that chunk."""
    missing_blocks: int
    """Blocks to allocate beyond the hits."""
    needed_blocks: int
    """Blocks that must be free for it: those of the whole sequence so far (``scheduler_reserve_full_isl``), the hits
    that nobody holds, the watermark, and what a load must leave to others."""


class Scheduler:
    """Running and waiting requests of one engine core."""

    def __init__(
        self,
        server: Server,
        pool: Pool,
        copies: HostPool,
        victims: Victims,
        preempting: Callable[[LiveRequest, Cause], None],
        admitted: Callable[[LiveRequest, int], None],
        ordering: Ordering | None = None,
        delayed: Callable[[LiveRequest], bool] = lambda live: False,
    ) -> None:
        """``delayed``: whether a request that could be admitted has to wait for something of its own."""
        self.pool = pool
        self._delayed = delayed
        self.running: list[LiveRequest] = []
        self.waiting: Queue = queue_for(server.scheduling) if ordering is None else ordering.waiting
        self.holding: Queue = queue_for(server.scheduling) if ordering is None else ordering.holding
        """Waiting requests that hold blocks, because they are being loaded or are loaded. Always admitted first."""
        self.loaded: set[LiveRequest] = set()
        """Requests in ``holding`` whose load was reported as done and that were not considered since."""
        self.blocked = False
        """Whether no waiting request can be admitted until more changes than the blocks that decodes take."""
        self._prefills: dict[LiveRequest, None] = {}
        """Admitted requests with an unfinished prefill: a load must leave them the blocks they still need."""
        self.growth = LoadGrowth(server.block_size)
        self._load_began: dict[LiveRequest, int] = {}
        """Number of steps at which the load of each request in ``holding`` began."""
        self._keeps_place = server.scheduling == "fcfs"
        """Whether a loaded request returns to its place; under priority scheduling victims do not go by places."""
        self._server = server
        self._copies = copies
        self._victims = victims
        self._preempting = preempting
        self._admitted = admitted
        self._ordering = ordering
        self._turns = 0
        self._loading = 0
        """Waiting requests whose load is under way, or has ended but was not yet considered."""
        self._held = 0
        """Running requests that sit this step out."""
        self._watermark_blocks = int(server.watermark * (server.device_blocks + NULL_BLOCK))
        self._room = None if ordering is None else Room(self, ordering, server)

    @property
    def waiting_requests(self) -> int:
        return len(self.waiting) + len(self.holding)

    @property
    def watermark_blocks(self) -> int:
        """Blocks that must be free beside those that a request takes: none where nobody runs."""
        return self._watermark_blocks if self.running else 0

    def arrive(self, live: LiveRequest) -> None:
        if not len(self.waiting) or self._server.scheduling == "priority" or self._ordering is not None:
            self.blocked = False
        if self._ordering is not None:
            self._ordering.arrived(live)
        self.waiting.append(live)

    def schedule(self, step: Step) -> None:
        """Fill ``step``; requests' computed tokens then include it."""
        displaced = self._displace() if self._ordering is not None else ()
        held = self._hold() if self._ordering is not None else ()
        lost = len(step.lost)
        in_turn = self.running
        if self._ordering is not None:
            self._put_decodes_first()
        budget = self.run(step, self._server.token_budget, 0)
        self.running = in_turn
        if len(step.lost) == lost:
            self.admit(step, budget)
        if held:
            self._release(held)
        if displaced and self._ordering is not None:
            self._ordering.count_missed()
        for live in displaced:
            self.waiting.append(live)
        self.advance(step)
        self.growth.steps += bool(step.scheduled)
        self.blocked = False  # blocks reserved for a prefill may now go to a load

    # ---- running requests ----

    def run(self, step: Step, budget: int, index: int) -> int:
        """Schedule the running requests from ``index`` on, preempting where blocks are missing.

        Return the tokens left of the budget.
        """
        running = self.running
        while index < len(running) and budget > 0:
            live = running[index]
            new = min(live.tokens + live.placeholders - live.computed, budget)
            if new == 0 or self.last_token_is_coming(live):
                index += 1
                continue
            while not self._allocate(live, live.computed + new):
                at = self._victims.choose(running)
                victim = running.pop(at)
                index -= at < index
                budget += step.scheduled.pop(victim, 0)
                self.preempt(victim)
                if victim is live:
                    return budget
            self._cache_chunk(live, live.computed + new)
            step.scheduled[live] = new
            budget -= new
            index += 1
        return budget

    def preempt(self, victim: LiveRequest, cause: Cause = "memory") -> None:
        """Free the blocks of a request that has left the running list, and put it first in the waiting queue."""
        if self._ordering is not None:
            self._ordering.preempted(victim)
        self.pool.withdraw(victim)
        self.pool.give_back(victim)
        self._preempting(victim, cause)
        self.blocked = False
        self.pool.release(victim, preempted=True)
        self._prefills.pop(victim, None)
        victim.status = Status.PREEMPTED
        victim.computed = victim.placeholders = 0
        victim.stale = victim.in_flight
        victim.preemptions += 1
        self.waiting.put_back([victim])

    def last_token_is_coming(self, live: LiveRequest) -> bool:
        """Whether a step in flight brings the request's last token; only with asynchronous scheduling."""
        if not live.placeholders:
            return False
        return live.computed + 2 - live.placeholders >= live.request.total_tokens

    def _allocate(self, live: LiveRequest, tokens: int) -> bool:
        """Allocate blocks for ``tokens`` tokens; return False where too few are free."""
        missing = -(-tokens // self._server.block_size) - live.held
        if missing > self.pool.free:
            return False
        if missing > 0:
            self.pool.grow(live, missing)
        return True

    def _cache_chunk(self, live: LiveRequest, computed: int) -> None:
        """Cache the blocks that a scheduled chunk completes at once, as far as their tokens are known."""
        self.pool.cache(live, min(computed, live.tokens))

    # ---- waiting requests ----

    def admit(self, step: Step, budget: int) -> list[LiveRequest]:
        """Admit waiting requests in their order until one does not fit; return those admitted."""
        waiting: list[LiveRequest] = []
        holding: list[LiveRequest] = []
        admitted: list[LiveRequest] = []
        while budget > 0 and len(self.running) < self.max_running():
            queue = self.holding if len(self.holding) else self.waiting
            if not len(queue):
                break
            live = queue.first()
            if not self._ready(live):
                queue.pop()
                (holding if live.computed or live.status is Status.LOADING else waiting).append(live)
                continue
            new = self._allocate_waiting(live, budget)
            if new is None:
                break
            queue.pop()
            if live.status is Status.LOADING:
                holding.append(live)
                continue
            self._start(live, new)
            admitted.append(live)
            step.scheduled[live] = new
            budget -= new
        self.blocked = budget > 0
        self.holding.put_back(holding)
        self.waiting.put_back(waiting)
        return admitted

    def max_running(self) -> int:
        """Requests that may run: one being loaded or held keeps its place, and one that is loaded takes it."""
        return self._server.max_running - self._loading + len(self.loaded) - self._held

    def _ready(self, live: LiveRequest) -> bool:
        """Whether the request itself is ready to be admitted."""
        if live.status is Status.LOADING:
            if live not in self.loaded:
                return False
            self.loaded.discard(live)
            self._loading -= 1
            self.growth.ended(self._load_began.pop(live))
            live.keeps_turn = self._keeps_place and live.preemptions > 0
            self.pool.cache(live, live.computed)
            live.status = Status.PREEMPTED if live.preemptions else Status.WAITING
        return live.stale == 0 and not self._delayed(live)

    def _allocate_waiting(self, live: LiveRequest, budget: int) -> int | None:
        """Allocate blocks for its next chunk and return the chunk's tokens; 0 where it is to be loaded first.

        None where what it needs is not free, or the order of service does not let it in.
        """
        demand = self.demand(live, budget)
        free_after = self.pool.free - demand.needed_blocks
        if free_after < 0:
            return None
        fresh = live.computed == 0
        if self._ordering is not None and fresh and self.running and not self._ordering.admits(live, free_after):
            return None
        if fresh:
            self.pool.adopt(live, demand.hits)
            if not live.preemptions:
                self._count_hits(live, demand)
                self._copies.served(live)
        if demand.missing_blocks:
            self.pool.grow(live, demand.missing_blocks)
        live.computed = demand.computed
        self._admitted(live, demand.load_tokens)
        if demand.load_tokens:
            live.status = Status.LOADING
            self._loading += 1
            self._load_began[live] = self.growth.steps
            self._prefills[live] = None
        else:
            self._cache_chunk(live, demand.computed + demand.new_tokens)
        return demand.new_tokens

    def _count_hits(self, live: LiveRequest, demand: Demand) -> None:
        """Count what a request that is admitted for the first time finds of its prompt."""
        local = len(demand.hits) * self._server.block_size
        host, files = self._copies.hit_tokens(live, local), self._copies.file_tokens(live, local)
        live.tally.hits.admitted(live.request.prompt_tokens, local, host, files, demand.load_tokens)

    def demand(self, live: LiveRequest, budget: int) -> Demand:
        """What its next chunk, or the load before it, takes. A load must leave the blocks that unfinished prefills
        still need, and those that running requests will take while it lasts."""
        fresh = live.computed == 0
        hits = self.pool.hits(live) if fresh else ()
        local = len(hits) * self._server.block_size
        loads = self._copies.loadable_tokens(live, local) if fresh else 0
        computed = local + loads if fresh else live.computed
        new = 0 if loads else min(live.tokens - computed, budget)
        held = live.held + len(hits)
        whole = max(self._blocks(live.tokens) - held, 0)
        missing = max(self._blocks(computed + new) - held, 0)
        at_once = missing + (self._reserved_blocks() if loads else 0)
        others = self.pool.idle(hits) + self.watermark_blocks
        return Demand(hits, computed, loads, new, missing, max(whole, at_once) + others)

    def _start(self, live: LiveRequest, new: int) -> None:
        """Run an admitted request: one that was loaded where it was among the running, any other one as the last."""
        if self._ordering is not None:
            self._ordering.admitted(live)
        elif not live.keeps_turn:
            live.turn = self._turns
            self._turns += 1
        live.keeps_turn = False
        insort(self.running, live, key=TURN)
        live.status = Status.RUNNING
        if live.computed + new < live.tokens:
            self._prefills[live] = None

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._server.block_size)

    def _reserved_blocks(self) -> int:
        """Blocks that a load must leave free."""
        growth = self.growth.blocks(len(self.running)) if self._keeps_place else 0
        return growth + sum(max(self._blocks(live.tokens) - live.held, 0) for live in self._prefills)

    # ---- after scheduling ----

    def advance(self, step: Step) -> None:
        """Advance computed tokens past the step, and note which requests sample in it."""
        for live, new in step.scheduled.items():
            live.computed += new
            live.in_flight += new
            live.prefilling = live.computed < live.tokens + live.placeholders
            if not live.prefilling:
                self._prefills.pop(live, None)
                step.sampling.add(live)
                live.placeholders += self._server.asynchronous

    def finish(self, live: LiveRequest) -> None:
        """Release a request whose last token is out. The caller removes it from the running list."""
        self.pool.release(live, preempted=False)
        self._prefills.pop(live, None)
        live.status = Status.FINISHED
        self.blocked = False
        if self._ordering is not None:
            self._ordering.finished(live)

    # ---- an order of service other than vLLM's ----

    def renew_ranks(self) -> None:
        """Ask for the ranks that may have changed. Requests' own counts must be up to date."""
        assert self._ordering is not None
        if self._ordering.renew(self.running):
            self.blocked = False

    def _displace(self) -> list[LiveRequest]:
        """Preempt running requests for waiting ones that go before them; return the victims.

        They are left out of the waiting queue, so that this step does not admit them.
        """
        ordering, room = self._ordering, self._room
        assert ordering is not None and room is not None
        if not ordering.looks(self.running):
            return []
        victims = ordering.displaced(room)
        for victim in victims:
            self.running.remove(victim)
            self.preempt(victim, "displaced")
            self.waiting.remove(victim)
        return victims

    def _put_decodes_first(self) -> None:
        """Let those that decode have the step's tokens before prompts; for this step, and where nobody is preempted."""
        assert self._room is not None
        if self._prefills:
            budget = self._server.token_budget
            self.running = decodes_first(self.running, self._prefills, self._room.fits, budget) or self.running

    def _hold(self) -> list[LiveRequest]:
        """Take the requests that sit this step out off the running list; they keep their blocks."""
        ordering = self._ordering
        assert ordering is not None
        held = ordering.held(self.running) if ordering.order.holds else []
        for live in held:
            self.running.remove(live)
        self._held = len(held)
        return held

    def _release(self, held: Iterable[LiveRequest]) -> None:
        """Put those that sat a step out back where they were."""
        for live in held:
            insort(self.running, live, key=TURN)
        self._held = 0
