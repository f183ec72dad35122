"""Arrival processes: endless, ordered arrival times at a rate, drawn from a seed."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, islice, repeat
from typing import Protocol

from kvpolicy.workload.requests import WorkloadError

MIN_VARIATION, MAX_VARIATION = 1e-3, 1e3
ALLOWED_VARIATIONS = f"from {MIN_VARIATION:g} to {MAX_VARIATION:g}"
"""Coefficients of variation that a gamma distribution may have; beyond them numbers over- or underflow."""

MIN_VALUE, MAX_VALUE = 1e-9, 1e9
ALLOWED_VALUES = f"above 0, from {MIN_VALUE:g} to {MAX_VALUE:g}"
"""Allowed rates, durations, and factors on either; beyond them times over- or underflow."""
MIN_SHAPE, MAX_SHAPE = 1e-2, 1e3
"""Allowed shapes of a Weibull distribution; for lower ones its mean over its scale overflows."""


class Arrivals(Protocol):
    """An arrival process."""

    def times_s(self, rng: random.Random) -> Iterator[float]:
        """Endless arrival times since the workload's start, never falling."""
        ...


def _positive(process: object, **values: float) -> None:
    for name, value in values.items():
        if not MIN_VALUE <= value <= MAX_VALUE:
            raise WorkloadError(f"{type(process).__name__}: {name} is {value}, should be {ALLOWED_VALUES}")


@dataclass(frozen=True, slots=True)
class AtOnce:
    """All requests at time 0."""

    def times_s(self, rng: random.Random) -> Iterator[float]:
        return repeat(0.0)


@dataclass(frozen=True, slots=True)
class Even:
    """Equal gaps between requests; the first comes after one gap."""

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

    1 is a Poisson process; above 1 arrivals are burstier, below 1 more even.
    """

    rate_per_s: float
    variation: float = 1.0

    def __post_init__(self) -> None:
        _positive(self, rate_per_s=self.rate_per_s)
        if not MIN_VARIATION <= self.variation <= MAX_VARIATION:
            raise WorkloadError(f"Gamma: variation is {self.variation}, should be {ALLOWED_VARIATIONS}")

    def times_s(self, rng: random.Random) -> Iterator[float]:
        shape = 1.0 / self.variation**2
        scale_s = 1.0 / (shape * self.rate_per_s)
        return accumulate(rng.gammavariate(shape, scale_s) for _ in repeat(None))


@dataclass(frozen=True, slots=True)
class Weibull:
    """Weibull-distributed gaps. A ``shape`` of 1 is a Poisson process; lower ones have a heavier tail."""

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
    """Poisson arrivals in on-phases, none in off-phases; both of exponential length, beginning with an on-phase.

    ``rate_per_s`` is the mean over both phases; in on-phases the rate is higher by (on_s + off_s) / on_s.
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


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups of ``size`` requests that arrive together; the groups are a Poisson process.

    ``rate_per_s`` is the mean number of requests per second.
    """

    rate_per_s: float
    size: int

    def __post_init__(self) -> None:
        _positive(self, rate_per_s=self.rate_per_s)
        if self.size < 1:
            raise WorkloadError(f"Groups: size is {self.size}, should be 1 or more")

    def times_s(self, rng: random.Random) -> Iterator[float]:
        groups_s = Poisson(self.rate_per_s / self.size).times_s(rng)
        return (at_s for at_s in groups_s for _ in range(self.size))


def random_arrivals(count: int, rate_per_s: float, rng: random.Random, variation: float = 1.0) -> tuple[float, ...]:
    """``count`` arrival times with gamma-distributed gaps: :class:`Gamma`.

    Raises WorkloadError for a rate or variation not above 0.
    """
    if rate_per_s <= 0 or variation <= 0:
        raise WorkloadError(f"rate_per_s {rate_per_s} and variation {variation}: both should be above 0")
    return tuple(islice(Gamma(rate_per_s, variation).times_s(rng), count))


@dataclass(frozen=True, slots=True)
class Think:
    """The pause of a person (or a tool) before the next request of a session: gamma-distributed.

    A ``variation`` of 1 is the exponential distribution, 0 a constant pause.
    """

    mean_s: float
    variation: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mean_s) and self.mean_s >= 0):
            raise WorkloadError(f"Think: mean_s is {self.mean_s}, should be 0 or more")
        if self.variation and not MIN_VARIATION <= self.variation <= MAX_VARIATION:
            raise WorkloadError(f"Think: variation is {self.variation}, should be 0 or {ALLOWED_VARIATIONS}")

    def draw(self, rng: random.Random) -> float:
        """Seconds of one pause."""
        if not self.mean_s or not self.variation:
            return self.mean_s
        shape = 1.0 / self.variation**2
        return rng.gammavariate(shape, 1.0) * (self.mean_s / shape)


def stream(seed: int, purpose: str) -> random.Random:
    """A separate random stream per purpose, so that lengths do not depend on the arrival process."""
    return random.Random(f"{seed} {purpose}")
