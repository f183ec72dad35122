"""Nonnegative least squares: no coefficient is below zero, whatever the unit of time."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import nnls

from kvpolicy.regression.nnls import nonnegative_fit, relative_fit, typical_floor


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
    floor = typical_floor(seconds)
    assert relative_fit(design, 1e-4 * seconds, 1e-4 * floor) == pytest.approx(
        1e-4 * relative_fit(design, seconds, floor), rel=1e-5
    )


@pytest.mark.parametrize("ratio", [1.0, 3.7, 1e-9])
def test_of_columns_that_grow_together_the_first_gets_everything(ratio: float) -> None:
    """Saves and loads of a profile without shared blocks: which of both costs cannot be known, and must not be luck."""
    rng = np.random.default_rng(6)
    column = rng.uniform(1.0, 1e9, 150)
    seconds = 1e-3 + 2e-10 * column * np.exp(0.1 * rng.standard_normal(150))
    design = np.column_stack([np.ones(150), column, ratio * column])
    coefficients = nonnegative_fit(design, seconds, 1.0 / seconds**2)
    assert coefficients[1] == pytest.approx(2e-10, rel=0.1)
    assert coefficients[2] * ratio < 1e-6 * coefficients[1]


def test_columns_of_any_number_and_size_and_one_of_zeros() -> None:
    rng = np.random.default_rng(7)
    scales = 10.0 ** rng.uniform(-9, 9, 14)
    design = rng.uniform(0.5, 1.0, (500, 14)) * scales
    design[:, 3] = 0.0
    wanted = np.where(np.arange(14) % 3, rng.uniform(1.0, 2.0, 14), 0.0) / scales
    wanted[3] = 0.0
    fitted = nonnegative_fit(design, design @ wanted, np.ones(500))
    assert fitted * scales == pytest.approx(wanted * scales, abs=1e-6)


def test_fewer_rows_than_columns_are_fitted() -> None:
    design = np.array([[1.0, 2.0, 3.0], [1.0, 5.0, 1.0]])
    fitted = nonnegative_fit(design, np.array([2.0, 3.0]), np.ones(2))
    assert fitted.min() >= 0
    assert design @ fitted == pytest.approx([2.0, 3.0])


@pytest.mark.parametrize("rows", [511, 512, 1000])
def test_many_rows_are_fitted_as_few_are(rows: int) -> None:
    """Rows are decomposed in blocks of 256; those after the last whole block, here far above the others, count too."""
    rng = np.random.default_rng(rows)
    design = np.column_stack([np.ones(rows), rng.random((rows, 2))])
    values = design @ np.array([1.0, 2.0, 0.5]) + 0.1 * rng.standard_normal(rows)
    values[-200:] += 5.0
    weights = rng.uniform(0.5, 2.0, rows)
    wanted, _ = nnls(design * np.sqrt(weights)[:, None], values * np.sqrt(weights))
    assert nonnegative_fit(design, values, weights) == pytest.approx(wanted, rel=1e-6)
