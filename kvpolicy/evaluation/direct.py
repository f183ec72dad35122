"""The direct model: what an action costs in a situation, by least squares on the records in which it was taken.

Estimates that lean on it alone (DM) are as good as it is; doubly robust ones only grow wider where it misses.
Linear in a few columns, so that fits without a fold are the whole less that fold: sums of squares are kept by fold.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Whole = NDArray[np.int64]

FOLDS = 5
RIDGE = 1e-6
"""Of the (scaled) sums of squares: enough to tell columns apart that are copies of each other."""


@dataclass(frozen=True)
class Predicted:
    """(n, K) predicted costs, seconds."""

    in_sample: Floats
    """By one fit to all records."""
    cross_fitted: Floats
    """Each record by a fit to the folds it is not in."""


def predict(x: Floats, action: Whole, cost_s: Floats, known: Flags, actions: int, fold: Whole) -> Predicted:
    """Fit each action on its own records with a known cost. An action without any has the mean of all known costs,
    which is a guess; :mod:`kvpolicy.evaluation.diagnostics` refuses a policy that takes it.

    ``x``: (n, d), first column 1; ``fold``: (n,) from 0. Raises ValueError without any known cost.
    """
    if not known.any():
        raise ValueError("no record has a known cost")
    scale = np.abs(x).max(axis=0)
    scaled = x / np.where(scale > 0, scale, 1.0)
    folds = int(fold.max()) + 1
    whole, crossed = np.empty((len(x), actions)), np.empty((len(x), actions))
    for one in range(actions):
        mine = known & (action == one)
        gram, moment = _sums(scaled[mine], cost_s[mine], fold[mine], folds)
        mean_s = float(cost_s[known].mean())
        coefficients = [_solve(gram.sum(0), moment.sum(0), mean_s)]
        coefficients += [_solve(gram.sum(0) - gram[k], moment.sum(0) - moment[k], mean_s) for k in range(folds)]
        every = scaled @ np.stack(coefficients, axis=1)
        whole[:, one] = every[:, 0]
        crossed[:, one] = every[np.arange(len(x)), 1 + fold]
    return Predicted(whole, crossed)


def implied_weights(x: Floats, action: Whole, known: Flags, target: Floats) -> Floats:
    """(n,) weights w for which the mean of w c is what the direct method says: least squares is linear in the costs.

    What the direct method owes to each record's cost, and so how it would vary with other records.
    """
    scale = np.abs(x).max(axis=0)
    scaled = x / np.where(scale > 0, scale, 1.0)
    weight = np.zeros(len(x))
    for one in range(target.shape[1]):
        mine = known & (action == one)
        if mine.any():
            seen = scaled[mine]
            weight[mine] = seen @ _solve(seen.T @ seen, scaled.T @ target[:, one], 0.0)
    return weight


def folds_of(cluster: Whole, rng: np.random.Generator, folds: int = FOLDS) -> Whole:
    """(n,) the fold of each record; whole clusters are dealt out."""
    count = int(cluster.max()) + 1
    return (rng.permutation(count) % min(folds, count))[cluster]


def _sums(x: Floats, cost_s: Floats, fold: Whole, folds: int) -> tuple[Floats, Floats]:
    """By fold: x'x, shape (folds, d, d), and x'cost, (folds, d)."""
    parts = [fold == k for k in range(folds)]
    return np.stack([x[p].T @ x[p] for p in parts]), np.stack([x[p].T @ cost_s[p] for p in parts])


def _solve(gram: Floats, moment: Floats, mean_s: float) -> Floats:
    count = gram[0, 0]
    if count == 0:
        return np.concatenate([[mean_s], np.zeros(len(gram) - 1)])
    penalty = RIDGE * count * np.eye(len(gram))
    penalty[0, 0] = 0.0
    return np.asarray(np.linalg.solve(gram + penalty, moment), np.float64)
