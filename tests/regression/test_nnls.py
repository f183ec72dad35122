"""Nonnegative least squares: no coefficient is below zero, whatever the unit of time."""

from __future__ import annotations

import numpy as np
import pytest

from kvpolicy.regression.nnls import nonnegative_fit, robust_nonnegative_fit


def test_no_part_of_a_step_gets_cheaper_by_growing() -> None:
    rng = np.random.default_rng(3)
    design = np.column_stack([np.ones(200), rng.random((200, 3))])
    falling = 1.0 + design @ np.array([0.0, 2.0, -0.5, 0.0])
    coefficients = nonnegative_fit(design, falling, np.ones(200))
    assert coefficients.min() >= 0
    assert coefficients[2] == 0
    best = np.sum((falling - design @ coefficients) ** 2)
    for _ in range(500):  # nothing near it that is allowed is better
        other = np.maximum(0.0, coefficients + 0.05 * rng.standard_normal(4))
        assert np.sum((falling - design @ other) ** 2) >= best - 1e-9


def test_fit_does_not_depend_on_the_unit_of_time() -> None:
    rng = np.random.default_rng(4)
    design = np.column_stack([np.ones(300), rng.random((300, 2))])
    seconds = design @ np.array([1.0, 2.0, 0.5]) * np.exp(0.1 * rng.standard_normal(300))
    assert robust_nonnegative_fit(design, 1e-4 * seconds) == pytest.approx(
        1e-4 * robust_nonnegative_fit(design, seconds), rel=1e-5
    )
