"""Summary statistics of a run, in 40 bytes per request and nothing per token; the rate of its output in the steady
part; and the number of its steps that lay outside the range that the hardware model was measured in."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Protocol, runtime_checkable

import numpy as np

from kvpolicy.arrays import Flags, Floats
from kvpolicy.events import KINDS, Kind
from kvpolicy.latency import NO_SLO, ClassTally, OutputCurve, Slo
from kvpolicy.prefix_hits import PrefixHits
from kvpolicy.simulator.base import Server, StepLoad, Summary, Times
from kvpolicy.simulator.work_count import WorkCount


class SummaryBuilder:
    """Accumulates a :class:`Summary` while requests are served."""

    def __init__(self, server: Server, times: Times, slo: Slo = NO_SLO) -> None:
        """``times``: the hardware model, for what there is to win and for counting steps outside its measured range.
        ``slo``: deadlines for requests that bring none."""
        self.beyond = beyond_of(times)
        self.work = WorkCount(server, times)
        self.steps = 0
        self.recomputed_tokens = 0
        self.moved_bytes = 0
        self.preemptions: dict[Kind, int] = dict.fromkeys(KINDS, 0)
        self.output = OutputCurve()
        self._slo = slo
        self._tallies: dict[str, ClassTally] = {}

    def tally_of(self, class_name: str) -> ClassTally:
        """What counts the requests of a class: their inter-token times as they occur, and each one as it finishes."""
        tally = self._tallies.get(class_name)
        if tally is None:
            if len(self._tallies) == 1:
                self._only.curve = deepcopy(self.output)
            tally = self._tallies[class_name] = ClassTally(self._slo)
        return tally

    @property
    def _only(self) -> ClassTally:
        return next(iter(self._tallies.values()))

    @property
    def several(self) -> bool:
        """Whether there are several classes, whose outputs are to be noted each by itself."""
        return len(self._tallies) > 1

    def note_classes(self, at_s: float) -> None:
        """Note how many output tokens of each class are out by now."""
        for tally in self._tallies.values():
            tally.note(at_s)

    def summary(self, wall_s: float) -> Summary:
        """``wall_s``: wall time of the simulation. Times that no request had are nan."""
        beyond = self.beyond
        if len(self._tallies) == 1:
            self._only.curve = self.output
        classes = {name: self._tallies[name].summary() for name in sorted(self._tallies)}
        tallies = list(self._tallies.values())
        whole_tally = tallies[0] if len(tallies) == 1 else ClassTally.merged(tallies)
        whole = next(iter(classes.values())) if len(tallies) == 1 else whole_tally.summary()
        return Summary(
            requests=whole.requests,
            throughput_tok_s=whole.throughput_tok_s,
            e2e_s=whole.e2e_s,
            ttft_s=whole.ttft_s,
            itl_s=whole.itl_s,
            preemptions=_frozen(self.preemptions),
            recomputed_tokens=self.recomputed_tokens,
            moved_bytes=self.moved_bytes,
            makespan_s=whole.makespan_s,
            steps=self.steps,
            simulator_wall_s=wall_s,
            extrapolated_steps=None if beyond is None else beyond.steps,
            headroom=self.work.headroom(),
            steady_tok_s=self.output.steady_tok_s(whole_tally.first_arrival_s if len(whole_tally) else 0.0),
            longest_gap_s=whole.longest_gap_s,
            e2e_per_token_s=whole.e2e_per_token_s,
            classes=classes,
            fairness=whole.fairness,
            deadline_requests=whole.deadline_requests,
            slo_share=whole.slo_share,
            goodput_req_s=whole.goodput_req_s,
            longest_pause_s=whole.longest_pause_s,
            prefix_hits=PrefixHits.total(one.prefix_hits for one in classes.values()),
            preemption_causes=dict(self.work.causes),
            by_prompt_length=whole.by_prompt_length,
        )


def _frozen(counts: Mapping[Kind, int]) -> Mapping[Kind, int]:
    return {kind: counts[kind] for kind in KINDS}


MAX_BUFFERED_STEPS = 4096
"""Steps that are buffered and checked together, which is cheaper than one by one."""


@runtime_checkable
class Bounded(Protocol):
    """Times that know the range they were measured in. ``beyond`` takes rows of
    :data:`~kvpolicy.simulator.base.LOAD` columns and says which lie outside."""

    def beyond(self, loads: Floats) -> Flags: ...


class Beyond:
    """Counts the executed steps that lie outside the measured range."""

    def __init__(self, bounded: Bounded) -> None:
        self._bounded = bounded
        self._loads: list[StepLoad] = []
        self._steps = 0

    def add(self, load: StepLoad) -> None:
        """Count an executed step."""
        self._loads.append(load)
        if len(self._loads) >= MAX_BUFFERED_STEPS:
            self._check_buffered()

    @property
    def steps(self) -> int:
        self._check_buffered()
        return self._steps

    def _check_buffered(self) -> None:
        if self._loads:
            self._steps += int(self._bounded.beyond(np.array(self._loads, np.float64)).sum())
            self._loads = []


def beyond_of(times: Times) -> Beyond | None:
    """A counter for these times; None where they do not know their measured range."""
    step_times = getattr(times, "steps_of", times)
    return Beyond(step_times) if isinstance(step_times, Bounded) else None
