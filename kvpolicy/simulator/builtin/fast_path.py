"""The fast path: the decode batch is advanced in bulk, and the few other running requests are scheduled one by one.

A step that this cannot do exactly as vLLM would (a block is missing, or the token budget does not cover all running
requests) is refused, and the plain scheduler takes it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import inf

import numpy as np

from kvpolicy.arrays import Floats
from kvpolicy.simulator.base import LOAD, Server, StepLoad, Times
from kvpolicy.simulator.builtin.decode_batch import DecodeBatch
from kvpolicy.simulator.builtin.host_copies import HostPool
from kvpolicy.simulator.builtin.live_request import LiveRequest, Status, Step
from kvpolicy.simulator.builtin.scheduler import TURN, Scheduler

MAX_STEPS = 2048
"""Decode steps taken at once."""
FEW_STEPS = 16
"""Up to this many steps, single numbers are faster than arrays."""


class FastPath:
    """Owns the decode batch and schedules with it where it can."""

    def __init__(self, server: Server, scheduler: Scheduler) -> None:
        self.batch = DecodeBatch(server.block_size, int(server.asynchronous))
        self._server = server
        self._scheduler = scheduler
        self._outside: list[LiveRequest] = []
        """Running requests outside the decode batch, in scheduling order."""
        self._finished: list[LiveRequest] = []
        """Requests that have just left the batch while their last token is in flight."""

    def schedule(self, step: Step, steps_in_flight: Sequence[Step]) -> bool:
        """Fill ``step``. Return False, with nothing done, where the plain scheduler has to take it."""
        if self._server.asynchronous:  # before counting: finished requests take neither budget nor blocks
            self._finished += self.batch.pop_finished(self._scheduler.pool)
        prefills = self._sort_outside(steps_in_flight)
        if prefills is None or not self._fits(prefills):
            return False
        scheduler, batch = self._scheduler, self.batch
        step.finished, self._finished = self._finished, []
        step.batch_requests = len(batch)
        step.batch_read_tokens = batch.read_tokens + step.batch_requests
        if batch.others:
            step.batch_others = tuple(batch.others.items())
        batch.step(scheduler.pool)
        budget = self._server.token_budget - step.batch_requests
        if prefills:
            first = bisect_left(scheduler.running, prefills[0].turn, key=TURN)
            budget = scheduler.run(step, budget, first)
        if budget and (prefills or not scheduler.blocked):
            # One that was loaded may stand before others.
            self._outside = sorted([*self._outside, *scheduler.admit(step, budget)], key=TURN)
        scheduler.advance(step)
        scheduler.growth.steps += bool(step.batch_requests or step.scheduled)
        if prefills:
            scheduler.blocked = False  # blocks reserved for prefills may now go to a load
        if not self._server.asynchronous:
            step.finished = batch.pop_finished(scheduler.pool)
        return True

    def dissolve_batch(self, steps_in_flight: Sequence[Step]) -> None:
        """Dissolve the decode batch, so that the plain scheduler finds every request up to date."""
        asynchronous = self._server.asynchronous
        clock = self.batch.clock
        members = sorted([*self.batch.dissolve(self._scheduler.pool), *self._finished], key=TURN)
        for step in steps_in_flight if asynchronous else ():
            listed = {live: 1 for live in members if live.joined < clock}
            step.scheduled = listed | step.scheduled
            step.sampling |= set(listed)
            step.batch_requests = 0
        self._outside, self._finished = [], []

    def after_plain_step(self) -> None:
        """Take over the running list after a step of the plain scheduler."""
        self._outside = list(self._scheduler.running)

    def _sort_outside(self, steps_in_flight: Sequence[Step]) -> list[LiveRequest] | None:
        """Move requests that only decode into the batch.

        Return those still in their prefill; None where a request is neither.
        """
        prefills: list[LiveRequest] = []
        for live in self._outside:
            if live.status is not Status.RUNNING or self._scheduler.last_token_is_coming(live):
                continue
            if live.tokens + live.placeholders - live.computed > 1:
                prefills.append(live)
            elif self._decoded_last_step(live, steps_in_flight) and not prefills:
                self.batch.join(live)
            else:
                return None
        self._outside = prefills
        if prefills and self.batch.latest_turn is not None and prefills[0].turn < self.batch.latest_turn:
            return None
        return prefills

    def _decoded_last_step(self, live: LiveRequest, steps_in_flight: Sequence[Step]) -> bool:
        """Whether the request got a token in the previous step, as every member of the batch did."""
        if self._server.asynchronous:
            return bool(steps_in_flight) and live in steps_in_flight[-1].sampling
        return live.last_s == self.batch.last_s

    def _fits(self, prefills: list[LiveRequest]) -> bool:
        """Whether token budget and free blocks cover all running requests."""
        budget = self._server.token_budget - len(self.batch)
        if budget < 0:
            return False
        missing = self.batch.missing_blocks()
        for live in prefills:
            new = min(live.tokens + live.placeholders - live.computed, budget)
            missing += max(-(-(live.computed + new) // self._server.block_size) - live.held, 0)
            budget -= new
        return missing <= self._scheduler.pool.free

    # ---- many steps at once ----

    def leap_steps(self, steps_in_flight: Sequence[Step], copies: HostPool) -> int:
        """Number of steps in which nothing but decoding happens, events in time left out of account; 0 for none.

        A block that has to be saved before it is evicted ends them.
        """
        if self._outside or not len(self.batch) or len(self.batch) > self._server.token_budget:
            return 0
        scheduler = self._scheduler
        if scheduler.waiting_requests and not scheduler.blocked:
            return 0
        if any(step.scheduled or step.finished or step.saves or step.loads for step in steps_in_flight):
            return 0
        max_steps = min(self.batch.next_end(), MAX_STEPS)
        if max_steps < 2:
            return 0
        blocks = scheduler.pool.free
        if copies.watching:
            wanted = len(self.batch) * (max_steps // self._server.block_size + 1)
            blocks = scheduler.pool.unevicting(min(blocks, wanted), copies.watches)
        return self.batch.steps_within(blocks, max_steps)

    def load(self, ahead: int) -> StepLoad:
        """What the batch computes in the step that is ``ahead`` steps after the next one."""
        count = len(self.batch)
        return StepLoad(count, count, self.batch.read_tokens + count * (ahead + 1), 0, 0, 0)

    def loads(self, steps: int) -> Floats:
        """What the next ``steps`` steps compute: rows of :data:`LOAD` columns."""
        count = len(self.batch)
        loads = np.zeros((steps, len(LOAD)))
        loads[:, 0] = loads[:, 1] = count
        loads[:, 2] = self.batch.read_tokens + count * np.arange(1, steps + 1)
        return loads

    def ends_s(self, times: Times, max_steps: int, began_s: float, next_s: float) -> list[float]:
        """End of the previous step, then the ends of the decode batch's next steps: ``max_steps``, or as many as are
        scheduled before ``next_s`` is known to have passed."""
        first_s = times.step_s(self.load(0))
        if next_s < inf and first_s > 0.0:
            # Clamped before int, which refuses the infinity that a division by a short step may overflow to.
            max_steps = min(max_steps, int(min(max(0.0, (next_s - began_s) / first_s), MAX_STEPS)) + 2)
        if max_steps > FEW_STEPS:
            all_ends_s = np.cumsum(np.concatenate([[began_s], times.steps_s(self.loads(max_steps))]))
            # Scheduling ahead, the end of a step is known only when the next step is scheduled.
            known_s = all_ends_s[:-1] if self._server.asynchronous else all_ends_s[1:]
            ends_s: list[float] = all_ends_s[: min(max_steps, int(np.searchsorted(known_s, next_s)) + 1) + 1].tolist()
            return ends_s
        ends_s = [began_s, began_s + first_s]
        while len(ends_s) <= max_steps and ends_s[-1 - self._server.asynchronous] < next_s:
            ends_s.append(ends_s[-1] + times.step_s(self.load(len(ends_s) - 1)))
        return ends_s
