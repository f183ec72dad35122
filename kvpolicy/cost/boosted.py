"""Fitting the residual: LightGBM on log(measured / roofline), Huber's loss, monotone in everything that grows.

How many trees there are is decided on states the trees did not see; none, where they do not help there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lightgbm
import numpy as np
from numpy.typing import NDArray

from kvpolicy.cost.examples import Example, log_miss
from kvpolicy.cost.laws import Law
from kvpolicy.cost.store import ForestText
from kvpolicy.events import Kind
from kvpolicy.features import GROWING

FEWEST_STATES = 40
"""With fewer training states the residual is left out: it would learn noise."""
TREE_COUNTS = (10, 20, 30, 45, 60, 80, 100)
LEAST_GAIN = 0.03
"""The share by which trees must lessen the mean miss on unseen states to be worth their time in every decision."""
TOLERANCE = 0.02
"""Misses that far above the least count as no worse: every tree is walked in every decision."""
TO_BE_LEARNED = 1e-6
"""A mean miss of the law below it is rounding."""
HUBER_DELTA = 0.3
"""Log-ratio residuals beyond it count only linearly."""

# Not the waiting requests: they grow without bound under pressure and take no part in any step.
INPUTS: dict[Kind, tuple[str, ...]] = {
    "recompute": ("recomputed_tokens", "running_requests", "batch_tokens", "free_blocks"),
    "swap": (
        "save_bytes", "load_bytes", "load_segments", "segment_bytes", "queued_save_bytes", "queued_load_bytes",
        "running_requests", "batch_tokens", "free_blocks",
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Target:
    """Examples of one option and the law whose misses are to be learned."""

    kind: Kind
    examples: tuple[Example, ...]
    law: Law
    floor_s: float

    def inputs(self) -> NDArray[np.float64]:
        return np.array([[getattr(example.x, name) for name in INPUTS[self.kind]] for example in self.examples])

    def misses(self) -> NDArray[np.float64]:
        pairs = ((example.engine_s, sum(self.law.parts(example.x))) for example in self.examples)
        return np.array([log_miss(measured, predicted, self.floor_s) for measured, predicted in pairs])


@dataclass(frozen=True, slots=True)
class Fold:
    """Law and trees from some states, to be judged on others."""

    training: Target
    unseen: Target


def choose_tree_count(folds: Sequence[Fold], seed: int) -> int:
    """The fewest trees that miss unseen states as little as any number does; 0 where the law is about as good."""
    missed = {0: 0.0} | dict.fromkeys(TREE_COUNTS, 0.0)
    total = 0
    for fold in folds:
        booster = _boost(fold.training, TREE_COUNTS[-1], seed)
        x, wanted = fold.unseen.inputs(), fold.unseen.misses()
        total += len(wanted)
        missed[0] += float(np.abs(wanted).sum())
        for count in TREE_COUNTS:
            missed[count] += float(np.abs(wanted - booster.predict(x, num_iteration=count)).sum())
    least = min(missed[count] for count in TREE_COUNTS)
    if least >= (1 - LEAST_GAIN) * missed[0] or missed[0] <= TO_BE_LEARNED * total:
        return 0
    return next(count for count in TREE_COUNTS if missed[count] <= (1 + TOLERANCE) * least)


def fit_residual(target: Target, trees: int, seed: int) -> ForestText:
    """A forest of that many trees, as text."""
    booster = _boost(target, trees, seed)
    return ForestText(booster.model_to_string(num_iteration=trees), INPUTS[target.kind])


def _boost(target: Target, trees: int, seed: int) -> Any:
    names = INPUTS[target.kind]
    settings: Mapping[str, Any] = {
        "objective": "huber",
        "alpha": HUBER_DELTA,
        "num_leaves": 8,
        "learning_rate": 0.1,
        "min_data_in_leaf": max(5, len(target.examples) // 20),
        "lambda_l2": 1.0,
        "monotone_constraints": [int(name in GROWING) for name in names],
        "seed": seed,
        "deterministic": True,
        "force_col_wise": True,
        "num_threads": 1,
        "verbosity": -1,
    }
    data = lightgbm.Dataset(target.inputs(), target.misses(), feature_name=list(names))
    return lightgbm.train(dict(settings), data, num_boost_round=trees)
