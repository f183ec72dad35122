"""Boosted forest on log(measured / physics), the choice of its number of trees, and the rows that this is tested on.

Operator times (:mod:`kvpolicy.regression.estimator`) and preemptions (:mod:`kvpolicy.training.model_fit`) are learned
by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightgbm
import numpy as np

from kvpolicy.arrays import Floats, Ints
from kvpolicy.regression.conformal import SHARES

TREE_COUNTS = (10, 20, 30, 45, 60, 80, 100)
MIN_GAIN = 0.03
"""Share by which trees must lower the mean error on held-out rows to be worth their time in every decision."""
TOLERANCE = 0.02
"""Fewer trees are preferred if their error is above the lowest by at most this share: every tree costs time."""
MIN_MISS = 1e-6
"""A mean error of the physics below this is rounding."""
HUBER_DELTA = 0.3
"""Residuals of the log ratio above this count only linearly."""


@dataclass(frozen=True, slots=True)
class Growth:
    """Settings that a forest is grown with."""

    leaves: int = 31
    learning_rate: float = 0.1
    min_rows_in_leaf: int = 5
    l2: float = 1.0
    huber_delta: float = HUBER_DELTA
    monotone: frozenset[str] = field(default_factory=frozenset)
    """Names of the inputs in which the forest may not decrease."""
    seed: int = 0
    threads: int = 1


@dataclass(frozen=True, slots=True)
class Residual:
    """What physics misses of some rows, and how forests are grown on it."""

    x: Floats
    """Shape (rows, names)."""
    log_ratio: Floats
    """log(measured / physics): what a forest should predict."""
    weight: Floats
    names: Sequence[str]
    growth: Growth

    def grown(self, trees: int) -> Any:
        """Grow a LightGBM booster with Huber loss. Its first trees are those of a smaller one."""
        growth = self.growth
        settings: Mapping[str, Any] = {
            "objective": "huber",
            "alpha": growth.huber_delta,
            "num_leaves": growth.leaves,
            "learning_rate": growth.learning_rate,
            "min_data_in_leaf": growth.min_rows_in_leaf,
            "lambda_l2": growth.l2,
            "monotone_constraints": [int(name in growth.monotone) for name in self.names],
            "seed": growth.seed,
            "deterministic": True,
            "force_col_wise": True,
            "num_threads": growth.threads,
            "verbosity": -1,
        }
        data = lightgbm.Dataset(self.x, self.log_ratio, weight=self.weight, feature_name=list(self.names))
        return lightgbm.train(dict(settings), data, num_boost_round=trees)

    def misses(self, booster: Any, trees: int) -> Floats:
        """log(measured / predicted) with the first ``trees`` trees of a booster."""
        if not trees or not len(self.x):
            return self.log_ratio
        return self.log_ratio - np.asarray(booster.predict(self.x, num_iteration=trees), np.float64)


@dataclass(frozen=True, slots=True)
class Forests:
    """Forests that were grown on all folds but one, and the number of trees that their held-out folds ask for."""

    boosters: tuple[Any, ...]
    """By fold, each with the largest number of trees that was tried."""
    trees: int
    """The smallest number whose error on held-out rows is about minimal; 0 if physics is about as good."""


def cross_validated(folds: Sequence[tuple[Residual, Residual]], counts: Sequence[int] = TREE_COUNTS) -> Forests:
    """Choose the number of trees. ``folds``: rows to grow on, and held-out rows, of physics fitted without these."""
    boosters = tuple(fitting.grown(counts[-1]) for fitting, _ in folds)
    errors = dict.fromkeys((0, *counts), 0.0)
    total_weight = 0.0
    for booster, (_, held_out) in zip(boosters, folds, strict=True):
        total_weight += float(held_out.weight.sum())
        for count in errors:
            errors[count] += float((held_out.weight * np.abs(held_out.misses(booster, count))).sum())
    lowest_error = min(errors[count] for count in counts)
    if lowest_error >= (1 - MIN_GAIN) * errors[0] or errors[0] <= MIN_MISS * total_weight:
        return Forests(boosters, 0)
    return Forests(boosters, next(count for count in counts if errors[count] <= (1 + TOLERANCE) * lowest_error))


# ---- rows to fit to and rows to test on ----


def fold_rows(fold_of: Sequence[int] | Ints) -> list[tuple[Ints, Ints]]:
    """Row numbers to fit to and to hold out, fold by fold. ``fold_of``: the fold number of each row."""
    numbers = np.asarray(fold_of)
    return [(np.flatnonzero(numbers != fold), np.flatnonzero(numbers == fold)) for fold in np.unique(numbers)]


def inner_rows(
    lengths: Sequence[float] | Floats, shares: Sequence[float] = SHARES
) -> Iterator[tuple[float, Ints, Ints]]:
    """For inner extrapolation (:mod:`kvpolicy.regression.conformal`): each share of the longest length, the numbers of
    the rows up to it, to fit to, and of the longer ones, to test on."""
    length = np.asarray(lengths, np.float64)
    for share in shares:
        short = length <= share * length.max()
        yield share, np.flatnonzero(short), np.flatnonzero(~short)
