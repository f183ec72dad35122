"""Confidence intervals, quantiles, and ratios of paired runs, used by several packages."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, exp, floor, fsum, isfinite, log, sqrt
from statistics import fmean, stdev

from scipy.special import betaincinv, ndtr, stdtrit

from kvpolicy.errors import InputError

CONFIDENCE = 0.95
RESAMPLES = 5000
MIN_BLOCKS = 2
MIN_SHOWN_PAIRS = 3
"""Pairs of runs from which on an interval is printed."""


def proportion_interval(successes: int, trials: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Exact interval of a success probability (Clopper, Pearson 1934); (0, 1) without trials."""
    tail = (1.0 - confidence) / 2.0
    low = float(betaincinv(successes, trials - successes + 1, tail)) if successes else 0.0
    high = float(betaincinv(successes + 1, trials - successes, 1.0 - tail)) if successes < trials else 1.0
    return low, high


def student_interval(values: Sequence[float], tail: float = (1.0 - CONFIDENCE) / 2) -> tuple[float, float, float]:
    """(mean, low, high): Student's interval of the mean of two or more values.

    ``tail``: probability outside the interval on each side.
    """
    mean = fmean(values)
    half_width = float(stdtrit(len(values) - 1, 1.0 - tail)) * stdev(values) / sqrt(len(values))
    return mean, mean - half_width, mean + half_width


def quantile(values: Sequence[float], share: float) -> float:
    """Quantile, linear between order statistics; ``share``: from 0 to 1. Raises InputError for no values."""
    if not values:
        raise InputError("no values to take a quantile of")
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = int(position)
    return ordered[low] + (position - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])


def mean_and_percentiles(values: Sequence[float]) -> dict[str, float]:
    """Mean, median and 99th percentile, linear between order statistics. Raises InputError for no values."""
    if not values:
        raise InputError("no values to summarise")
    return {"mean": fsum(values) / len(values), "p50": quantile(values, 0.50), "p99": quantile(values, 0.99)}


# ---- ratios of paired runs ----


@dataclass(frozen=True, slots=True)
class Ratio:
    """Geometric mean of the pairs' ratios, with its interval; the ends are None for a single pair. Two pairs have one
    too wide to say anything, from 0 to millions, which is not printed."""

    value: float
    low: float | None
    high: float | None
    pairs: int

    @property
    def significant(self) -> bool:
        """Whether the interval excludes 1."""
        return self.low is not None and self.high is not None and not self.low <= 1.0 <= self.high

    def text(self) -> str:
        if self.low is None or self.high is None or self.pairs < MIN_SHOWN_PAIRS:
            return f"{self.value:.3f} (no interval: {self.pairs} of the {MIN_SHOWN_PAIRS} pairs that one takes)"
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"

    def to_dict(self) -> dict[str, float | None]:
        """The value and its interval."""
        return {"value": self.value, "low": self.low, "high": self.high}


def geometric_means(values: Sequence[float], groups: Sequence[int]) -> list[float]:
    """One mean per group, in the order of the groups' first values. Raises InputError for values not above 0."""
    logs: dict[int, list[float]] = {}
    for value, group in zip(values, groups, strict=True):
        if not (isfinite(value) and value > 0):
            raise InputError(f"geometric mean of {list(values)}: numbers above 0 are needed")
        logs.setdefault(group, []).append(log(value))
    return [exp(fmean(group_logs)) for group_logs in logs.values()]


def student_ratio(
    values: Sequence[float], other_values: Sequence[float], level: float = CONFIDENCE, comparisons: int = 1
) -> Ratio:
    """Ratio of two policies: Student's interval of the mean log ratio over pairs with the same requests and seed.

    ``comparisons``: number of such intervals that are shown together; all of them then hold at once with ``level``
    (Bonferroni). Raises InputError for values not above 0, or no pairs.
    """
    pairs = list(zip(values, other_values, strict=True))
    if not pairs or not all(isfinite(a) and isfinite(b) and a > 0 and b > 0 for a, b in pairs):
        raise InputError(
            f"paired ratio of {list(values)} over {list(other_values)}: pairs of numbers above 0 are needed"
        )
    logs = [log(a / b) for a, b in pairs]
    if len(logs) == 1:
        return Ratio(exp(logs[0]), None, None, 1)
    value, low, high = map(exp, student_interval(logs, (1.0 - level) / (2 * comparisons)))
    return Ratio(value, low, high, len(logs))


def ratio_over_starts(values: Sequence[float], other_values: Sequence[float], starts: Sequence[int]) -> Ratio:
    """As :func:`student_ratio` of pairs that processes served which were started anew in between: each start counts
    once, by its geometric means, as the pairs of one start share what its processes are like. Over the pairs where
    there is one start. ``starts``: number of each pair's."""
    if len(set(starts)) < 2:
        return student_ratio(values, other_values)
    return student_ratio(geometric_means(values, starts), geometric_means(other_values, starts))


def known_ratio(
    values: Sequence[float | None], other_values: Sequence[float | None], starts: Sequence[int]
) -> Ratio | None:
    """As :func:`ratio_over_starts`. None of a figure that is 0, or that nobody knows, in some pair, and without a pair:
    without that one, which is the worst, the ratio would be of the better pairs."""
    known, other_known = ([value for value in one if value] for one in (values, other_values))
    if not known or len(known) < len(values) or len(other_known) < len(other_values):
        return None
    return ratio_over_starts(known, other_known, starts)


def unit_of(starts: int) -> str:
    """What an interval is over, in words, where a bench has so many starts of its servers."""
    return "rounds of one process each" if starts < 2 else f"{starts} starts of the servers"


def bootstrap_ratio(
    above: Sequence[float], below: Sequence[float], rng: random.Random, resamples: int = RESAMPLES
) -> Ratio:
    """Geometric mean of ``above[b] / below[b]`` over blocks b, with a 95% bootstrap interval over blocks.

    Blocks are resampled as pairs, so that effects on a whole block cancel. The percentiles lie further out than 2.5%
    and 97.5%, by as much as Student's t exceeds the normal at that number of blocks (Hesterberg, "What Teachers Should
    Know About the Bootstrap", 2015, section 4.5): otherwise intervals over eight blocks are too narrow. Raises
    InputError for fewer than 2 blocks, unequal numbers of them, and values not above 0.
    """
    if len(above) != len(below) or len(above) < MIN_BLOCKS:
        raise InputError(f"{len(above)} and {len(below)} blocks: should be as many of both, at least {MIN_BLOCKS}")
    if not all(isfinite(value) and value > 0 for value in (*above, *below)):
        raise InputError(f"a ratio needs values above 0, got {list(above)} and {list(below)}")
    logs = [log(a / b) for a, b in zip(above, below, strict=True)]
    means = sorted(fsum(rng.choices(logs, k=len(logs))) / len(logs) for _ in range(resamples))
    tail = widened_tail(len(logs))
    low, high = means[floor(tail * resamples)], means[ceil((1 - tail) * resamples) - 1]
    value = fsum(logs) / len(logs)
    # Where all blocks are equal, rounding can put the value outside its interval.
    return Ratio(exp(value), exp(min(low, value)), exp(max(high, value)), len(logs))


def widened_tail(blocks: int, confidence: float = CONFIDENCE) -> float:
    """The share of resampled means to cut off at each end for an interval of that confidence over ``blocks`` blocks."""
    t = -float(stdtrit(blocks - 1, (1 - confidence) / 2))
    return float(ndtr(-t * sqrt(blocks / (blocks - 1))))
