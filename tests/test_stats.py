"""Intervals and order statistics against worked numbers."""

from __future__ import annotations

from math import inf, nan

import numpy as np
import pytest
from scipy.stats import binom, binomtest

from kvpolicy.json_values import finite
from kvpolicy.stats import proportion_interval, quantile, student_interval


@pytest.mark.parametrize(("successes", "trials"), [(0, 7), (3, 7), (7, 7), (171, 200)])
def test_a_proportion_as_scipy_has_it(successes: int, trials: int) -> None:
    bounds = binomtest(successes, trials).proportion_ci(0.95, "exact")
    assert proportion_interval(successes, trials) == pytest.approx((bounds.low, bounds.high), abs=1e-9)


def test_no_trials_give_the_whole_interval() -> None:
    assert proportion_interval(0, 0) == (0.0, 1.0)


def test_students_interval_worked_by_hand() -> None:
    """Mean 2, deviation 1, three values: t of 2 degrees of freedom at 97.5% is 4.302653."""
    mean, low, high = student_interval([1.0, 2.0, 3.0])
    assert mean == 2.0 and high - mean == pytest.approx(4.302653 / 3**0.5, rel=1e-6) and mean - low == high - mean


def test_a_quantile_is_linear_between_order_statistics() -> None:
    values = [5.0, 1.0, 4.0, 2.0]
    for share in (0.0, 0.1, 0.5, 0.99, 1.0):
        assert quantile(values, share) == pytest.approx(float(np.quantile(values, share)))
    with pytest.raises(ValueError, match="no values"):
        quantile([], 0.5)


def test_json_knows_neither_infinity_nor_nan() -> None:
    plain = finite({"a": (1.0, inf), "b": {"c": nan, "d": 2}, "e": "inf", "f": None})
    assert plain == {"a": [1.0, None], "b": {"c": None, "d": 2}, "e": "inf", "f": None}


@pytest.mark.parametrize(("successes", "trials"), [(17, 21), (1, 1), (0, 5), (450, 500), (3, 8)])
def test_clopper_pearson_against_the_binomial_it_inverts(successes: int, trials: int) -> None:
    low, high = proportion_interval(successes, trials)
    assert 0 <= low <= successes / trials <= high <= 1
    if successes:
        assert binom.sf(successes - 1, trials, low) == pytest.approx(0.025, rel=1e-6)
    if successes < trials:
        assert binom.cdf(successes, trials, high) == pytest.approx(0.025, rel=1e-6)
    assert proportion_interval(0, 0) == (0.0, 1.0)
