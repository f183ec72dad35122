"""Intervals and order statistics against worked numbers."""

from __future__ import annotations

import math
import random
from math import inf, nan

import numpy as np
import pytest
from scipy.stats import binom, binomtest

from kvpolicy.json_values import finite, rounded
from kvpolicy.stats import (
    Ratio,
    bootstrap_ratio,
    known_ratio,
    mean_and_percentiles,
    proportion_interval,
    quantile,
    ratio_over_starts,
    student_interval,
    student_ratio,
    unit_of,
    widened_tail,
)


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


def test_ratio_is_the_geometric_mean() -> None:
    ratio = bootstrap_ratio([2.0, 8.0], [1.0, 1.0], random.Random(0))
    assert ratio.value == pytest.approx(4.0)
    assert (ratio.low, ratio.high) == pytest.approx((2.0, 8.0))


def test_ratio_turned_round_is_its_inverse() -> None:
    above, below = [1.1, 1.3, 0.9, 1.2], [1.0, 1.1, 1.05, 0.8]
    there, back = (bootstrap_ratio(a, b, random.Random(0)) for a, b in ((above, below), (below, above)))
    assert there.value * back.value == pytest.approx(1.0)
    assert there.low * back.high == pytest.approx(1.0, rel=0.02)


def test_ratio_is_repeatable() -> None:
    above, below = [1.1, 1.3, 0.9], [1.0, 1.1, 1.05]
    assert bootstrap_ratio(above, below, random.Random(5)) == bootstrap_ratio(above, below, random.Random(5))


def test_intervals_hold_the_truth_at_their_stated_rate() -> None:
    rng = random.Random(0)
    missed = 0
    for trial in range(400):
        noisy = [math.exp(rng.gauss(0.0, 0.05)) for _ in range(8)]
        missed += bootstrap_ratio(noisy, [1.0] * 8, random.Random(trial), resamples=1000).significant
    assert 0.01 <= missed / 400 <= 0.10


def test_few_blocks_widen_the_tails() -> None:
    """At 8 blocks t is 2.365 and 2.365 sqrt(8/7) = 2.528 normal errors, beyond which lie 0.574%."""
    assert widened_tail(8) == pytest.approx(0.00574, abs=1e-5)
    assert widened_tail(10_000) == pytest.approx(0.025, rel=0.01)


@pytest.mark.parametrize(
    ("above", "below", "message"),
    [([1.0], [1.0], "at least 2"), ([1.0, 2.0], [1.0], "as many"), ([1.0, 0.0], [1.0, 1.0], "above 0")],
)
def test_impossible_ratios_are_refused(above: list[float], below: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bootstrap_ratio(above, below, random.Random(0))


def test_an_interval_that_includes_one_is_not_significant() -> None:
    assert not Ratio(1.02, 0.99, 1.05, 8).significant
    assert Ratio(1.02, 0.99, 1.05, 3).text() == "1.020 (0.990 to 1.050)"
    for ratio in (student_ratio([0.5, 1.0], [1.0, 1.0]), Ratio(0.71, None, None, 1)):  # the first from 0.01 to 57
        assert "no interval" in ratio.text() and " to " not in ratio.text()
    assert Ratio(1.02, 1.01, 1.05, 8).significant


def test_a_start_counts_once_by_its_geometric_means() -> None:
    """Two rounds of a start are 2 and 8 times the others, that of the other start 3 times."""
    values, others = [2.0, 8.0, 6.0], [1.0, 1.0, 2.0]
    found = ratio_over_starts(values, others, [0, 0, 1])
    expected = student_ratio([4.0, 6.0], [1.0, 2.0])
    assert (found.pairs, found.to_dict()) == (2, pytest.approx(expected.to_dict()))
    assert ratio_over_starts(values, others, [7, 7, 7]) == student_ratio(values, others), "one start: over rounds"
    assert unit_of(1) == "rounds of one process each" and unit_of(10) == "10 starts of the servers"


@pytest.mark.parametrize("unknown", [0.0, None])
def test_a_figure_that_is_0_or_unknown_in_a_pair_has_no_ratio(unknown: float | None) -> None:
    values, others = [2.0, 8.0, 6.0], [1.0, 1.0, 2.0]
    assert known_ratio(values, others, [0, 0, 1]) == ratio_over_starts(values, others, [0, 0, 1])
    for place in range(3):
        gone = [unknown if number == place else value for number, value in enumerate(values)]
        assert known_ratio(gone, others, [0, 0, 1]) is known_ratio(others, gone, [0, 0, 1]) is None
    assert known_ratio([], [], []) is None


def test_percentiles_by_hand() -> None:
    statistics = mean_and_percentiles([4.0, 1.0, 3.0, 2.0, 5.0])
    assert statistics == {"mean": 3.0, "p50": 3.0, "p99": pytest.approx(4.96)}
    with pytest.raises(ValueError, match="no values"):
        mean_and_percentiles([])


def test_rounded_values_keep_whole_numbers_and_lose_what_is_left_out() -> None:
    value = {"a": (1 / 3, 12345678), "b": {"c": "text", "left": 1.5}, "left": [2.0]}
    assert rounded(value, 3, {"left"}) == {"a": [0.333, 12345678], "b": {"c": "text"}}
    assert rounded(123456.789) == 123457.0
