"""Measures what preemptions cost while the engine runs.

Needs a step-time model, which predicts what a step would have taken undisturbed. Each cost is reported once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvpolicy.attribution import LiveCosts, StepTimeModel
from kvpolicy.attribution.ledger import OpenPreemption, Step
from kvpolicy.events import Outcome
from kvpolicy_vllm.plugin.host_copies import Settled
from kvpolicy_vllm.plugin.messages import StepJobs
from kvpolicy_vllm.plugin.observers import Observer, Tally
from kvpolicy_vllm.plugin.step_parts import fill_parts


class CostMeter(Observer):
    """Reports every complete cost as the event ``measured``."""

    trouble = "a preemption's cost could not be measured (counted as measuring_failed)"
    given_up = "measuring failed too often in a row: no more costs are measured and learned from"

    def __init__(self, step_time: StepTimeModel, tell: Callable[..., None], tally: Tally) -> None:
        self._live = LiveCosts(step_time)
        self._tell = tell
        self._tally = tally

    def copies_begin(self, jobs: StepJobs, preemptions: Mapping[int, str]) -> None:
        for copy_id, preemption_id in preemptions.items():
            self._live.copy_begins(copy_id, preemption_id)

    def copied(self, settled: Settled, step: int) -> None:
        slowest = settled.slowest
        self._live.copy_ends(slowest.copy_id, settled.copy.preemption_id, slowest.start_s, slowest.end_s)

    def closed(self, opened: OpenPreemption, outcome: Outcome) -> None:
        self._live.closed(opened.preemption_id, None if opened.mixed else opened.executed, outcome.ended)

    def done(self, step: Step[OpenPreemption], output: Any, scheduler: Any, began_s: float, now: float) -> None:
        fill_parts(step, output)
        repeated = [(part.preemption_id, part.parts) for part in step.repeated] if step.repeated else ()
        for cost in self._live.step(step.parts, step.scheduled_requests, began_s, now, step.lost, repeated):
            # An aborted preemption has only part of a cost; after a failed copy the cost mixes both options.
            if cost.ended == "resumed" and cost.executed is not None:
                self.failures = 0
                self._tell("measured", cost)

    def begin_afresh(self) -> bool:
        """Drop all measurements under way."""
        self._tally.add("measuring_failed")
        self._live = LiveCosts(self._live.model)
        return super().begin_afresh()

    def __len__(self) -> int:
        """Number of preemptions being measured."""
        return len(self._live._accounts) + len(self._live._early)
