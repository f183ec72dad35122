"""vLLM V1's ``Scheduler.schedule``, rule by rule, for one group of full-attention blocks.

Nothing here knows of time or of policies: whoever loses its blocks is told to ``preempting`` before they are freed. The
order in which waiting requests are admitted, and whose blocks are taken when an allocation fails, stand first.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvpolicy.simulator.base import NULL_BLOCK, Scheduling, Server
from kvpolicy.simulator.builtin.blocks import Pool
from kvpolicy.simulator.builtin.host_copies import CopyBook
from kvpolicy.simulator.builtin.live_request import Live, Status, Step


class Victims(Protocol):
    """Chooses one of the running requests. Pure: equal arguments, equal choice."""

    def choose(self, running: Sequence[Live]) -> int:
        """Index of the victim. ``running``: in the order of scheduling; read them, change nothing."""
        ...


@dataclass(frozen=True, slots=True)
class VllmVictims:
    """As vLLM does: the last one that was admitted; under priority scheduling the least urgent, latest one."""

    scheduling: Scheduling

    def choose(self, running: Sequence[Live]) -> int:
        if self.scheduling == "fcfs":
            return len(running) - 1
        ranks = [(live.request.priority, live.arrival_s) for live in running]
        return ranks.index(max(ranks))


class Queue(Protocol):
    """What vLLM's ``RequestQueue`` does, as far as it is needed."""

    def __len__(self) -> int: ...

    def append(self, live: Live) -> None: ...

    def first(self) -> Live: ...

    def pop(self) -> Live: ...

    def put_back(self, lives: Iterable[Live]) -> None:
        """To the front, in their order; by rank where ranks decide."""
        ...

    def remove(self, live: Live) -> None: ...


class Fifo:
    """First come, first served."""

    def __init__(self) -> None:
        self._lives: deque[Live] = deque()

    def __len__(self) -> int:
        return len(self._lives)

    def append(self, live: Live) -> None:
        self._lives.append(live)

    def first(self) -> Live:
        return self._lives[0]

    def pop(self) -> Live:
        return self._lives.popleft()

    def put_back(self, lives: Iterable[Live]) -> None:
        self._lives.extendleft(reversed(list(lives)))

    def remove(self, live: Live) -> None:
        self._lives.remove(live)


