"""Steps taken without touching everybody: the crowd decodes, the few others are scheduled one by one.

Whatever the crowd cannot do exactly as vLLM would (a block is missing, the budget does not reach everybody) is refused,
and the plain scheduler takes the step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvpolicy.arrays import Floats
from kvpolicy.simulator.base import LOAD, Server, StepLoad
from kvpolicy.simulator.builtin.decode_batch import Crowd
from kvpolicy.simulator.builtin.live_request import Live, Status, Step
from kvpolicy.simulator.builtin.scheduler import Scheduler

MAX_STEPS = 2048
"""Taken at once."""


class Stepper:
    """Keeps the crowd, and schedules by it where it can."""

    def __init__(self, server: Server, scheduler: Scheduler) -> None:
        self.crowd = Crowd(server.block_size, int(server.asynchronous))
        self._server = server
        self._scheduler = scheduler
        self._outside: list[Live] = []
        """Running requests that are not of the crowd, in their order."""
        self._through: list[Live] = []
        """Those who have just left it, their last token being on its way."""

    def schedule(self, step: Step, flying: Sequence[Step]) -> bool:
        """Fill ``step``; False, and nothing done, where the plain scheduler has to."""
        if self._server.asynchronous:  # before anything is counted: they take neither budget nor blocks
            self._through += self.crowd.through(self._scheduler.pool)
        prefills = self._gather(flying)
        if prefills is None or not self._fits(prefills):
            return False
        scheduler, crowd = self._scheduler, self.crowd
        step.through, self._through = self._through, []
        step.crowd = len(crowd)
        step.crowd_read = crowd.read_tokens + step.crowd
        crowd.step(scheduler.pool)
        budget = self._server.token_budget - step.crowd
        if prefills:
            budget = scheduler.run(step, budget, len(scheduler.running) - len(prefills))
        if budget and (prefills or not scheduler.blocked):
            before = len(scheduler.running)
            scheduler.admit(step, budget)
            self._outside += scheduler.running[before:]
        scheduler.advance(step)
        if prefills:
            scheduler.blocked = False  # what they need no more, a load may have
        if not self._server.asynchronous:
            step.through = crowd.through(scheduler.pool)
        return True

    def stand_back(self, flying: Sequence[Step]) -> None:
        """Nobody is of the crowd any more: the plain scheduler finds everything as it left it."""
        asynchronous = self._server.asynchronous
        clock = self.crowd.clock
        members = sorted([*self.crowd.dissolve(self._scheduler.pool), *self._through], key=lambda live: live.turn)
        for step in flying if asynchronous else ():
            listed = {live: 1 for live in members if live.joined < clock}
            step.scheduled = listed | step.scheduled
            step.sampling |= set(listed)
            step.crowd = 0
        self._outside, self._through = [], []

    def stood_back(self) -> None:
        """The plain scheduler has taken a step."""
        self._outside = list(self._scheduler.running)

    def _gather(self, flying: Sequence[Step]) -> list[Live] | None:
        """Who can joins the crowd; returns those in the middle of their prefill, None where somebody is neither."""
        prefills: list[Live] = []
        for live in self._outside:
            if live.status is not Status.RUNNING or self._scheduler.last_token_is_coming(live):
                continue
            if live.tokens + live.placeholders - live.computed > 1:
                prefills.append(live)
            elif self._regular(live, flying) and not prefills:
                self.crowd.join(live)
            else:
                return None
        self._outside = prefills
        if prefills and prefills[0].turn < self.crowd.latest_turn:
            return None
        return prefills

    def _regular(self, live: Live, flying: Sequence[Step]) -> bool:
        """Whether it has a token in, or from, the step before this one, as the crowd has."""
        if self._server.asynchronous:
            return bool(flying) and live in flying[-1].sampling
        return live.last_s == self.crowd.last_s

    def _fits(self, prefills: list[Live]) -> bool:
        """Whether budget and blocks reach everybody who runs."""
        budget = self._server.token_budget - len(self.crowd)
        if budget < 0:
            return False
        missing = self.crowd.missing_blocks()
        for live in prefills:
            new = min(live.tokens + live.placeholders - live.computed, budget)
            missing += max(-(-(live.computed + new) // self._server.block_size) - live.held, 0)
            budget -= new
        return missing <= self._scheduler.pool.free

    # ---- many steps at once ----

    def leap(self, flying: Sequence[Step]) -> int:
        """How many steps can be taken in which nothing happens but decoding, as far as time does not matter."""
        if self._outside or not len(self.crowd) or len(self.crowd) > self._server.token_budget:
            return 0
        scheduler = self._scheduler
        if scheduler.waiting_requests and not scheduler.blocked:
            return 0
        if any(step.scheduled or step.through or step.saves or step.loads for step in flying):
            return 0
        most = min(self.crowd.next_end(), MAX_STEPS)
        return self.crowd.steps_within(scheduler.pool.free, most) if most > 1 else 0

    def load(self, ahead: int) -> StepLoad:
        """What the crowd computes in a step, that many steps ahead."""
        count = len(self.crowd)
        return StepLoad(count, count, self.crowd.read_tokens + count * (ahead + 1), 0, 0, 0)

    def loads(self, steps: int) -> Floats:
        """What those steps compute: rows of :data:`LOAD` columns."""
        count = len(self.crowd)
        found = np.zeros((steps, len(LOAD)))
        found[:, 0] = found[:, 1] = count
        found[:, 2] = self.crowd.read_tokens + count * np.arange(1, steps + 1)
        return found
