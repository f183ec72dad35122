"""Least squares for times: no coefficient below zero, relative errors, robust to outliers.

All fits of physics use these functions: step times, laws of cost models, ceilings of operators.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import nnls

from kvpolicy.arrays import Floats

ROUNDS = 30
OUTLIER_SCALES = 2.5
"""Relative residuals above this many robust standard deviations count only linearly (Huber 1964)."""
MIN_SHARE = 0.05
"""Share of the median time, below which errors count as absolute where the caller knows no noise floor."""
FIRST_IS_TAKEN = 1e-9
"""Relative length that a column loses for each one before it. Of collinear columns the first then gets the whole
coefficient, whatever the rounding."""

BLOCK_ROWS = 256


def relative_fit(
    design: Floats,
    seconds: Floats,
    floor: Floats | float,
    weight: Floats | None = None,
    start: Floats | None = None,
    robust: bool = True,
) -> Floats:
    """Coefficients c >= 0 that minimise the relative error of ``design @ c``; below ``floor`` the absolute error.

    ``design``: shape (rows, columns). ``seconds`` may hold values below 0. ``floor``: seconds, for all rows or for
    each. ``start``: the predictions that the first round's errors are relative to; by default ``seconds``, raised to
    the floor. ``robust``: weigh rows by Huber's weights.

    Iteratively reweighted: a row's weight is Huber's over the squared prediction, so that errors count relative to what
    is predicted. Relative to the measured time, rows that noise made cheap would dominate the fit.
    """
    expected = np.maximum(seconds, floor) if start is None else start
    given = np.ones(len(seconds)) if weight is None else weight
    huber = np.ones(len(seconds))
    coefficients = np.zeros(design.shape[1])
    for iteration in range(ROUNDS):
        previous = coefficients
        coefficients = nonnegative_fit(design, seconds, given * huber / expected**2)
        if iteration and np.allclose(coefficients, previous, rtol=1e-6, atol=0.0):
            break
        predicted = design @ coefficients
        expected = np.maximum(predicted, floor)
        if robust:
            relative_errors = np.abs(seconds - predicted) / expected
            limit = OUTLIER_SCALES * max(1.4826 * float(np.median(relative_errors)), 1e-9)
            huber = np.minimum(1.0, limit / np.maximum(relative_errors, 1e-300))
    return coefficients


def typical_floor(seconds: Floats) -> float:
    """A floor for :func:`relative_fit`: a share of the median size."""
    return MIN_SHARE * float(np.median(np.abs(seconds)))


def nonnegative_fit(design: Floats, values: Floats, weights: Floats) -> Floats:
    """Weighted least squares with no coefficient below zero (Lawson and Hanson, 1974)."""
    root = np.sqrt(weights / weights.max())
    weighted, target = design * root[:, None], values * root
    scale = np.linalg.norm(weighted, axis=0)
    scale[scale == 0] = 1.0
    scale *= 1.0 + FIRST_IS_TAKEN * np.arange(len(scale))
    norm = float(np.linalg.norm(target)) or 1.0
    triangle = _triangle(np.column_stack([weighted / scale, target / norm]))
    solution, _ = nnls(triangle[:, :-1], triangle[:, -1])
    return np.asarray(solution * norm / scale, np.float64)


def _triangle(rows: Floats) -> Floats:
    """R of the QR decomposition: a least squares problem of as few rows as columns, with the same solution.

    Many rows are decomposed in blocks first, which is faster.
    """
    blocks = len(rows) // BLOCK_ROWS
    if blocks > 1:
        whole = blocks * BLOCK_ROWS
        triangles = np.linalg.qr(rows[:whole].reshape(blocks, BLOCK_ROWS, -1), mode="r")
        rows = np.vstack([np.asarray(triangles).reshape(-1, rows.shape[1]), rows[whole:]])
    return np.asarray(np.linalg.qr(rows, mode="r"), np.float64)