class Ranked:
    """By priority, then arrival, then number."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, float, int], Live]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def append(self, live: Live) -> None:
        heapq.heappush(self._heap, (live.order, live))

    def first(self) -> Live:
        return self._heap[0][1]

    def pop(self) -> Live:
        return heapq.heappop(self._heap)[1]

    def put_back(self, lives: Iterable[Live]) -> None:
        for live in lives:
            self.append(live)

    def remove(self, live: Live) -> None:
        self._heap.remove((live.order, live))
        heapq.heapify(self._heap)


def queue_for(scheduling: Scheduling) -> Queue:
    return Fifo() if scheduling == "fcfs" else Ranked()


class Scheduler:
    """Running and waiting requests of one engine core."""

    def __init__(
        self,
        server: Server,
        pool: Pool,
        copies: CopyBook,
        victims: Victims,
        preempting: Callable[[Live], None],
        admitted: Callable[[Live, int], None],
    ) -> None:
        self.pool = pool
        self.running: list[Live] = []
        self.waiting: Queue = queue_for(server.scheduling)
        self.holding: Queue = queue_for(server.scheduling)
        """Waiting requests that hold blocks: being loaded, or loaded. Always asked first."""
        self.loaded: set[Live] = set()
        """Of those, the ones whose load was reported and that were not asked since."""
        self.blocked = False
        """Whether nobody who waits can be admitted until something changes beside the blocks that decodes take."""
        self._prefills: dict[Live, None] = {}
        """Admitted, but not yet through with their prefill: a load must leave them the blocks they still need."""
        self._server = server
        self._copies = copies
        self._victims = victims
        self._preempting = preempting
        self._admitted = admitted
        self._turns = 0
        self._loading = 0
        """Waiting requests whose load is under way, or ended and was not yet asked after."""
        self._watermark_blocks = int(server.watermark * (server.device_blocks + NULL_BLOCK))

    @property
    def waiting_requests(self) -> int:
        return len(self.waiting) + len(self.holding)

    def arrive(self, live: Live) -> None:
        if not len(self.waiting) or self._server.scheduling == "priority":
            self.blocked = False
        self.waiting.append(live)

    def schedule(self, step: Step) -> None:
        """Fill ``step``; requests' computed tokens are advanced past it."""
        budget = self.run(step, self._server.token_budget, 0)
        if not step.lost:
            self.admit(step, budget)
        self.advance(step)
        self.blocked = False  # what a prefill needs no more, a load may have

    # ---- running requests ----

    def run(self, step: Step, budget: int, index: int) -> int:
        """Schedule who runs, from ``index`` of the running list on, preempting where blocks are missing.

        Returns the tokens left of the budget.
        """
        running = self.running
        while index < len(running) and budget > 0:
            live = running[index]
            new = min(live.tokens + live.placeholders - live.computed, budget)
            if new == 0 or self.last_token_is_coming(live):
                index += 1
                continue
            while not self._hold(live, live.computed + new):
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

    def preempt(self, victim: Live) -> None:
        """Take the blocks of a request that has left the running list, and let it wait in front of all others."""
        self._preempting(victim)
        self.blocked = False
        self.pool.release(victim, again=True)
        self._prefills.pop(victim, None)
        victim.status = Status.PREEMPTED
        victim.computed = victim.placeholders = 0
        victim.stale = victim.in_flight
        victim.preemptions += 1
        self.waiting.put_back([victim])

    def last_token_is_coming(self, live: Live) -> bool:
        """Asynchronous scheduling: whether a step in flight brings its last token."""
        if not live.placeholders:
            return False
        return live.computed + 2 - live.placeholders >= live.request.total_tokens

    def _hold(self, live: Live, tokens: int) -> bool:
        """Have blocks for that many tokens; False where there are not enough."""
        missing = -(-tokens // self._server.block_size) - live.held
        if missing > self.pool.free:
            return False
        if missing > 0:
            self.pool.grow(live, missing)
        return True

    def _cache_chunk(self, live: Live, computed: int) -> None:
        """What a scheduled chunk completes is in the prefix cache at once, as far as its tokens are known."""
        self.pool.cache(live, min(computed, live.tokens))

    # ---- waiting requests ----

    def admit(self, step: Step, budget: int) -> None:
        """Admit who waits, in their order, until somebody does not fit."""
        waiting: list[Live] = []
        holding: list[Live] = []
        while budget > 0 and len(self.running) < self._places():
            queue = self.holding if len(self.holding) else self.waiting
            if not len(queue):
                break
            live = queue.first()
            if not self._ready(live):
                queue.pop()
                (holding if live.computed or live.status is Status.LOADING else waiting).append(live)
                continue
            new = self._place(live, budget)
            if new is None:
                break
            queue.pop()
            if live.status is Status.LOADING:
                holding.append(live)
                continue
            self._start(live, new)
            step.scheduled[live] = new
            budget -= new
        self.blocked = budget > 0
        self.holding.put_back(holding)
        self.waiting.put_back(waiting)

    def _places(self) -> int:
        """How many may run: who is being loaded keeps its place; who is loaded comes first and takes it itself."""
        return self._server.max_running - self._loading + len(self.loaded)

    def _ready(self, live: Live) -> bool:
        """Whether it can be admitted now, as far as it lies with the request."""
        if live.status is Status.LOADING:
            if live not in self.loaded:
                return False
            self.loaded.discard(live)
            self._loading -= 1
            self.pool.cache(live, live.computed)
            live.status = Status.PREEMPTED if live.preemptions else Status.WAITING
        return live.stale == 0

    def _place(self, live: Live, budget: int) -> int | None:
        """Give it blocks: for its next chunk, whose tokens are returned, or (0) for what is to be loaded first.

        None where the whole sequence as it is known does not fit (``scheduler_reserve_full_isl``) above the watermark,
        or a load would take blocks that prefills on their way still need.
        """
        fresh = live.computed == 0
        hits = self.pool.hits(live) if fresh else ()
        local = len(hits) * self._server.block_size
        loads = self._copies.loadable_tokens(live, local) if fresh else 0
        computed = local + loads if fresh else live.computed
        new = 0 if loads else min(live.tokens - computed, budget)
        held = live.held + len(hits)
        taken = self.pool.idle(hits)
        free = self.pool.free - taken - (self._watermark_blocks if self.running else 0)
        if max(self._blocks(live.tokens) - held, 0) > free:
            return None
        missing = max(self._blocks(computed + new) - held, 0)
        if missing > free - (self._reserved_blocks() if loads else 0):
            return None
        if fresh:
            self.pool.adopt(live, hits)
        if missing:
            self.pool.grow(live, missing)
        live.computed = computed
        self._admitted(live, loads)
        if loads:
            live.status = Status.LOADING
            self._loading += 1
            self._prefills[live] = None
        else:
            self._cache_chunk(live, computed + new)
        return new

    def _start(self, live: Live, new: int) -> None:
        self.running.append(live)
        live.status = Status.RUNNING
        live.turn = self._turns
        self._turns += 1
        if live.computed + new < live.tokens:
            self._prefills[live] = None

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._server.block_size)

    def _reserved_blocks(self) -> int:
        return sum(max(self._blocks(live.tokens) - live.held, 0) for live in self._prefills)

    # ---- after scheduling ----

    def advance(self, step: Step) -> None:
        """Computed tokens go past the step; who samples in it is known."""
        for live, new in step.scheduled.items():
            live.computed += new
            live.in_flight += new
            live.prefilling = live.computed < live.tokens + live.placeholders
            if not live.prefilling:
                self._prefills.pop(live, None)
                step.sampling.add(live)
                live.placeholders += self._server.asynchronous

    def finish(self, live: Live) -> None:
        """Its last token is out. Not taken out of the running list."""
        self.pool.release(live, again=False)
        self._prefills.pop(live, None)
        live.status = Status.FINISHED
        self.blocked = False
