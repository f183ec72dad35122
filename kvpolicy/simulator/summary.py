"""Summary statistics of a run, in 32 bytes per request and nothing per token; and the number of its steps that lay
outside the range that the hardware model was measured in."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from math import log, nan
from typing import Protocol, runtime_checkable

import numpy as np

from kvpolicy.arrays import Flags, Floats, Ints
from kvpolicy.events import KINDS, Kind
from kvpolicy.simulator.base import UNKNOWN, Server, StepLoad, Summary, Tail, Times
from kvpolicy.simulator.work_count import WorkCount

MIN_S = 1e-9
MAX_S = 1e7
RATIO = 1.008
"""Ratio of a bin's edges. A quantile is reported as the geometric middle of its bin, within 0.4%."""
MAX_BUFFERED = 4096
"""Entries that are buffered before they are sorted into bins."""


class Histogram:
    """Counts of positive numbers in bins of equal ratio. Quantiles are within 0.4%; values below 1e-9 count as 0."""

    def __init__(self) -> None:
        self._counts: Ints = np.zeros(int(log(MAX_S / MIN_S) / log(RATIO)) + 2, dtype=np.int64)
        self._values: list[float] = []
        self._weights: list[int] = []
        self.count = 0

    def add(self, value: float, weight: int = 1) -> None:
        self._values.append(value)
        self._weights.append(weight)
        if len(self._values) >= MAX_BUFFERED:
            self._sort_in()

    def extend(self, values: list[float], weight: int) -> None:
        """Add all ``values``, each ``weight`` times."""
        self._values += values
        self._weights += [weight] * len(values)
        if len(self._values) >= MAX_BUFFERED:
            self._sort_in()

    def quantile(self, level: float) -> float:
        """The value below which a share ``level`` of the values lies; nan without values."""
        self._sort_in()
        if not self.count:
            return nan
        at = int(np.searchsorted(np.cumsum(self._counts), level * self.count, side="left"))
        return 0.0 if at == 0 else MIN_S * RATIO ** (at - 0.5)

    def _sort_in(self) -> None:
        values = np.maximum(np.asarray(self._values), 0.0)
        weights = np.asarray(self._weights, dtype=np.int64)
        with np.errstate(divide="ignore"):
            bins = np.floor(np.log(values / MIN_S) / log(RATIO)) + 1
        at = np.clip(bins, 0, len(self._counts) - 1).astype(np.int64)
        np.add.at(self._counts, at, weights)
        self.count += int(weights.sum())
        self._values, self._weights = [], []


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

    def __init__(self, server: Server, times: Times) -> None:
        """``times``: the hardware model, for what there is to win and for counting steps outside its measured range."""
        self.beyond = beyond_of(times)
        self.work = WorkCount(server, times)
        self.steps = 0
        self.recomputed_tokens = 0
        self.moved_bytes = 0
        self.preemptions: dict[Kind, int] = dict.fromkeys(KINDS, 0)
        self.itl = Histogram()
        self.output = OutputCurve()
        self._output_tokens = 0
        self._itl_s = 0.0
        self._itl_tokens = 0
        self._e2e_s = array("d")
        self._ttft_s = array("d")
        self._longest_gap_s = array("d")
        self._e2e_per_token_s = array("d")
        self._first_arrival_s: float | None = None
        self._last_token_s = 0.0

    def finished(
        self, arrival_s: float, first_s: float, last_s: float, output_tokens: int, longest_gap_s: float
    ) -> None:
        """Count a finished request. Its inter-token times are added to :attr:`itl` as they occur, and its tokens to
        :attr:`output`. ``longest_gap_s``: the longest of those times, of any value where there is a single token."""
        self._e2e_s.append(last_s - arrival_s)
        self._e2e_per_token_s.append((last_s - arrival_s) / output_tokens)
        if output_tokens > 1:
            self._longest_gap_s.append(longest_gap_s)
        self._ttft_s.append(first_s - arrival_s)
        self._itl_s += last_s - first_s
        self._itl_tokens += output_tokens - 1
        self._output_tokens += output_tokens
        if self._first_arrival_s is None or arrival_s < self._first_arrival_s:
            self._first_arrival_s = arrival_s
        self._last_token_s = max(self._last_token_s, last_s)

    def summary(self, wall_s: float) -> Summary:
        """``wall_s``: wall time of the simulation. Times that no request had are nan."""
        beyond = self.beyond
        makespan_s = 0.0 if self._first_arrival_s is None else self._last_token_s - self._first_arrival_s
        itl_mean = self._itl_s / self._itl_tokens if self._itl_tokens else nan
        return Summary(
            requests=len(self._e2e_s),
            throughput_tok_s=self._output_tokens / makespan_s if makespan_s > 0 else nan,
            e2e_s=_tail(self._e2e_s),
            ttft_s=_tail(self._ttft_s),
            itl_s=Tail(itl_mean, self.itl.quantile(0.5), self.itl.quantile(0.99)),
            preemptions=_frozen(self.preemptions),
            recomputed_tokens=self.recomputed_tokens,
            moved_bytes=self.moved_bytes,
            makespan_s=makespan_s,
            steps=self.steps,
            simulator_wall_s=wall_s,
            extrapolated_steps=None if beyond is None else beyond.steps,
            headroom=self.work.headroom(),
            steady_tok_s=self.output.steady_tok_s(self._first_arrival_s or 0.0),
            longest_gap_s=_tail(self._longest_gap_s),
            e2e_per_token_s=_tail(self._e2e_per_token_s),
            longest_pause_s=max(self._longest_gap_s, default=nan),
        )


def _frozen(counts: Mapping[Kind, int]) -> Mapping[Kind, int]:
    return {kind: counts[kind] for kind in KINDS}


def _tail(seconds: array[float]) -> Tail:
    if not seconds:
        return UNKNOWN
    values = np.frombuffer(seconds, dtype=np.float64)
    p50, p99 = np.quantile(values, (0.5, 0.99))
    return Tail(float(values.mean()), float(p50), float(p99))


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
