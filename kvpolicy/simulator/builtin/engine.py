"""The built-in simulator: the engine with its time and what happens in it, and ``Builtin``, which runs one."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from operator import attrgetter

import numpy as np

from kvpolicy.errors import InputError
from kvpolicy.policy import Policy
from kvpolicy.simulator.base import NULL_BLOCK, DecisionObserver, Run, Server, Sink, Times, load_of
from kvpolicy.simulator.builtin import costs
from kvpolicy.simulator.builtin.arrival_queue import Arrivals
from kvpolicy.simulator.builtin.blocks import pool_for, shared_keys
from kvpolicy.simulator.builtin.fast_path import Stepper
from kvpolicy.simulator.builtin.host_copies import CopyBook
from kvpolicy.simulator.builtin.live_request import Copy, Live, Status, Step
from kvpolicy.simulator.builtin.preemption import Preemptions
from kvpolicy.simulator.builtin.scheduler import Scheduler, Victims, VllmVictims
from kvpolicy.simulator.builtin.trace_writer import Journal
from kvpolicy.simulator.link_queues import LinkQueues
from kvpolicy.simulator.sinks import FIXED_DAY, Identity
from kvpolicy.simulator.summary import Tallied
from kvpolicy.workload import Request, Source

COMPUTED = attrgetter("computed")
FEW_STEPS = 16
"""Up to here a number at a time is faster than arrays."""


class Engine:
    """One run, step by step. ``identity``: all that it follows from; the others: see :class:`Builtin`."""

    def __init__(
        self,
        identity: Identity,
        journal: Journal,
        victims: Victims,
        leap: bool,
        on_decision: DecisionObserver | None = None,
    ) -> None:
        self.server = server = identity.server
        self.times = times = identity.times
        self.journal = journal
        self.tallied = Tallied(times)
        self.now_s = 0.0
        self.arrivals = Arrivals(identity.requests, self._refuse)
        self.copies = CopyBook(server)
        self.link: LinkQueues[Copy] = LinkQueues(server, times)
        self.preemptions = Preemptions(server, identity.policy, identity.seed, journal, self.tallied, on_decision)
        pool = pool_for(server.device_blocks, server.block_size, server.prefix_caching)
        self.scheduler = Scheduler(server, pool, self.copies, victims, self._preempting, self._admitted)
        self.present = 0
        """Requests that have arrived and are not through."""
        self.flying: deque[Step] = deque()
        self.stepper = Stepper(server, self.scheduler)
        self._leaps = leap
        self._asynchronous = server.asynchronous
        self._step = Step(-1)
        self._steps = 0
        self._device_free_s = 0.0

    def run(self) -> None:
        """Serve everybody."""
        while True:
            self.arrive()
            if self.present:
                if self._leaps and self.leap():
                    continue
                self.flying.append(self.begin_step())
                if self._asynchronous and len(self.flying) < 2:
                    continue
            elif not self.flying:
                if self.arrivals.next_s is None:
                    return
                self.now_s = max(self.now_s, self.arrivals.next_s)
                continue
            self.end_step(self.flying.popleft())

    # ---- arrivals ----

    def arrive(self) -> None:
        next_s = self.arrivals.next_s
        if next_s is None or next_s > self.now_s:
            return
        for arrival_s, number, request in self.arrivals.until(self.now_s):
            keys = shared_keys(request, self.server.block_size) if self.server.prefix_caching else ()
            self.scheduler.arrive(Live(number, request, arrival_s, keys))
            self.present += 1

    def _refuse(self, number: int, request: Request) -> None:
        server = self.server
        if request.prompt_tokens < 1 or request.output_tokens < 1:
            raise InputError(f"request {number}: {request}: both lengths should be 1 or more")
        if request.total_tokens > server.max_model_len:
            raise InputError(
                f"request {number} has {request.total_tokens} tokens, prompt and output; max_model_len is "
                f"{server.max_model_len}"
            )
        blocks = -(-(request.total_tokens - 1) // server.block_size)
        if blocks > server.device_blocks:
            raise InputError(
                f"request {number} needs {blocks} blocks of {server.block_size} tokens for its "
                f"{request.total_tokens} tokens; device_blocks is {server.device_blocks}"
            )

    # ---- a step begins ----

    def begin_step(self) -> Step:
        """Schedule a step now and send it to the device."""
        step = self._step = Step(self._steps)
        self._steps += 1
        if not self._leaps or not self.stepper.schedule(step, self.flying):
            self.stepper.stand_back(self.flying)
            self.scheduler.schedule(step)
            self.stepper.stood_back()
        self.compose(step)
        self.launch(step)
        return step

    def compose(self, step: Step) -> None:
        """What the step is made of, and what of it is computed again; computed tokens are advanced past it."""
        if step.scheduled:
            step.compose(step.scheduled.values(), map(COMPUTED, step.scheduled))
            if self.preemptions.ledger.lost:
                self.preemptions.count(step)
        if step.crowd:
            step.scheduled_tokens += step.crowd
            step.scheduled_requests += step.crowd
            step.decode_requests += step.crowd
            step.kv_read_tokens += step.crowd_read

    def launch(self, step: Step) -> None:
        """When it runs, and what it copies."""
        if self.copies.waiting:
            step.to_save, step.to_load = self.copies.take()
            step.saves, step.loads = len(step.to_save), len(step.to_load)
        self.note(step)
        begins_s = max(self.now_s, self._device_free_s)
        computes_s = costs.seconds(self.times, load_of(step))
        step.began_s = begins_s
        if step.saves or step.loads or self.link.running:
            saves = [(copy, copy.blocks) for copy in step.to_save]
            loads = [(copy, copy.load_blocks) for copy in step.to_load]
            step.end_s = self.link.step(saves, loads, begins_s, computes_s)
        else:
            step.end_s = begins_s + computes_s
        if not step.scheduled_tokens and not step.lost and step.end_s <= self.now_s:
            step.end_s = self._woken_s(begins_s)
        self._device_free_s = step.end_s

    def note(self, step: Step) -> None:
        """Who runs and waits, and how much memory is taken."""
        step.running_requests, step.waiting_requests = len(self.scheduler.running), self.scheduler.waiting_requests
        step.used_blocks = self.server.device_blocks - self.scheduler.pool.free + NULL_BLOCK

    def _woken_s(self, now_s: float) -> float:
        """When an engine that can compute nothing is next told something."""
        times_s = [at_s for at_s in (self.link.next_end_s(), self.arrivals.next_s) if at_s is not None]
        if not times_s:
            raise RuntimeError(f"at {now_s} s {self.present} requests wait and nothing can ever be scheduled")
        return max(now_s, min(times_s))

    # ---- a step ends ----

    def end_step(self, step: Step) -> None:
        """Its output is back."""
        self.now_s = max(self.now_s, step.end_s)
        self._take_tokens(step)
        if step.repeated or self.link.running:
            costs.charge(step, self.link.running, self.times)
        if self.link.running:
            self._take_copies()
        self.preemptions.back(step, self.now_s)
        self.preemptions.settle()
        self._count_step(step)
        self.stepper.crowd.last_s = self.now_s

    def _take_tokens(self, step: Step) -> None:
        left = self._take_crowd(step) if step.crowd else []
        for live, new in step.scheduled.items():
            live.in_flight -= new
            stale = live.stale > 0
            if stale:
                live.stale -= new
                self.scheduler.blocked = False
            if live.status is Status.FINISHED or live not in step.sampling:
                continue
            self.take_token(live, stale)
            if live.outputs == live.request.output_tokens:
                left.append(live)
                self.finish(live)
        self._leave(left)

    def _take_crowd(self, step: Step) -> list[Live]:
        """A token for everybody in the crowd; the last one for those who are through."""
        self.tallied.itl.add(self.now_s - self.stepper.crowd.last_s, step.crowd)
        through = step.through
        if self._asynchronous:  # they were left out of the step after this one, which is scheduled already
            through = self.flying[0].through if self.flying else []
        for live in through:
            self._take_last(live)
        return through

    def _take_last(self, live: Live) -> None:
        """The last token of somebody in the crowd."""
        live.outputs = live.request.output_tokens
        live.placeholders = live.in_flight = 0
        live.last_s = self.now_s
        self.scheduler.pool.cache(live, live.computed)
        self.finish(live)

    def take_token(self, live: Live, stale: bool) -> None:
        live.outputs += 1
        if live.first_s is None:
            live.first_s = self.now_s
        else:
            self.tallied.itl.add(self.now_s - live.last_s)
        live.last_s = self.now_s
        if self.server.asynchronous:
            live.placeholders -= not stale
            if live.status is Status.RUNNING:
                self.scheduler.pool.cache(live, live.computed - live.placeholders)

    def _leave(self, left: list[Live]) -> None:
        for live in left:
            if live in self.scheduler.running:
                self.scheduler.running.remove(live)
            else:  # preempted while its last token was on its way
                self.scheduler.waiting.remove(live)

    def finish(self, live: Live) -> None:
        """Its last token is out: count it, and let the next one of its session come."""
        self.scheduler.finish(live)
        self.preemptions.finished(live, self.copies, self.now_s)
        self.journal.request(live)
        assert live.first_s is not None
        self.tallied.finished(live.arrival_s, live.first_s, live.last_s, live.outputs)
        self.present -= 1
        if live.request.session:
            self.arrivals.finished(live.number, live.request, self.now_s)

    def _take_copies(self) -> None:
        for copy, transfer in self.link.ended(self.now_s):
            if not copy.forgotten:  # as the plugin, which hears no more of a copy once it is forgotten
                self.tallied.moved_bytes += transfer.bytes
                self.journal.transfer(copy, transfer, self._step.number)
            if transfer.direction == "save":
                self.preemptions.saved(copy)
                self.copies.saved(copy)
            else:
                self.copies.loaded(copy)
                copy.live.loaded += copy.load_tokens
                opened = self.preemptions.ledger.of(copy.live)
                if opened is not None:
                    opened.loaded_tokens = copy.load_tokens
                self.scheduler.loaded.add(copy.live)
                self.scheduler.blocked = False

    def _count_step(self, step: Step) -> None:
        if step.scheduled_tokens or step.lost or step.saves or self.present:
            self.tallied.steps += 1
            self.tallied.recomputed_tokens += step.recomputed_tokens
            if self.tallied.beyond is not None and step.scheduled_tokens:
                self.tallied.beyond.add(load_of(step))
            self.journal.step(step)

    # ---- many steps at once ----

    def leap(self) -> bool:
        """Take the steps in which nothing happens but decoding, as many as there are; False where there are none."""
        if len(self.flying) != self._asynchronous or (self.link.running and self.server.link.slowdown):
            return False
        most = self.stepper.leap(self.flying)
        if most < 2:
            return False
        events_s = [at_s for at_s in (self.link.next_end_s(), self.arrivals.next_s) if at_s is not None]
        ends_s = self._ends(most, max(self.now_s, self._device_free_s), min(events_s, default=inf))
        self._take_steps(ends_s)
        return True

    def _ends(self, most: int, began_s: float, next_s: float) -> list[float]:
        """When the step before ended, then the ends of the crowd's next steps: ``most``, or as many as are scheduled
        until it is known that ``next_s`` has passed."""
        times, stepper = self.times, self.stepper
        first_s = times.step_s(stepper.load(0))
        if next_s < inf and first_s > 0.0:
            most = min(most, max(0, int((next_s - began_s) / first_s)) + 2)
        if most > FEW_STEPS:
            ends_s = np.cumsum(np.concatenate([[began_s], times.steps_s(stepper.loads(most))]))
            # Scheduling ahead, a step's end is known when the one after it is scheduled.
            known_s = ends_s[:-1] if self._asynchronous else ends_s[1:]
            found: list[float] = ends_s[: min(most, int(np.searchsorted(known_s, next_s)) + 1) + 1].tolist()
            return found
        found = [began_s, began_s + first_s]
        while len(found) <= most and found[-1 - self._asynchronous] < next_s:
            found.append(found[-1] + times.step_s(stepper.load(len(found) - 1)))
        return found

    def _take_steps(self, ends_s: list[float]) -> None:
        """``ends_s``: see :meth:`_ends`."""
        crowd = self.stepper.crowd
        last_s, members = crowd.last_s, len(crowd)
        for began_s, end_s in pairwise(ends_s):
            self.flying.append(self._crowd_step(began_s, end_s))
            step = self.flying.popleft()
            self.tallied.itl.add(step.end_s - last_s, members)
            self._count_step(step)
            last_s = step.end_s
        self.now_s = crowd.last_s = last_s
        self._device_free_s = ends_s[-1]
        if self.link.running:
            self._take_copies()
            self.preemptions.settle()
        if not self._asynchronous:
            through = crowd.through(self.scheduler.pool)
            for live in through:
                self._take_last(live)
            self._leave(through)

    def _crowd_step(self, began_s: float, end_s: float) -> Step:
        crowd = self.stepper.crowd
        count, read = len(crowd), crowd.read_tokens + len(crowd)
        step = self._step = Step(
            self._steps, began_s, count, count, count, read, crowd=count, crowd_read=read, end_s=end_s
        )
        self._steps += 1
        crowd.step(self.scheduler.pool)
        self.note(step)
        return step

    # ---- told by the scheduler ----

    def _preempting(self, live: Live) -> None:
        self.preemptions.preempting(live, self.scheduler, self.copies, self._step, self.now_s)

    def _admitted(self, live: Live, load_tokens: int) -> None:
        if load_tokens:
            self.copies.begin_load(live, load_tokens, self.server.block_size)
        elif live.copy is not None:  # it fits what is cached here: the copy has served
            self.preemptions.forget(live, self.copies)
        opened = self.preemptions.ledger.of(live)
        if opened is not None and opened.admitted_s is None:
            opened.admitted_s = self.now_s


RULES = ("0.32",)


@dataclass(frozen=True, slots=True)
class Builtin:
    """The built-in simulator. Satisfies :class:`kvpolicy.simulator.Simulator`."""

    leap: bool = True
    """Whether steps in which nothing but decoding happens are taken at once. The results are the same."""
    victims: Victims | None = None
    """Whose blocks are taken; None: as vLLM does."""
    wall: Callable[[], float] = time.perf_counter
    created: str = FIXED_DAY
    """Of the trace's header; fixed, so that equal runs give equal traces."""

    @property
    def name(self) -> str:
        return "builtin"

    def run(
        self,
        requests: Source,
        policy: Policy,
        server: Server,
        times: Times,
        seed: int = 0,
        sink: Sink | None = None,
        on_decision: DecisionObserver | None = None,
    ) -> Run:
        """See :class:`kvpolicy.simulator.Simulator`. Raises ValueError for a server that cannot be, or rules of a
        version that it does not have."""
        _refuse_impossible(server)
        began = self.wall()
        identity = Identity(requests, policy, server, times, seed)
        core = identity.core("sim")
        if sink is not None:
            sink.begin(core, identity.header(core, f"kvpolicy builtin, rules of vllm {server.rules}", self.created))
        journal = Journal(core, sink)
        victims = self.victims or VllmVictims(server.scheduling)
        engine = Engine(identity, journal, victims, self.leap, on_decision)
        engine.run()
        journal.flush()
        trace = None if sink is None else sink.finish()
        return Run(engine.tallied.summary(self.wall() - began), trace)


def _refuse_impossible(server: Server) -> None:
    if server.rules not in RULES:
        raise InputError(f"server.rules is {server.rules!r}; the built-in engine has {', '.join(RULES)}")
    for name in ("block_size", "block_bytes", "device_blocks", "token_budget", "max_running", "max_model_len"):
        if getattr(server, name) < 1:
            raise InputError(f"server.{name} is {getattr(server, name)}, should be 1 or more")
    if not 0 <= server.watermark < 1:
        raise InputError(f"server.watermark is {server.watermark:g}, should be from 0, below 1: a share of the blocks")
    if server.host_blocks < 0 or server.link.slowdown < 0:
        raise InputError(f"server: host_blocks {server.host_blocks} and {server.link}: nothing should be below 0")
