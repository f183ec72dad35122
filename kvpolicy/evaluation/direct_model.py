"""The direct model: cost of an action in a situation, by least squares on the records in which it was taken.

The direct method (DM) relies on it alone; doubly robust estimates only become less precise if it is wrong. It is linear
in few columns: sums of squares are kept by fold, and a fit without a fold subtracts the fold's sums from the total.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from kvpolicy.arrays import Flags, Floats, Ints
from kvpolicy.errors import InputError

FOLDS = 5
RIDGE = 1e-6
"""Ridge penalty, as a share of the (scaled) sums of squares: keeps the solution unique if columns are collinear."""


@dataclass(frozen=True)
class DirectCosts:
    """(n, K) predicted costs, seconds."""

    in_sample: Floats
    """By one fit to all records."""
    cross_fitted: Floats
    """Each record by a fit to the other folds."""


@dataclass(frozen=True)
class Design:
    """The records that a direct model is fitted to, sorted by action and fold so that each is a slice."""

    x: Floats
    """(n, d) scaled to at most 1; first column 1."""
    fold: Ints
    """(n,) from 0."""
    order: Ints
    """Numbers of the records with a known cost, by action and, within an action, by fold."""
    sorted_x: Floats
    """``x`` in that order."""
    ends: Ints
    """(K, folds + 1) positions in ``order`` at which each action's folds begin and end."""

    @classmethod
    def of(cls, x: Floats, action: Ints, known: Flags, actions: int, fold: Ints) -> Design:
        """Sort the records. ``x``: (n, d), first column 1."""
        scale = np.abs(x).max(axis=0)
        scaled = x / np.where(scale > 0, scale, 1.0)
        folds = int(fold.max()) + 1
        key = (action * folds + fold).astype(np.int16)
        order = np.argsort(key, kind="stable")
        order = order[known[order]]
        edges = np.searchsorted(key[order], np.arange(actions * folds + 1))
        ends = np.stack([edges[index * folds : (index + 1) * folds + 1] for index in range(actions)])
        return cls(scaled, fold, order, scaled[order], ends)

    def gram(self, action: int) -> Floats:
        """x'x of an action by fold, (folds, d, d)."""
        slices = (self.sorted_x[low:high] for low, high in pairwise(self.ends[action]))
        return np.stack([part.T @ part for part in slices])

    def moment(self, action: int, sorted_cost_s: Floats) -> Floats:
        """x'cost of an action by fold, (folds, d)."""
        return np.stack(
            [self.sorted_x[low:high].T @ sorted_cost_s[low:high] for low, high in pairwise(self.ends[action])]
        )

    def predict(self, cost_s: Floats) -> DirectCosts:
        """Fit each action on its own records with a known cost, and predict all records.

        An action without such records is predicted the mean of all known costs; :mod:`kvpolicy.evaluation.diagnostics`
        refuses a policy that takes it. Raises InputError if no cost is known.
        """
        if not len(self.order):
            raise InputError("no record has a known cost")
        known_s = cost_s[self.order]
        mean_s = float(known_s.mean())
        in_sample, cross_fitted = (np.empty((len(self.x), len(self.ends))) for _ in range(2))
        for action in range(len(self.ends)):
            gram, moment = self.gram(action), self.moment(action, known_s)
            grams, moments = gram.sum(0), moment.sum(0)
            coefficients = [_solve(grams, moments, mean_s)]
            coefficients += [_solve(grams - g, moments - m, mean_s) for g, m in zip(gram, moment, strict=True)]
            predictions = self.x @ np.stack(coefficients, axis=1)
            in_sample[:, action] = predictions[:, 0]
            cross_fitted[:, action] = np.take_along_axis(predictions, (1 + self.fold)[:, None], axis=1)[:, 0]
        return DirectCosts(in_sample, cross_fitted)

    def implied_weights(self, target: Floats) -> Floats:
        """(n,) weights w such that the mean of w c is the direct method's estimate for ``target``, (n, K).

        They exist because least squares is linear in the costs c. A weight is the influence of one record's cost, from
        which the variance of the estimate follows.
        """
        weight = np.zeros(len(self.x))
        for action, ends in enumerate(self.ends):
            rows = slice(ends[0], ends[-1])
            if ends[-1] > ends[0]:
                coefficients = _solve(self.gram(action).sum(0), self.x.T @ target[:, action], 0.0)
                weight[self.order[rows]] = self.sorted_x[rows] @ coefficients
        return weight


def folds_of(cluster: Ints, rng: np.random.Generator, folds: int = FOLDS) -> Ints:
    """(n,) fold of each record; clusters are kept whole."""
    count = int(cluster.max()) + 1
    return (rng.permutation(count) % min(folds, count))[cluster]


def _solve(gram: Floats, moment: Floats, mean_s: float) -> Floats:
    count = gram[0, 0]
    if count == 0:
        return np.concatenate([[mean_s], np.zeros(len(gram) - 1)])
    penalty = RIDGE * count * np.eye(len(gram))
    penalty[0, 0] = 0.0
    return np.asarray(np.linalg.solve(gram + penalty, moment), np.float64)
