"""Least squares for times: no coefficient below zero, errors relative, outliers held down."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from sklearn.linear_model import LinearRegression

from kvpolicy.arrays import Floats

ROUNDS = 20
OUTLIER_SCALES = 2.5
"""Relative residuals beyond that many robust standard deviations count only linearly (Huber 1964)."""


def robust_nonnegative_fit(design: Floats, seconds: Floats) -> Floats:
    """Coefficients c >= 0 with ``design @ c`` near ``seconds`` in relative terms.

    ``design``: shape (rows, columns), a handful of columns. Iteratively reweighted: a row's weight is Huber's over the
    squared prediction, so that a step twice as long may be missed by twice as much.
    """
    expected = np.maximum(seconds, np.quantile(seconds, 0.05))
    coefficients = np.zeros(design.shape[1])
    huber = np.ones(len(seconds))
    for number in range(ROUNDS):
        before = coefficients
        coefficients = nonnegative_fit(design, seconds, huber / expected**2)
        if number and np.allclose(coefficients, before, rtol=1e-6, atol=0.0):
            break
        predicted = design @ coefficients
        expected = np.maximum(predicted, 0.05 * np.median(seconds))
        missed = np.abs(seconds - predicted) / expected
        limit = OUTLIER_SCALES * max(1.4826 * float(np.median(missed)), 1e-9)
        huber = np.minimum(1.0, limit / np.maximum(missed, 1e-300))
    return coefficients


def nonnegative_fit(design: Floats, values: Floats, weights: Floats) -> Floats:
    """Weighted least squares with no coefficient below zero, exactly.

    The best non-negative solution is the unconstrained one on its own support: with a handful of columns every
    support can be tried.
    """
    weighted = design * weights[:, None]
    gram, target = design.T @ weighted, weighted.T @ values
    scale = np.sqrt(np.diag(gram))
    usable = [i for i in range(len(scale)) if scale[i] > 0]
    scale = np.where(scale > 0, scale, 1.0)
    gram, target = gram / np.outer(scale, scale), target / scale
    best, lowest = np.zeros(len(scale)), 0.0
    for size in range(1, len(usable) + 1):
        for support in map(list, combinations(usable, size)):
            found = np.linalg.lstsq(gram[np.ix_(support, support)], target[support], rcond=1e-12)[0]
            loss = found @ gram[np.ix_(support, support)] @ found - 2 * found @ target[support]
            if found.min() >= 0 and loss < lowest - 1e-12 * abs(lowest):
                lowest = float(loss)
                best = np.zeros(len(scale))
                best[support] = found
    return np.asarray(best / scale, dtype=np.float64)


def relative_sum(design: Floats, seconds: Floats, weight: Floats) -> Floats:
    """Coefficients c >= 0 with ``design @ c`` near ``seconds`` under ``weight``; ``design``: (rows, columns)."""
    scale = np.abs(design).max(axis=0)
    scale[scale == 0] = 1.0
    # Weights of order one: the solver's tolerance is absolute.
    fitted = LinearRegression(positive=True, fit_intercept=False).fit(
        design / scale, seconds, sample_weight=weight / weight.mean()
    )
    return np.asarray(np.maximum(fitted.coef_ / scale, 0.0), np.float64)
