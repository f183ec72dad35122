"""Confidence intervals and quantiles used by several packages."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import fmean, stdev

from scipy.special import betaincinv, stdtrit

from kvpolicy.errors import InputError

CONFIDENCE = 0.95


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
