"""Fit the residual of a law: LightGBM on log(measured / law), Huber loss, monotone in all features of length.

The number of trees is chosen on held-out states; it is 0 if trees do not help there.
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
from kvpolicy.regression.residual import TREE_COUNTS, FoldForest, Growth, grow
from kvpolicy.regression.residual import choose_tree_count as tree_count_by_folds

MIN_STATES = 40
"""With fewer training states there is no residual: it would learn noise."""
# Waiting requests are no input: they grow without bound under memory pressure and take no part in a step.
INPUTS: dict[Kind, tuple[str, ...]] = {
    "recompute": ("recomputed_tokens", "running_requests", "batch_tokens", "free_blocks"),
    "swap": (
        "save_bytes", "load_bytes", "load_segments", "segment_bytes", "queued_save_bytes", "queued_load_bytes",
        "running_requests", "batch_tokens", "free_blocks",
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Target:
    """Examples of one option, and the law whose errors the residual learns."""

    kind: Kind
    examples: tuple[Example, ...]
    law: Law
    floor_s: float

    def inputs(self) -> Floats:
        """Shape (examples, inputs)."""
        return np.array([[getattr(example.x, name) for name in INPUTS[self.kind]] for example in self.examples])

    def weights(self) -> Floats:
        """Number of situations that each example stands for."""
        return np.array([example.weight for example in self.examples])

    def misses(self) -> Floats:
        """log(measured / law), one per example."""
        pairs = ((example.engine_s, sum(self.law.parts(example.x))) for example in self.examples)
        return np.array([log_miss(measured, predicted, self.floor_s) for measured, predicted in pairs])


@dataclass(frozen=True, slots=True)
class Fold:
    """States to fit law and trees to, and held-out states to test them on."""

    training: Target
    held_out: Target


def choose_tree_count(folds: Sequence[Fold], seed: int) -> int:
    """The smallest number of trees whose error on held-out states is about minimal; 0 if the law is about as good."""
    return tree_count_by_folds(
        FoldForest(
            _boost(fold.training, TREE_COUNTS[-1], seed),
            fold.held_out.inputs(),
            fold.held_out.misses(),
            fold.held_out.weights(),
        )
        for fold in folds
    )


def fit_residual(target: Target, trees: int, seed: int) -> ForestText:
    """Fit a forest of ``trees`` trees; in LightGBM's text format."""
    booster = _boost(target, trees, seed)
    return ForestText(booster.model_to_string(num_iteration=trees), INPUTS[target.kind])


def _boost(target: Target, trees: int, seed: int) -> Any:
    growth = Growth(
        leaves=8, learning_rate=0.1, min_rows_in_leaf=max(5, len(target.examples) // 20), monotone=GROWING, seed=seed
    )
    return grow(target.inputs(), target.misses(), INPUTS[target.kind], trees, growth, target.weights())
