"""Boosted forest on log(measured / physics), and the choice of its number of trees."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightgbm
import numpy as np

from kvpolicy.arrays import Floats

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


def grow(
    x: Floats, log_ratio: Floats, names: Sequence[str], trees: int, growth: Growth, weight: Floats | None = None
) -> Any:
    """Grow a LightGBM booster with Huber loss. ``x``: shape (rows, names)."""
    settings: Mapping[str, Any] = {
        "objective": "huber",
        "alpha": growth.huber_delta,
        "num_leaves": growth.leaves,
        "learning_rate": growth.learning_rate,
        "min_data_in_leaf": growth.min_rows_in_leaf,
        "lambda_l2": growth.l2,
        "monotone_constraints": [int(name in growth.monotone) for name in names],
        "seed": growth.seed,
        "deterministic": True,
        "force_col_wise": True,
        "num_threads": growth.threads,
        "verbosity": -1,
    }
    data = lightgbm.Dataset(x, log_ratio, weight=weight, feature_name=list(names))
    return lightgbm.train(dict(settings), data, num_boost_round=trees)


@dataclass(frozen=True, slots=True)
class FoldForest:
    """A forest grown on the other folds, with the rows of the held-out fold."""

    booster: Any
    x: Floats
    log_ratio: Floats
    """log(measured / physics): what the forest should predict."""
    weight: Floats | None = None

    def misses(self, trees: int) -> Floats:
        """log(measured / predicted) with the first ``trees`` trees."""
        if not trees:
            return self.log_ratio
        return self.log_ratio - np.asarray(self.booster.predict(self.x, num_iteration=trees), np.float64)


def choose_tree_count(folds: Iterable[FoldForest], counts: Sequence[int] = TREE_COUNTS) -> int:
    """The smallest number of trees whose error on held-out rows is about minimal; 0 if physics is about as good."""
    errors = dict.fromkeys((0, *counts), 0.0)
    total_weight = 0.0
    for fold in folds:
        weight = np.ones(len(fold.log_ratio)) if fold.weight is None else fold.weight
        total_weight += float(weight.sum())
        for count in errors:
            errors[count] += float((weight * np.abs(fold.misses(count))).sum())
    lowest_error = min(errors[count] for count in counts)
    if lowest_error >= (1 - MIN_GAIN) * errors[0] or errors[0] <= MIN_MISS * total_weight:
        return 0
    return next(count for count in counts if errors[count] <= (1 + TOLERANCE) * lowest_error)
