"""Compares arms block by block: ratios with intervals. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from scipy.special import ndtr, stdtrit

from kvpolicy.errors import InputError
from kvpolicy.stats import quantile

RESAMPLES = 5000
CONFIDENCE = 0.95
MIN_BLOCKS = 2


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio with its 95% interval."""

    value: float
    low: float
    high: float

    @property
    def tie(self) -> bool:
        """Whether 1 lies in the interval, so that neither arm is ahead."""
        return self.low <= 1.0 <= self.high

    def to_dict(self) -> dict[str, float]:
        return asdict(self)

    def text(self) -> str:
        if self.tie:
            return f"tie ({self.value:.3f}, {self.low:.3f} to {self.high:.3f})"
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


def paired_ratio(
    above: Sequence[float], below: Sequence[float], rng: random.Random, resamples: int = RESAMPLES
) -> Ratio:
    """Geometric mean of ``above[b] / below[b]`` over blocks b, with a bootstrap interval over blocks.

    Blocks are resampled as pairs, so that effects on a whole block cancel. The percentiles lie further out than 2.5%
    and 97.5%, by as much as Student's t exceeds the normal at that number of blocks (Hesterberg, "What Teachers Should
    Know About the Bootstrap", 2015, section 4.5): otherwise intervals over eight blocks are too narrow. Raises
    InputError for fewer than 2 blocks, unequal numbers of them, and values not above 0.
    """
    if len(above) != len(below) or len(above) < MIN_BLOCKS:
        raise InputError(f"{len(above)} and {len(below)} blocks: should be as many of both, at least {MIN_BLOCKS}")
    if not all(math.isfinite(value) and value > 0 for value in (*above, *below)):
        raise InputError(f"a ratio needs values above 0, got {list(above)} and {list(below)}")
    logs = [math.log(a / b) for a, b in zip(above, below, strict=True)]
    means = sorted(math.fsum(rng.choices(logs, k=len(logs))) / len(logs) for _ in range(resamples))
    tail = widened_tail(len(logs))
    low, high = means[math.floor(tail * resamples)], means[math.ceil((1 - tail) * resamples) - 1]
    value = math.fsum(logs) / len(logs)
    # Where all blocks are equal, rounding can put the value outside its interval.
    return Ratio(math.exp(value), math.exp(min(low, value)), math.exp(max(high, value)))


def widened_tail(blocks: int, confidence: float = CONFIDENCE) -> float:
    """The share of resampled means to cut off at each end for an interval of that confidence over ``blocks`` blocks."""
    t = -float(stdtrit(blocks - 1, (1 - confidence) / 2))
    return float(ndtr(-t * math.sqrt(blocks / (blocks - 1))))


def mean_and_percentiles(values: Sequence[float]) -> dict[str, float]:
    """Mean, median and 99th percentile, linear between order statistics. Raises InputError for no values."""
    if not values:
        raise InputError("no values to summarise")
    return {"mean": math.fsum(values) / len(values), "p50": quantile(values, 0.50), "p99": quantile(values, 0.99)}
