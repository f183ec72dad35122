"""Summary statistics of a run, in 32 bytes per request and nothing per token; the rate of its output in the steady
part; and the number of its steps that lay outside the range that the hardware model was measured in."""

from __future__ import annotations

from collections.abc import Mapping
from math import nan
from typing import Protocol, runtime_checkable

import numpy as np

from kvpolicy.arrays import Flags, Floats
from kvpolicy.events import KINDS, Kind
from kvpolicy.latency import NO_SLO, ClassTally, Slo
from kvpolicy.simulator.base import Server, StepLoad, Summary, Times
from kvpolicy.simulator.work_count import WorkCount

MAX_POINTS = 8192
"""Points of the curve of output tokens that are kept."""
STEADY = (0.25, 0.75)
"""Shares of all output tokens between which the rate is taken."""


class OutputCurve:
    """How many output tokens were out at which time, between the points linear.

    A long run has every second, fourth, ... of its steps as a point, so that memory is bounded and at least half of
    ``MAX_POINTS`` remain.
    """

    def __init__(self) -> None:
        self._times_s: list[float] = []
        self._counts: list[int] = []
        self._stride = 1
        self._skipped = 0
        self._last_s = 0.0
        self.tokens = 0

    def add(self, at_s: float, tokens: int) -> None:
        """Count the tokens of a step that ended then. Steps come in the order of their ends."""
        self.tokens += tokens
        self._last_s = at_s
        self._skipped += 1
        if self._skipped == self._stride:
            self._skipped = 0
            self._times_s.append(at_s)
            self._counts.append(self.tokens)
            if len(self._counts) >= MAX_POINTS:
                self._thin_out()

    def extend(self, ends_s: list[float], tokens: int) -> None:
        """Count steps that ended then, each with that many tokens."""
        first = self._stride - 1 - self._skipped
        self._times_s += ends_s[first :: self._stride]
        total = self.tokens + len(ends_s) * tokens
        self._counts += range(self.tokens + (first + 1) * tokens, total + 1, self._stride * tokens)
        self._skipped = (self._skipped + len(ends_s)) % self._stride
        self.tokens, self._last_s = total, ends_s[-1]
        while len(self._counts) >= MAX_POINTS:
            self._thin_out()

    def _thin_out(self) -> None:
        self._skipped += self._stride * (len(self._counts) % 2)
        self._times_s, self._counts = self._times_s[1::2], self._counts[1::2]
        self._stride *= 2

    def steady_tok_s(self, began_s: float) -> float:
        """The rate between the times at which the shares ``STEADY`` of the tokens were out; nan without tokens or time.

        ``began_s``: when the first tokens were asked for.
        """
        times_s = [began_s, *self._times_s, self._last_s]
        counts = [0, *self._counts, self.tokens]
        low, high = (share * self.tokens for share in STEADY)
        low_s, high_s = np.interp((low, high), counts, times_s)
        return float((high - low) / (high_s - low_s)) if high_s > low_s else nan


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
            tally = self._tallies[class_name] = ClassTally(self._slo)
        return tally

    def summary(self, wall_s: float) -> Summary:
        """``wall_s``: wall time of the simulation. Times that no request had are nan."""
        beyond = self.beyond
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
