"""Fitting the residual: LightGBM on log(measured / roofline), Huber's loss, monotone in everything that grows.

How many trees there are is decided on states the trees did not see; none, where they do not help there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvpolicy.arrays import Floats
from kvpolicy.cost.laws import Law
from kvpolicy.cost.store import ForestText
from kvpolicy.datasets.examples import Example, log_miss
from kvpolicy.events import Kind
from kvpolicy.features import GROWING
from kvpolicy.regression.residual import TREE_COUNTS, Growth, Unseen, grow
from kvpolicy.regression.residual import choose_tree_count as fewest_trees

MIN_STATES = 40
"""With fewer training states the residual is left out: it would learn noise."""
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

    def inputs(self) -> Floats:
        return np.array([[getattr(example.x, name) for name in INPUTS[self.kind]] for example in self.examples])

    def misses(self) -> Floats:
        pairs = ((example.engine_s, sum(self.law.parts(example.x))) for example in self.examples)
        return np.array([log_miss(measured, predicted, self.floor_s) for measured, predicted in pairs])


@dataclass(frozen=True, slots=True)
class Fold:
    """Law and trees from some states, to be judged on others."""

    training: Target
    unseen: Target


def choose_tree_count(folds: Sequence[Fold], seed: int) -> int:
    """The fewest trees that miss unseen states as little as any number does; 0 where the law is about as good."""
    return fewest_trees(
        Unseen(_boost(fold.training, TREE_COUNTS[-1], seed), fold.unseen.inputs(), fold.unseen.misses())
        for fold in folds
    )


def fit_residual(target: Target, trees: int, seed: int) -> ForestText:
    """A forest of that many trees, as text."""
    booster = _boost(target, trees, seed)
    return ForestText(booster.model_to_string(num_iteration=trees), INPUTS[target.kind])


def _boost(target: Target, trees: int, seed: int) -> Any:
    growth = Growth(
        leaves=8, learning_rate=0.1, min_rows_in_leaf=max(5, len(target.examples) // 20), monotone=GROWING, seed=seed
    )
    return grow(target.inputs(), target.misses(), INPUTS[target.kind], trees, growth)
