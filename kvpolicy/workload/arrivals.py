"""When requests arrive: processes with a rate, drawn from a seed, endless and in order."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, islice, repeat
from typing import Protocol

from kvpolicy.workload.requests import WorkloadError

MIN_VARIATION, MAX_VARIATION = 1e-3, 1e3
VARIATIONS = f"from {MIN_VARIATION:g} to {MAX_VARIATION:g}"
"""Standard deviations over means that a gamma distribution is drawn with; beyond them numbers over- or underflow."""

LEAST, MOST = 1e-9, 1e9
WITHIN = f"above 0, from {LEAST:g} to {MOST:g}"
"""Rates, durations, and factors on either: beyond them times over- or underflow."""
MIN_SHAPE, MAX_SHAPE = 1e-2, 1e3
"""Of a Weibull distribution: below, its mean over its scale has no number."""


class Arrivals(Protocol):
    """An arrival process."""

    def times_s(self, rng: random.Random) -> Iterator[float]:
        """Endless arrival times since the workload's start, never falling."""
        ...


def _positive(process: object, **values: float) -> None:
    for name, value in values.items():
        if not LEAST <= value <= MOST:
            raise WorkloadError(f"{type(process).__name__}: {name} is {value}, should be {WITHIN}")


@dataclass(frozen=True, slots=True)
class AtOnce:
    """Everything at time 0."""

    def times_s(self, rng: random.Random) -> Iterator[float]:
        return repeat(0.0)


@dataclass(frozen=True, slots=True)
class Even:
    """The same gap between all, the first after one gap."""

    rate_per_s: float

    def __post_init__(self) -> None:
        _positive(self, rate_per_s=self.rate_per_s)

    def times_s(self, rng: random.Random) -> Iterator[float]:
        number = 0
        while True:
            number += 1
            yield number / self.rate_per_s


@dataclass(frozen=True, slots=True)
class Poisson:
    """Independent arrivals: exponential gaps."""

    rate_per_s: float

    def __post_init__(self) -> None:
        _positive(self, rate_per_s=self.rate_per_s)

    def times_s(self, rng: random.Random) -> Iterator[float]:
        return accumulate(rng.expovariate(self.rate_per_s) for _ in repeat(None))


@dataclass(frozen=True, slots=True)
class Gamma:
    """Gamma-distributed gaps whose standard deviation is ``variation`` times their mean.

    1 is a Poisson process, above 1 arrivals come in bunches, below 1 more evenly.
    """

    rate_per_s: float
    variation: float = 1.0

    def __post_init__(self) -> None:
        _positive(self, rate_per_s=self.rate_per_s)
        if not MIN_VARIATION <= self.variation <= MAX_VARIATION:
            raise WorkloadError(f"Gamma: variation is {self.variation}, should be {VARIATIONS}")

    def times_s(self, rng: random.Random) -> Iterator[float]:
        shape = 1.0 / self.variation**2
        scale_s = 1.0 / (shape * self.rate_per_s)
        return accumulate(rng.gammavariate(shape, scale_s) for _ in repeat(None))


@dataclass(frozen=True, slots=True)
class Weibull:
    """Weibull-distributed gaps. A ``shape`` of 1 is a Poisson process; below 1 gaps have a heavier tail."""

    rate_per_s: float
    shape: float = 1.0

    def __post_init__(self) -> None:
        _positive(self, rate_per_s=self.rate_per_s)
        if not MIN_SHAPE <= self.shape <= MAX_SHAPE:
            raise WorkloadError(f"Weibull: shape is {self.shape}, should be from {MIN_SHAPE:g} to {MAX_SHAPE:g}")

    def times_s(self, rng: random.Random) -> Iterator[float]:
        # The mean of a Weibull distribution is scale * gamma(1 + 1 / shape).
        scale_s = 1.0 / (self.rate_per_s * math.gamma(1.0 + 1.0 / self.shape))
        return accumulate(rng.weibullvariate(scale_s, self.shape) for _ in repeat(None))


@dataclass(frozen=True, slots=True)
class Bursts:
    """Poisson arrivals while on, none while off; both phases of exponential length, the first one on.

    ``rate_per_s`` is the mean over both phases: while on, it is higher by (on_s + off_s) / on_s.
    """

    rate_per_s: float
    on_s: float
    off_s: float

    def __post_init__(self) -> None:
        _positive(self, rate_per_s=self.rate_per_s, on_s=self.on_s, off_s=self.off_s)

    def times_s(self, rng: random.Random) -> Iterator[float]:
        rate_on_per_s = self.rate_per_s * (self.on_s + self.off_s) / self.on_s
        begin_s = 0.0
        while True:
            end_s = begin_s + rng.expovariate(1.0 / self.on_s)
            at_s = begin_s + rng.expovariate(rate_on_per_s)
            while at_s < end_s:
                yield at_s
                at_s += rng.expovariate(rate_on_per_s)
            begin_s = end_s + rng.expovariate(1.0 / self.off_s)


def random_arrivals(count: int, rate_per_s: float, rng: random.Random, variation: float = 1.0) -> tuple[float, ...]:
    """``count`` arrival times with gamma-distributed gaps: :class:`Gamma`.

    Raises ValueError for a rate or variation not above 0.
    """
    if rate_per_s <= 0 or variation <= 0:
        raise WorkloadError(f"rate_per_s {rate_per_s} and variation {variation}: both should be above 0")
    return tuple(islice(Gamma(rate_per_s, variation).times_s(rng), count))


@dataclass(frozen=True, slots=True)
class Think:
    """The pause of a person (or a tool) before the next request of a session: gamma-distributed.

    A ``variation`` of 1 is the exponential distribution, 0 the same pause always.
    """

    mean_s: float
    variation: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mean_s) and self.mean_s >= 0):
            raise WorkloadError(f"Think: mean_s is {self.mean_s}, should be 0 or more")
        if self.variation and not MIN_VARIATION <= self.variation <= MAX_VARIATION:
            raise WorkloadError(f"Think: variation is {self.variation}, should be 0 or {VARIATIONS}")

    def draw(self, rng: random.Random) -> float:
        """Seconds of one pause."""
        if not self.mean_s or not self.variation:
            return self.mean_s
        shape = 1.0 / self.variation**2
        return rng.gammavariate(shape, 1.0) * (self.mean_s / shape)


def stream(seed: int, purpose: str) -> random.Random:
    """A random stream of its own per purpose, so that another arrival process leaves the lengths as they were."""
    return random.Random(f"{seed} {purpose}")
