"""Least squares for times: no coefficient below zero, relative errors, robust to outliers."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from sklearn.linear_model import LinearRegression

from kvpolicy.arrays import Floats

ROUNDS = 20
OUTLIER_SCALES = 2.5
"""Relative residuals above this many robust standard deviations count only linearly (Huber 1964)."""


def robust_nonnegative_fit(design: Floats, seconds: Floats) -> Floats:
    """Coefficients c >= 0 that minimise the relative error of ``design @ c``.

    ``design``: shape (rows, columns), with few columns. Iteratively reweighted: a row's weight is Huber's weight over
    the squared prediction, so that the error of a step counts relative to its duration.
    """
    expected = np.maximum(seconds, np.quantile(seconds, 0.05))
    coefficients = np.zeros(design.shape[1])
    huber = np.ones(len(seconds))
    for iteration in range(ROUNDS):
        previous = coefficients
        coefficients = nonnegative_fit(design, seconds, huber / expected**2)
        if iteration and np.allclose(coefficients, previous, rtol=1e-6, atol=0.0):
            break
        predicted = design @ coefficients
        expected = np.maximum(predicted, 0.05 * np.median(seconds))
        relative_errors = np.abs(seconds - predicted) / expected
        limit = OUTLIER_SCALES * max(1.4826 * float(np.median(relative_errors)), 1e-9)
        huber = np.minimum(1.0, limit / np.maximum(relative_errors, 1e-300))
    return coefficients


def nonnegative_fit(design: Floats, values: Floats, weights: Floats) -> Floats:
    """Weighted least squares with no coefficient below zero, exactly.

    The best non-negative solution is the unconstrained one on its own support; with few columns all supports can be
    tried.
    """
    weighted = design * weights[:, None]
    gram, target = design.T @ weighted, weighted.T @ values
    scale = np.sqrt(np.diag(gram))
    usable = [i for i in range(len(scale)) if scale[i] > 0]
    scale = np.where(scale > 0, scale, 1.0)
    gram, target = gram / np.outer(scale, scale), target / scale
    solution, lowest = np.zeros(len(scale)), 0.0
    for size in range(1, len(usable) + 1):
        for support in map(list, combinations(usable, size)):
            coefficients = np.linalg.lstsq(gram[np.ix_(support, support)], target[support], rcond=1e-12)[0]
            loss = coefficients @ gram[np.ix_(support, support)] @ coefficients - 2 * coefficients @ target[support]
            if coefficients.min() >= 0 and loss < lowest - 1e-12 * abs(lowest):
                lowest = float(loss)
                solution = np.zeros(len(scale))
                solution[support] = coefficients
    return np.asarray(solution / scale, dtype=np.float64)


def relative_sum(design: Floats, seconds: Floats, weight: Floats) -> Floats:
    """Coefficients c >= 0 that minimise the weighted squared error of ``design @ c``; ``design``: (rows, columns)."""
    scale = np.abs(design).max(axis=0)
    scale[scale == 0] = 1.0
    # The solver's tolerance is absolute, so weights are scaled to order one.
    fitted = LinearRegression(positive=True, fit_intercept=False).fit(
        design / scale, seconds, sample_weight=weight / weight.mean()
    )
    return np.asarray(np.maximum(fitted.coef_ / scale, 0.0), np.float64)
