"""Interpolation in tables: at points, between them and beyond them, compiled as in plain Python."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose

from kvpolicy.simulator.hardware.interpolation import curve, hyperplane, interval_of, physics, plane, triangle

AXIS = np.array([1.0, 4.0, 16.0])


@pytest.mark.parametrize(("at", "index"), [(0.0, 0), (1.0, 0), (3.9, 0), (4.0, 1), (15.0, 1), (16.0, 1), (99.0, 1)])
def test_the_interval_that_holds_a_point(at: float, index: int) -> None:
    assert interval_of(AXIS, at) == index


def test_a_curve_is_linear_between_points_constant_below_and_rises_beyond() -> None:
    seconds = np.array([2.0, 5.0, 6.0])
    for at, value in ((0.0, 2.0), (1.0, 2.0), (2.0, 3.0), (4.0, 5.0), (10.0, 5.5), (16.0, 6.0), (18.0, 7.0)):
        assert curve(AXIS, seconds, 0.5, at) == pytest.approx(value)


def test_a_plane_gives_back_what_is_linear_in_each_axis() -> None:
    second = np.array([0.0, 10.0])
    seconds = np.array([3 + a * (2 + b) for a in AXIS for b in second])
    for a, b in ((1.0, 0.0), (16.0, 10.0), (2.5, 7.0), (9.0, 0.5)):
        assert plane(AXIS, second, seconds, a, b) == pytest.approx(3 + a * (2 + b))


def test_four_axes_are_linear_in_each() -> None:
    second = np.array([0.0, 10.0])
    seconds = np.array(
        [(1 + c) * (2 + k) * (3 + n) * (4 + d) for c in AXIS for k in second for n in AXIS for d in second]
    )
    for c, k, n, d in ((1.0, 0.0, 1.0, 0.0), (2.0, 3.0, 9.0, 7.0), (16.0, 10.0, 16.0, 10.0)):
        result = hyperplane(AXIS, second, AXIS, second, seconds, c, k, n, d)
        assert result == pytest.approx((1 + c) * (2 + k) * (3 + n) * (4 + d))


def test_pairs_of_a_chunk_are_counted_with_its_diagonal() -> None:
    assert triangle(3, 5) == (5 + 1) + (5 + 2) + (5 + 3)


def test_each_term_of_physics_grows_with_its_own_column() -> None:
    expected = [1.0, 20.0, 3.0, 5.0 + 3.0, 4.0 * 7.0, 7.0, 4.0]
    results = [physics(constants, c=3.0, pairs=20.0, k=5.0, n=4.0, d=7.0) for constants in np.eye(7)]
    assert_allclose(results, expected)
