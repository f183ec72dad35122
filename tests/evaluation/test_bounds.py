"""Intervals: worked by hand where that is possible, and holding what they promise where it is not."""

from __future__ import annotations

from math import log, sqrt
from statistics import fmean, stdev, variance

import numpy as np
import pytest

from kvpolicy.evaluation.bounds import (
    ERROR,
    MAX_GROUPS,
    TIGHTEST_AT,
    Resamples,
    Terms,
    bernstein,
    bootstrap,
    sequence,
    spread_of_mean,
)


def drawn(cluster: np.ndarray, seed: int = 0, resamples: int = 2000) -> Resamples:
    return Resamples.of(cluster, np.random.default_rng(seed), resamples)


def test_standard_error_of_single_records_is_the_textbooks() -> None:
    values = np.random.default_rng(0).normal(size=50)
    assert spread_of_mean(values, np.arange(50)) == pytest.approx(stdev(values) / sqrt(50))


def test_clusters_that_repeat_themselves_count_once() -> None:
    values = np.random.default_rng(0).normal(size=50)
    thrice = np.repeat(values, 3)
    assert spread_of_mean(thrice, np.repeat(np.arange(50), 3)) == pytest.approx(stdev(values) / sqrt(50))
    low, high = bootstrap(Terms(thrice), drawn(np.repeat(np.arange(50), 3)))
    one_low, one_high = bootstrap(Terms(values), drawn(np.arange(50)))
    assert (low, high) == pytest.approx((one_low, one_high))


def test_bootstrap_of_normal_values_is_near_students() -> None:
    values = np.random.default_rng(1).normal(5.0, 1.0, 400)
    low, high = bootstrap(Terms(values), drawn(np.arange(400)))
    wide = 1.96 * stdev(values) / 20
    assert (values.mean() - low, high - values.mean()) == pytest.approx((wide, wide), rel=0.12)


def test_a_ratio_is_scale_free_in_its_norm() -> None:
    rng = np.random.default_rng(2)
    value, norm = rng.random(300), rng.random(300) + 0.1
    one = bootstrap(Terms(value, norm), drawn(np.arange(300)))
    assert bootstrap(Terms(value, 7 * norm), drawn(np.arange(300))) == pytest.approx([x / 7 for x in one])
    assert bootstrap(Terms(1e-6 * value, norm), drawn(np.arange(300))) == pytest.approx([1e-6 * x for x in one])


def test_constant_values_have_no_width() -> None:
    assert bootstrap(Terms(np.full(30, 2.0)), drawn(np.arange(30))) == (2.0, 2.0)


def test_many_clusters_are_joined_and_say_the_same() -> None:
    rng = np.random.default_rng(3)
    n = 3 * MAX_GROUPS
    values = rng.exponential(size=n)
    joined = drawn(np.arange(n))
    assert joined.groups == MAX_GROUPS
    low, high = bootstrap(Terms(values), joined)
    assert high - low == pytest.approx(2 * 1.96 * stdev(values) / sqrt(n), rel=0.1)


def test_coverage_of_skewed_means_in_clusters() -> None:
    """Binomial: of 400 intervals of a true 95%, under 91.5% come up once in a thousand."""
    rng = np.random.default_rng(4)
    held = 0
    cluster = np.repeat(np.arange(150), 2)
    for seed in range(400):
        values = rng.exponential(size=150)[cluster] * rng.exponential(size=300)
        low, high = bootstrap(Terms(values), drawn(cluster, seed, 400))
        held += low <= 1.0 <= high
    assert held / 400 >= 0.915


def test_bernstein_worked_by_hand() -> None:
    values = np.array([0.0, 1.0, 1.0, 0.0, 1.0] * 400)
    low, high = bernstein(Terms(values), np.arange(2000), (0.0, 1.0))
    room = sqrt(2 * variance(values) * log(80) / 2000) + 7 * log(80) / (3 * 1999)
    assert (low, high) == pytest.approx((fmean(values) - room, fmean(values) + room))


def test_bernstein_stays_within_limits_and_refuses_what_is_outside() -> None:
    assert bernstein(Terms(np.array([0.0, 1.0, 1.0])), np.arange(3), (0.0, 1.0)) == (0.0, 1.0)
    with pytest.raises(ValueError, match="the limits are"):
        bernstein(Terms(np.array([0.0, 2.0])), np.arange(2), (0.0, 1.0))
    with pytest.raises(ValueError, match="self-normalised"):
        bernstein(Terms(np.ones(2), np.ones(2)), np.arange(2), (0.0, 1.0))


def test_sequence_worked_by_hand_and_wider_than_one_look() -> None:
    values = np.random.default_rng(5).normal(size=TIGHTEST_AT)
    low, high = sequence(Terms(values), np.arange(TIGHTEST_AT))
    rho2 = (-2 * log(ERROR) + log(-2 * log(ERROR)) + 1) / TIGHTEST_AT
    t = TIGHTEST_AT
    room = stdev(values) * sqrt(2 * (t * rho2 + 1) / (t * t * rho2) * log(sqrt(t * rho2 + 1) / ERROR))
    assert (low, high) == pytest.approx((values.mean() - room, values.mean() + room))
    assert room > 1.96 * stdev(values) / sqrt(t)


def test_a_sequence_may_be_looked_at_all_the_time() -> None:
    """Watched from 100 clusters on, at every 20th: few of 200 walks ever leave it, many leave the fixed interval."""
    rng = np.random.default_rng(6)
    left, fixed_left = 0, 0
    for _ in range(200):
        values = rng.normal(size=2000)
        looks = range(100, 2001, 20)
        spans = [(sequence(Terms(values[:n]), np.arange(n)), n) for n in looks]
        left += any(not low <= 0 <= high for (low, high), _ in spans)
        fixed_left += any(abs(values[:n].mean()) > 1.96 / sqrt(n) for n in looks)
    assert left / 200 <= 0.08
    assert fixed_left > 2 * left + 20


def test_one_cluster_has_no_interval() -> None:
    with pytest.raises(ValueError, match="one cluster alone"):
        sequence(Terms(np.array([1.0, 2.0])), np.zeros(2, int))
