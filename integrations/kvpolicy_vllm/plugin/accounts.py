"""What steps, copies and preemptions took: into the trace where one is recorded, into the metrics where d0 is known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvpolicy.attribution import LiveCost, LiveCosts, StepTimeModel
from kvpolicy.events import Outcome
from kvpolicy_vllm.plugin.copies import CopyBook, Settled
from kvpolicy_vllm.plugin.journal import Journal
from kvpolicy_vllm.plugin.ledger import OpenPreemption, Step, StepClock, compose
from kvpolicy_vllm.plugin.messages import StepJobs, Transfer
from kvpolicy_vllm.plugin.metrics import Tally

MOST_FAILURES = 5
"""So many failures with no cost told in between, and measuring is given up."""


class Accounts:
    """Of one engine core. Where nothing is recorded and no d0 is known, a step costs nothing here."""

    def __init__(self, tally: Tally, journal: Journal | None) -> None:
        self.journal = journal
        self._tally = tally
        self._clock = StepClock()
        self._live: LiveCosts | None = None
        self._failures = 0

    def measure_by(self, step_time: StepTimeModel | None) -> None:
        """Measure what preemptions cost by this d0 from now on; None: by none, so not at all."""
        self._live = None if step_time is None else LiveCosts(step_time)
        self._failures = 0

    def observed(self) -> None:
        """A cost was measured, told and learned from."""
        self._failures = 0

    def begin_afresh(self) -> bool:
        """Measuring failed: what was being measured is dropped. False where it failed too often and is given up."""
        self._tally.add("measuring_failed")
        self._failures += 1
        if self._live is None or self._failures >= MOST_FAILURES:
            self._live = None
            return False
        self._live = LiveCosts(self._live.model)
        return True

    def leave_out(self, seconds: float) -> None:
        """Time since the last step that a tool took for itself: it is no part of the next one."""
        self._clock.leave_out(seconds)

    # ---- steps ----

    def scheduled(self, step: Step, scheduled: Mapping[str, int], scheduler: Any) -> None:
        """After ``schedule()``: what the step is made of."""
        if self.journal is not None or self._live is not None:
            compose(step, scheduled, scheduler.requests)
        if self.journal is not None:
            self.journal.repeated(step.repeated)
            self.journal.occupancy(step, scheduler)

    def done(self, step: Step, output: Any, scheduler: Any, now: float) -> tuple[LiveCost, ...]:
        """After ``update_from_output()``; returns the resumed preemptions whose cost is now known in full."""
        if self.journal is None and self._live is None:
            return ()
        began_s = self._clock.began_s(step, now, scheduler.get_num_unfinished_requests() > 0)
        if self.journal is not None and (step.scheduled_tokens or step.lost or step.saves or scheduler.requests):
            self.journal.step(step, output, scheduler, began_s, now)
        if self._live is None:
            return ()
        repeated = [(part.preemption_id, part.parts) for part in step.repeated]
        costs = self._live.step(step.parts, step.scheduled_requests, began_s, now, step.lost, repeated)
        # Until an abort it is a part of a cost; where a copy failed it is that of both options.
        whole = tuple(cost for cost in costs if cost.ended == "resumed" and cost.executed is not None)
        for cost in whole:
            assert cost.executed is not None
            self._tally.add("measured_preemptions", executed=cost.executed)
            self._tally.raise_by("measured_cost_microseconds", cost.engine_s * 1e6, executed=cost.executed)
        return whole

    # ---- preemptions ----

    def closed(self, opened: OpenPreemption, outcome: Outcome) -> None:
        if self._live is not None:
            self._live.closed(opened.preemption_id, None if opened.mixed else opened.executed, outcome.ended)
        if self.journal is not None:
            self.journal.outcome(outcome)

    # ---- copies ----

    def copies_begin(self, jobs: StepJobs, copies: CopyBook) -> None:
        if self._live is None:
            return
        for job in jobs.saves:
            self._live.copy_begins(copies.preemption_of(job), "save")
        for job in jobs.loads:
            self._live.copy_begins(copies.preemption_of(job), "load")

    def copied(self, settled: Settled, slowest: Transfer, moved: int, step: int) -> None:
        if self._live is not None:
            self._live.copy_ends(settled.copy.preemption_id, settled.direction, slowest.start_s, slowest.end_s)
        if self.journal is not None:
            self.journal.transfer(settled, slowest, moved, step)

    def copies_lost(self, preemption_ids: Iterable[str]) -> None:
        """Their saves were forgotten before they were confirmed: nobody will say how long they took."""
        if self._live is not None:
            for preemption_id in preemption_ids:
                self._live.copy_lost(preemption_id, "save")
