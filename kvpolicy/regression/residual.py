"""A small boosted forest over log(measured / physics), and how many trees of it are worth their time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightgbm
import numpy as np

from kvpolicy.arrays import Floats

TREE_COUNTS = (10, 20, 30, 45, 60, 80, 100)
MIN_GAIN = 0.03
"""The share by which trees must lessen the mean miss on unseen rows to be worth their time in every decision."""
TOLERANCE = 0.02
"""Misses that far above the least count as no worse: every tree is walked in every decision."""
TO_BE_LEARNED = 1e-6
"""A mean miss of the physics below it is rounding."""
HUBER_DELTA = 0.3
"""Log-ratio residuals beyond it count only linearly."""


@dataclass(frozen=True, slots=True)
class Growth:
    """How a forest is grown."""

    leaves: int = 31
    learning_rate: float = 0.1
    min_rows_in_leaf: int = 5
    l2: float = 1.0
    huber_delta: float = HUBER_DELTA
    monotone: frozenset[str] = field(default_factory=frozenset)
    """Names of the inputs in which the forest may not fall."""
    seed: int = 0
    threads: int = 1


def grow(
    x: Floats, log_ratio: Floats, names: Sequence[str], trees: int, growth: Growth, weight: Floats | None = None
) -> Any:
    """A LightGBM booster under Huber's loss. ``x``: shape (rows, names)."""
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
class Unseen:
    """A forest grown on some rows, and other rows to judge it by."""

    booster: Any
    x: Floats
    log_ratio: Floats
    """log(measured / physics): what the forest should have said."""
    weight: Floats | None = None

    def misses(self, trees: int) -> Floats:
        """log(measured / predicted) with so many trees."""
        if not trees:
            return self.log_ratio
        return self.log_ratio - np.asarray(self.booster.predict(self.x, num_iteration=trees), np.float64)


def choose_tree_count(folds: Iterable[Unseen], counts: Sequence[int] = TREE_COUNTS) -> int:
    """The fewest trees that miss unseen rows as little as any number does; 0 where physics is about as good."""
    missed = dict.fromkeys((0, *counts), 0.0)
    total = 0.0
    for fold in folds:
        weight = np.ones(len(fold.log_ratio)) if fold.weight is None else fold.weight
        total += float(weight.sum())
        for count in missed:
            missed[count] += float((weight * np.abs(fold.misses(count))).sum())
    least = min(missed[count] for count in counts)
    if least >= (1 - MIN_GAIN) * missed[0] or missed[0] <= TO_BE_LEARNED * total:
        return 0
    return next(count for count in counts if missed[count] <= (1 + TOLERANCE) * least)
