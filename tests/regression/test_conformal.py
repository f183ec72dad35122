"""Margins beyond the trained range: distance, growth and coverage, worked by hand."""

from __future__ import annotations

from math import inf, log

import pytest

from kvpolicy.regression.conformal import (
    Half,
    Widening,
    carries,
    distance_beyond,
    excess,
    grown,
    growth_of,
    widening_of,
)


def test_distance_is_the_log_above_and_the_missing_share_below() -> None:
    assert distance_beyond(50.0, 10.0, 100.0, 1.0) == 0.0
    assert distance_beyond(10.0, 10.0, 100.0, 1.0) == distance_beyond(100.0, 10.0, 100.0, 1.0) == 0.0
    assert distance_beyond(403.0, 10.0, 100.0, 1.0) == pytest.approx(log(4.0))
    assert distance_beyond(1615.0, 10.0, 100.0, 2.0) == pytest.approx(log(4.0))
    assert distance_beyond(1.0, 0.0, 0.0, 1.0) == pytest.approx(log(2.0))
    assert distance_beyond(0.0, 10.0, 100.0, 1.0) == 1.0
    assert distance_beyond(7.5, 10.0, 100.0, 1.0) == pytest.approx(0.25)


def test_room_grows_with_the_distance_alone() -> None:
    assert grown(0.1, 0.5, 2.0) == pytest.approx(1.1)
    assert grown(0.1, inf, 0.0) == 0.1
    assert grown(0.1, inf, 1e-9) == inf


def test_a_score_is_what_sticks_out_to_either_side_over_the_distance() -> None:
    room = (0.1, 0.3)
    assert excess(0.2, room, 2.0) == excess(-0.1, room, 2.0) == 0.0
    assert excess(0.9, room, 2.0) == pytest.approx(0.3)
    assert excess(-0.9, room, 2.0) == pytest.approx(0.4)


def test_growth_worked_by_hand() -> None:
    """Of 19 states the ceil(0.9 x 20) = 18th smallest score; twice each, from two fits, the 36th of 38."""
    scores = [float(i) for i in range(1, 20)]
    assert growth_of(scores, 19, 0.9) == 18.0
    assert growth_of([*scores, *scores], 19, 0.9) == 18.0
    assert growth_of(scores[:9], 9, 0.9) == 9.0
    assert growth_of(scores[:8], 8, 0.9) == inf


def test_a_residual_is_kept_where_it_misses_less() -> None:
    small, large = [0.1, -0.1] * 10, [0.3, -0.3] * 10
    assert carries(small, large, 20, default=False)
    assert not carries(large, small, 20, default=True)
    assert carries(large, small, 8, default=True)
    assert not carries(small, small, 20, default=False)


def test_a_widening_is_a_step_and_then_a_growth() -> None:
    widening = Widening(step=0.2, growth=0.4)
    assert [widening.at(distance) for distance in (0.0, 0.1, 0.5, 1.0)] == [0.0, 0.2, 0.2, 0.4]


def test_the_worst_half_of_the_worst_fit_widens_worked_by_hand() -> None:
    """Nine of ten rows are flat, so that pooled scores would widen by next to nothing."""
    flat = Half(True, [0.05] * 90, [0.5] * 90, 90)
    near, far = Half(True, [0.3] * 9, [0.5] * 9, 9), Half(False, [-0.9] * 9, [1.0] * 9, 9)
    pooled = [0.0] * 90 + [excess(0.3, (0.1, 0.1), 0.5)] * 9
    assert growth_of(pooled, 99, 0.9) == 0.0
    widening = widening_of([flat, near, far], (0.1, 0.1), 0.9)
    assert widening.step == pytest.approx(0.2) and widening.growth == pytest.approx(0.8)
    assert widening_of([flat], (0.1, 0.1), 0.9) == Widening(0.0, 0.0)


def test_a_half_of_few_states_counts_with_its_largest_score() -> None:
    halves = [Half(True, [0.1, 0.2, 0.6], [1.0, 1.0, 1.0], 3)]
    assert widening_of(halves, (0.1, 0.1), 0.9).step == pytest.approx(0.5)
