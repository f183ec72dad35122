"""From one number per record to a mean and its interval, the same for every estimator. Clusters are what is drawn.

A ratio of sums is estimated throughout, sum of values over sum of norms; a plain mean has norms of 1. Its interval
(95%) is one of

- ``bootstrap``: clusters resampled, studentised (Efron and Tibshirani 1993, chapter 12): skewed costs pull the
  endpoints to the right side. Many clusters are first joined at random into 2000 groups;
- ``bernstein``: the empirical Bernstein bound (Maurer and Pontil, COLT 2009, theorem 4) to either side, for terms
  within known limits: no asymptotics, but wide;
- ``sequence``: an asymptotic confidence sequence (Waudby-Smith, Arbour, Sinha, Kennedy, Ramdas, Annals of Statistics
  2024, "Time-uniform central limit theory and asymptotic confidence sequences", theorem 2.2): it may be looked at as
  often as one likes while the log grows.
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
"""Clusters for which the confidence sequence is tightest; fixed before any log is seen."""


@dataclass(frozen=True)
class Terms:
    """One number per record; ``norm`` where they are to be divided by more than their count."""

    value: Floats
    norm: Floats | None = None

    def sums(self, group: Ints, groups: int) -> tuple[Floats, Floats]:
        """Values and norms, summed by group."""
        norms = np.bincount(group, self.norm, groups).astype(np.float64)
        return np.bincount(group, self.value, groups).astype(np.float64), norms

    def mean(self) -> float:
        """Raises ValueError where the norms sum to 0."""
        norm = float(len(self.value) if self.norm is None else self.norm.sum())
        if norm == 0:
            raise InputError("the weights sum to 0: nothing in the log speaks of this policy")
        return float(self.value.sum()) / norm


@dataclass(frozen=True)
class Resampled:
    """How often each group of clusters is drawn in each resample; drawn once for all that is compared."""

    group: Ints
    """(n,) of each record."""
    groups: int
    counts: Floats
    """(resamples, groups)"""

    @classmethod
    def of(cls, cluster: Ints, rng: np.random.Generator, resamples: int = RESAMPLES) -> Resampled:
        """``cluster``: (n,) numbered from 0 without gaps."""
        clusters = int(cluster.max()) + 1
        groups = min(clusters, MAX_GROUPS)
        group = cluster if groups == clusters else (rng.permutation(clusters) % groups)[cluster]
        drawn = rng.integers(0, groups, (resamples, groups)) + groups * np.arange(resamples)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=resamples * groups)
        return cls(group, groups, counts.reshape(resamples, groups).astype(np.float64))


def spread_of_mean(value: Floats, group: Ints) -> float:
    """Standard error of the mean of ``value``, groups drawn independently."""
    sums, sizes = (np.bincount(group, some).astype(np.float64) for some in (value, None))
    return _standard_error(sums, sizes, float(sums.sum() / sizes.sum()))


def bootstrap(terms: Terms, drawn: Resampled) -> tuple[float, float]:
    """Studentised, by the linearised standard error of each resample's ratio."""
    a, b = terms.sums(drawn.group, drawn.groups)
    centre = terms.mean()
    error = _standard_error(a, b, centre)
    if error == 0.0:
        return centre, centre
    scale_a, scale_b = float(np.abs(a).max()), float(np.abs(b).max())
    a, b = a / scale_a, b / scale_b
    sums = drawn.counts @ np.column_stack([a, b, a * a, a * b, b * b])
    some = sums[sums[:, 1] > 0]
    ratio = some[:, 0] / some[:, 1]
    squares = np.maximum(some[:, 2] - 2 * ratio * some[:, 3] + ratio**2 * some[:, 4], 0.0)
    errors = np.sqrt(squares * drawn.groups / (drawn.groups - 1)) / some[:, 1]
    off = ratio - centre * scale_b / scale_a
    with np.errstate(divide="ignore", invalid="ignore"):
        studentised = np.where(off == 0, 0.0, off / errors)
    low, high = np.quantile(studentised, (ERROR / 2, 1 - ERROR / 2), method="nearest")
    return centre - float(high) * error, centre - float(low) * error


def bernstein(terms: Terms, cluster: Ints, limits: tuple[float, float]) -> tuple[float, float]:
    """``limits``: of a record's value, lowest and highest. Raises ValueError for values outside, and for a ratio.

    A cluster's sum, in units of the mean cluster's size, is one draw from limits as wide as the largest cluster.
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
    # A cluster smaller than the largest stays within the limits times the largest size only where these hold 0.
    reach = (max(high, 0.0) - min(low, 0.0)) * sizes.max() * unit
    spread = float(np.var(sums, ddof=1))
    told = log(4 / ERROR)
    room = sqrt(2 * spread * told / clusters) + 7 * reach * told / (3 * (clusters - 1))
    centre = terms.mean()
    return max(low, centre - room), min(high, centre + room)


def sequence(terms: Terms, cluster: Ints) -> tuple[float, float]:
    """The confidence sequence's interval at the log's end, by the spread of the (linearised) cluster sums."""
    clusters = int(cluster.max()) + 1
    a, b = terms.sums(cluster, clusters)
    centre = terms.mean()
    sigma = _standard_error(a, b, centre) * sqrt(clusters)
    rho2 = (-2 * log(ERROR) + log(-2 * log(ERROR)) + 1) / TIGHTEST_AT
    inner = clusters * rho2 + 1
    room = sigma * sqrt(2 * inner / (clusters**2 * rho2) * log(sqrt(inner) / ERROR))
    return centre - room, centre + room


def _standard_error(a: Floats, b: Floats, ratio: float) -> float:
    """Of sum(a) / sum(b), by linearisation (Cochran 1977, section 6.4); entries are independent draws."""
    count = len(a)
    if count < 2:
        raise InputError("one cluster alone tells no interval")
    return sqrt(float(((a - ratio * b) ** 2).sum()) * count / (count - 1)) / float(b.sum())
