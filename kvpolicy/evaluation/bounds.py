"""Mean and interval from one number per record, the same for all estimators.

The estimate is always a ratio of sums, sum of values over sum of norms; for a plain mean all norms are 1. Records of a
cluster are dependent; clusters are independent. The interval (95%) is one of

- ``bootstrap``: studentised bootstrap over clusters (Efron and Tibshirani 1993, chapter 12), whose endpoints follow the
  skew of the costs. More than 2000 clusters are first joined at random into 2000 groups;
- ``bernstein``: the empirical Bernstein bound (Maurer and Pontil, COLT 2009, theorem 4), two-sided, for terms within
  known limits: valid for any sample size, but wide;
- ``sequence``: an asymptotic confidence sequence (Waudby-Smith, Arbour, Sinha, Kennedy, Ramdas, Annals of Statistics
  2024, "Time-uniform central limit theory and asymptotic confidence sequences", theorem 2.2): it holds at all times
  together while the log grows.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log, sqrt

import numpy as np

from kvpolicy.arrays import Floats, Ints
from kvpolicy.errors import InputError

ERROR = 0.05
"""1 - confidence."""
RESAMPLES = 2000
MAX_GROUPS = 2000
TIGHTEST_AT = 1000
"""Number of clusters at which the confidence sequence is tightest; fixed in advance."""


@dataclass(frozen=True)
class Terms:
    """One number per record; ``norm``: what their sum is divided by, if not their count."""

    value: Floats
    norm: Floats | None = None

    def sums(self, group: Ints, groups: int) -> tuple[Floats, Floats]:
        """Sums of values and of norms, by group."""
        norms = np.bincount(group, self.norm, groups).astype(np.float64)
        return np.bincount(group, self.value, groups).astype(np.float64), norms

    def mean(self) -> float:
        """Sum of values over sum of norms. Raises InputError if the norms sum to 0."""
        norm = float(len(self.value) if self.norm is None else self.norm.sum())
        if norm == 0:
            raise InputError("the weights sum to 0: the log holds nothing about this policy")
        return float(self.value.sum()) / norm


@dataclass(frozen=True)
class Resamples:
    """Number of times each group of clusters is drawn in each resample; drawn once for all policies compared."""

    group: Ints
    """(n,) group of each record."""
    groups: int
    counts: Floats
    """(resamples, groups)"""

    @classmethod
    def of(cls, cluster: Ints, rng: np.random.Generator, resamples: int = RESAMPLES) -> Resamples:
        """Draw resamples. ``cluster``: (n,) numbered from 0 without gaps."""
        clusters = int(cluster.max()) + 1
        groups = min(clusters, MAX_GROUPS)
        group = cluster if groups == clusters else (rng.permutation(clusters) % groups)[cluster]
        drawn = rng.integers(0, groups, (resamples, groups)) + groups * np.arange(resamples)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=resamples * groups)
        return cls(group, groups, counts.reshape(resamples, groups).astype(np.float64))


def spread_of_mean(value: Floats, group: Ints) -> float:
    """Standard error of the mean of ``value``; groups are independent."""
    sums, sizes = (np.bincount(group, weights).astype(np.float64) for weights in (value, None))
    return _standard_error(sums, sizes, float(sums.sum() / sizes.sum()))


def bootstrap(terms: Terms, resamples: Resamples) -> tuple[float, float]:
    """Studentised bootstrap interval, with the linearised standard error of each resample's ratio."""
    a, b = terms.sums(resamples.group, resamples.groups)
    centre = terms.mean()
    error = _standard_error(a, b, centre)
    if error == 0.0:
        return centre, centre
    scale_a, scale_b = float(np.abs(a).max()), float(np.abs(b).max())
    a, b = a / scale_a, b / scale_b
    sums = resamples.counts @ np.column_stack([a, b, a * a, a * b, b * b])
    valid = sums[sums[:, 1] > 0]
    ratio = valid[:, 0] / valid[:, 1]
    squares = np.maximum(valid[:, 2] - 2 * ratio * valid[:, 3] + ratio**2 * valid[:, 4], 0.0)
    errors = np.sqrt(squares * resamples.groups / (resamples.groups - 1)) / valid[:, 1]
    deviation = ratio - centre * scale_b / scale_a
    with np.errstate(divide="ignore", invalid="ignore"):
        studentised = np.where(deviation == 0, 0.0, deviation / errors)
    low, high = np.quantile(studentised, (ERROR / 2, 1 - ERROR / 2), method="nearest")
    return centre - float(high) * error, centre - float(low) * error


def bernstein(terms: Terms, cluster: Ints, limits: tuple[float, float]) -> tuple[float, float]:
    """Empirical Bernstein interval. ``limits``: lowest and highest possible value of a record.

    A cluster's sum, in units of the mean cluster size, is one draw; its limits are those of the largest cluster.
    Raises InputError for values outside the limits, and for a ratio.
    """
    if terms.norm is not None:
        raise InputError("the empirical Bernstein bound is for means; a self-normalised estimate has none")
    low, high = limits
    if (terms.value < low).any() or (terms.value > high).any():
        raise InputError(f"terms reach from {terms.value.min():g} to {terms.value.max():g}, the limits are {limits}")
    sizes = np.bincount(cluster)
    clusters = len(sizes)
    unit = clusters / len(cluster)
    sums = np.bincount(cluster, terms.value) * unit
    # The limits are extended to 0: a smaller cluster may sum to anything between 0 and a limit of the largest.
    width = (max(high, 0.0) - min(low, 0.0)) * sizes.max() * unit
    spread = float(np.var(sums, ddof=1))
    log_term = log(4 / ERROR)
    margin = sqrt(2 * spread * log_term / clusters) + 7 * width * log_term / (3 * (clusters - 1))
    centre = terms.mean()
    return max(low, centre - margin), min(high, centre + margin)


def sequence(terms: Terms, cluster: Ints) -> tuple[float, float]:
    """Interval of the confidence sequence at the end of the log, from the spread of the linearised cluster sums."""
    clusters = int(cluster.max()) + 1
    a, b = terms.sums(cluster, clusters)
    centre = terms.mean()
    sigma = _standard_error(a, b, centre) * sqrt(clusters)
    rho2 = (-2 * log(ERROR) + log(-2 * log(ERROR)) + 1) / TIGHTEST_AT
    scaled_clusters = clusters * rho2 + 1
    margin = sigma * sqrt(2 * scaled_clusters / (clusters**2 * rho2) * log(sqrt(scaled_clusters) / ERROR))
    return centre - margin, centre + margin


def _standard_error(a: Floats, b: Floats, ratio: float) -> float:
    """Standard error of sum(a) / sum(b) by linearisation (Cochran 1977, section 6.4); entries are independent."""
    count = len(a)
    if count < 2:
        raise InputError("one cluster alone gives no interval")
    return sqrt(float(((a - ratio * b) ** 2).sum()) * count / (count - 1)) / float(b.sum())
