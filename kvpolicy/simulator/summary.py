"""What a run comes to, gathered in flat memory: 16 bytes per request, nothing per token; and how many of its
steps lay beyond what the hardware model was measured at."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from math import log, nan
from typing import Protocol, runtime_checkable

import numpy as np

from kvpolicy.arrays import Flags, Floats, Ints
from kvpolicy.events import KINDS, Kind
from kvpolicy.simulator.base import StepLoad, Summary, Tail, Times

MIN_S = 1e-9
MAX_S = 1e7
RATIO = 1.008
"""Between the edges of a bin; what is told is its geometric middle, so quantiles are off by 0.4% at most."""
WAITING = 4096
"""Entries that are kept before they are sorted into bins."""


class Histogram:
    """Counts of positive numbers in bins of equal ratio. Quantiles are within 0.4%; below 1e-9 it says 0."""

    def __init__(self) -> None:
        self._counts: Ints = np.zeros(int(log(MAX_S / MIN_S) / log(RATIO)) + 2, dtype=np.int64)
        self._values: list[float] = []
        self._weights: list[int] = []
        self.count = 0

    def add(self, value: float, weight: int = 1) -> None:
        self._values.append(value)
        self._weights.append(weight)
        if len(self._values) >= WAITING:
            self._sort_in()

    def extend(self, values: list[float], weight: int) -> None:
        """All ``values``, each ``weight`` times."""
        self._values += values
        self._weights += [weight] * len(values)
        if len(self._values) >= WAITING:
            self._sort_in()

    def quantile(self, level: float) -> float:
        """The value below which that share lies; nan without values."""
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


class Tallied:
    """Grows into a :class:`Summary` while requests are served."""

    def __init__(self, times: Times | None = None) -> None:
        """``times``: where its steps are counted that lie beyond what it was measured at."""
        self.beyond = None if times is None else beyond_of(times)
        self.steps = 0
        self.recomputed_tokens = 0
        self.moved_bytes = 0
        self.preemptions: dict[Kind, int] = dict.fromkeys(KINDS, 0)
        self.itl = Histogram()
        self._output_tokens = 0
        self._itl_s = 0.0
        self._itl_tokens = 0
        self._e2e_s = array("d")
        self._ttft_s = array("d")
        self._first_arrival_s: float | None = None
        self._last_token_s = 0.0

    def finished(self, arrival_s: float, first_s: float, last_s: float, output_tokens: int) -> None:
        """A request is through. Its inter-token times themselves go to :attr:`itl` as they come."""
        self._e2e_s.append(last_s - arrival_s)
        self._ttft_s.append(first_s - arrival_s)
        self._itl_s += last_s - first_s
        self._itl_tokens += output_tokens - 1
        self._output_tokens += output_tokens
        if self._first_arrival_s is None or arrival_s < self._first_arrival_s:
            self._first_arrival_s = arrival_s
        self._last_token_s = max(self._last_token_s, last_s)

    def summary(self, wall_s: float) -> Summary:
        """``wall_s``: what simulating took. Times that nobody had are nan."""
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
        )


def _frozen(counts: Mapping[Kind, int]) -> Mapping[Kind, int]:
    return {kind: counts[kind] for kind in KINDS}


def _tail(seconds: array[float]) -> Tail:
    if not seconds:
        return Tail(nan, nan, nan)
    values = np.frombuffer(seconds, dtype=np.float64)
    p50, p99 = np.quantile(values, (0.5, 0.99))
    return Tail(float(values.mean()), float(p50), float(p99))


STEPS_WAITING = 4096
"""Steps that are kept before they are looked at, which is cheaper than one by one."""


@runtime_checkable
class Bounded(Protocol):
    """Times that know where they were measured; ``beyond``: rows of :data:`~kvpolicy.simulator.base.LOAD` columns
    in, whether each lies outside."""

    def beyond(self, loads: Floats) -> Flags: ...


class Beyond:
    """Counts them."""

    def __init__(self, bounded: Bounded) -> None:
        self._bounded = bounded
        self._loads: list[StepLoad] = []
        self._steps = 0

    def add(self, load: StepLoad) -> None:
        """A step was executed."""
        self._loads.append(load)
        if len(self._loads) >= STEPS_WAITING:
            self._look()

    @property
    def steps(self) -> int:
        self._look()
        return self._steps

    def _look(self) -> None:
        if self._loads:
            self._steps += int(self._bounded.beyond(np.array(self._loads, np.float64)).sum())
            self._loads = []


def beyond_of(times: Times) -> Beyond | None:
    """None for times that do not know where they were measured."""
    within = getattr(times, "steps_of", times)
    return Beyond(within) if isinstance(within, Bounded) else None
