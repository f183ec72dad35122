"""The direct model: what an action costs in a situation, by least squares on the records in which it was taken.

Estimates that lean on it alone (DM) are as good as it is; doubly robust ones only grow wider where it misses.
Linear in a few columns, so that fits without a fold are the whole less that fold: sums of squares are kept by fold.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from kvpolicy.arrays import Flags, Floats, Ints
from kvpolicy.errors import InputError

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


@dataclass(frozen=True)
class Design:
    """The records a direct model is fitted to, sorted by action and fold: each part of a fit is then a slice."""

    x: Floats
    """(n, d) scaled to at most 1; first column 1."""
    fold: Ints
    """(n,) from 0."""
    order: Ints
    """The records with a known cost, by action and, within it, by fold."""
    sorted_x: Floats
    """``x`` in that order."""
    ends: Ints
    """(K, folds + 1) where each action's folds begin and end in it."""

    @classmethod
    def of(cls, x: Floats, action: Ints, known: Flags, actions: int, fold: Ints) -> Design:
        """``x``: (n, d), first column 1."""
        scale = np.abs(x).max(axis=0)
        scaled = x / np.where(scale > 0, scale, 1.0)
        folds = int(fold.max()) + 1
        key = (action * folds + fold).astype(np.int16)
        order = np.argsort(key, kind="stable")
        order = order[known[order]]
        edges = np.searchsorted(key[order], np.arange(actions * folds + 1))
        ends = np.stack([edges[one * folds : (one + 1) * folds + 1] for one in range(actions)])
        return cls(scaled, fold, order, scaled[order], ends)

    def gram(self, one: int) -> Floats:
        """x'x of an action by fold, (folds, d, d)."""
        parts = (self.sorted_x[low:high] for low, high in pairwise(self.ends[one]))
        return np.stack([part.T @ part for part in parts])

    def moment(self, one: int, sorted_cost_s: Floats) -> Floats:
        """x'cost of an action by fold, (folds, d)."""
        return np.stack([self.sorted_x[low:high].T @ sorted_cost_s[low:high] for low, high in pairwise(self.ends[one])])

    def predict(self, cost_s: Floats) -> Predicted:
        """Fit each action on its own records with a known cost. An action without any has the mean of all known costs,
        which is a guess; :mod:`kvpolicy.evaluation.diagnostics` refuses a policy that takes it.

        Raises ValueError without any known cost.
        """
        if not len(self.order):
            raise InputError("no record has a known cost")
        known_s = cost_s[self.order]
        mean_s = float(known_s.mean())
        whole, crossed = (np.empty((len(self.x), len(self.ends))) for _ in range(2))
        for one in range(len(self.ends)):
            gram, moment = self.gram(one), self.moment(one, known_s)
            grams, moments = gram.sum(0), moment.sum(0)
            coefficients = [_solve(grams, moments, mean_s)]
            coefficients += [_solve(grams - g, moments - m, mean_s) for g, m in zip(gram, moment, strict=True)]
            every = self.x @ np.stack(coefficients, axis=1)
            whole[:, one] = every[:, 0]
            crossed[:, one] = np.take_along_axis(every, (1 + self.fold)[:, None], axis=1)[:, 0]
        return Predicted(whole, crossed)

    def implied_weights(self, target: Floats) -> Floats:
        """(n,) weights w for which the mean of w c is what the direct method says of ``target``, (n, K): least squares
        is linear in the costs. What it owes to each record's cost, and so how it would vary with other records."""
        weight = np.zeros(len(self.x))
        for one, ends in enumerate(self.ends):
            mine = slice(ends[0], ends[-1])
            if ends[-1] > ends[0]:
                coefficients = _solve(self.gram(one).sum(0), self.x.T @ target[:, one], 0.0)
                weight[self.order[mine]] = self.sorted_x[mine] @ coefficients
        return weight


def folds_of(cluster: Ints, rng: np.random.Generator, folds: int = FOLDS) -> Ints:
    """(n,) the fold of each record; whole clusters are dealt out."""
    count = int(cluster.max()) + 1
    return (rng.permutation(count) % min(folds, count))[cluster]


def _solve(gram: Floats, moment: Floats, mean_s: float) -> Floats:
    count = gram[0, 0]
    if count == 0:
        return np.concatenate([[mean_s], np.zeros(len(gram) - 1)])
    penalty = RIDGE * count * np.eye(len(gram))
    penalty[0, 0] = 0.0
    return np.asarray(np.linalg.solve(gram + penalty, moment), np.float64)
