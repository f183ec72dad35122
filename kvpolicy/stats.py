"""Intervals and order statistics that several parts report."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import fmean, stdev

from scipy.special import betaincinv, stdtrit

from kvpolicy.errors import InputError

CONFIDENCE = 0.95


def proportion_interval(successes: int, trials: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The exact interval of a probability that came true that often (Clopper, Pearson 1934); (0, 1) of no trial."""
    tail = (1.0 - confidence) / 2.0
    low = float(betaincinv(successes, trials - successes + 1, tail)) if successes else 0.0
    high = float(betaincinv(successes + 1, trials - successes, 1.0 - tail)) if successes < trials else 1.0
    return low, high


def student_interval(values: Sequence[float], tail: float = (1.0 - CONFIDENCE) / 2) -> tuple[float, float, float]:
    """(mean, low, high): Student's interval of the mean, of two values or more.

    ``tail``: the probability that is left out at each end.
    """
    mean = fmean(values)
    half = float(stdtrit(len(values) - 1, 1.0 - tail)) * stdev(values) / sqrt(len(values))
    return mean, mean - half, mean + half


def quantile(values: Sequence[float], share: float) -> float:
    """Linear between order statistics; ``share``: from 0 to 1. Raises InputError for no values."""
    if not values:
        raise InputError("no values to take a quantile of")
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    return ordered[low] + (at - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])
