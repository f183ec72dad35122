"""Measures what preemptions cost while the engine runs.

Needs a step-time model, which predicts what a step would have taken undisturbed. Each cost is reported once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from kvpolicy.attribution import LiveCosts, StepTimeModel
from kvpolicy.attribution.ledger import OpenPreemption, Step
from kvpolicy.attribution.step_time import AFTERMATH_STEPS, aftermath, recompute_prices, step_seconds
from kvpolicy.attribution.streaming import NOTHING, Parts
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
        self._before: Parts = NOTHING
        """Parts of the previous step, and of the one before that."""
        self._second_before: Parts = NOTHING
        self._began_s: deque[float] = deque(maxlen=AFTERMATH_STEPS + 1)
        """When this step and these two began."""

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
        parts: Parts = step.parts
        self._began_s.append(began_s)
        repeated: list[tuple[str, Parts]] = []
        if step.repeated:
            repeated = [(part.preemption_id, part.parts) for part in step.repeated]
            self._price(parts, [lost for _, lost in repeated], now - began_s)
        self._second_before, self._before = self._before, parts
        for cost in self._live.step(parts, step.scheduled_requests, began_s, now, step.lost, repeated):
            # An aborted preemption has only part of a cost; after a failed copy the cost mixes both options.
            if cost.ended == "resumed" and cost.executed is not None:
                self.failures = 0
                self._tell("measured", cost)

    def _price(self, parts: Parts, repeated: list[Parts], duration_s: float) -> None:
        """Count what the recomputed tokens of a step added to it, and what its decodes took alone: of these and the
        tokens, :mod:`kvpolicy.headroom` says what there is to win. :func:`kvpolicy.attribution.step_work.step_work`
        finds the same in a trace."""
        live, rest = self._live, [total - sum(again) for total, *again in zip(parts, *repeated, strict=True)]
        model = live.model
        before, second_before = (aftermath(one[0], one[1]) for one in (self._before, self._second_before))
        expected_s = step_seconds(model.fixed_s, model.per_part_s, parts, before, second_before)
        pace = duration_s / expected_s if expected_s > 0 else 0.0
        if live.copied_since(self._began_s[0]):
            pace = min(pace, live.pace)
        added_s, decodes_s = recompute_prices(model, parts, rest, duration_s, pace)
        self._tally.add("recompute_microseconds", 1e6 * float(added_s))
        self._tally.add("beside_recompute_microseconds", 1e6 * float(decodes_s))
        self._tally.add("beside_recompute_tokens", max(0, rest[1]))

    def begin_afresh(self) -> bool:
        """Drop all measurements under way."""
        self._tally.add("measuring_failed")
        self._live = LiveCosts(self._live.model)
        return super().begin_afresh()

    def __len__(self) -> int:
        """Number of preemptions being measured."""
        return len(self._live._accounts) + len(self._live._early)
