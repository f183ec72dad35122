"""Two policies on the same runs: the ratio of what they came to, with an interval over the pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, isfinite, log, sqrt
from statistics import fmean, stdev

from scipy.stats import t as student

LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Ratio:
    """Geometric mean of the pairs' ratios. The ends are None where a single pair leaves nothing to judge by."""

    value: float
    low: float | None
    high: float | None
    pairs: int

    @property
    def told(self) -> bool:
        """Whether it is told from 1."""
        return self.low is not None and self.high is not None and not self.low <= 1.0 <= self.high

    def text(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.3f} (1 pair, no interval)"
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


def geometric_means(values: Sequence[float], groups: Sequence[int]) -> list[float]:
    """One per group, in the order of their first values. Raises ValueError for values without a logarithm."""
    logs: dict[int, list[float]] = {}
    for value, group in zip(values, groups, strict=True):
        if not (isfinite(value) and value > 0):
            raise ValueError(f"geometric mean of {list(values)}: numbers above 0 are needed")
        logs.setdefault(group, []).append(log(value))
    return [exp(fmean(some)) for some in logs.values()]


def paired_ratio(ours: Sequence[float], theirs: Sequence[float], level: float = LEVEL, comparisons: int = 1) -> Ratio:
    """Ours over theirs: Student's interval of the mean log ratio over pairs that met the same requests and chance.

    ``comparisons``: of how many such intervals the most favourable will be shown; all of them then hold together with
    ``level`` (Bonferroni). Raises ValueError for values that have no ratio, or no pairs.
    """
    pairs = list(zip(ours, theirs, strict=True))
    if not pairs or not all(isfinite(a) and isfinite(b) and a > 0 and b > 0 for a, b in pairs):
        raise ValueError(f"paired ratio of {list(ours)} over {list(theirs)}: pairs of numbers above 0 are needed")
    logs = [log(a / b) for a, b in pairs]
    middle = fmean(logs)
    if len(logs) == 1:
        return Ratio(exp(middle), None, None, 1)
    quantile = float(student.ppf(1.0 - (1.0 - level) / (2 * comparisons), len(logs) - 1))
    half = quantile * stdev(logs) / sqrt(len(logs))
    return Ratio(exp(middle), exp(middle - half), exp(middle + half), len(logs))
