"""Split-conformal intervals: the quantiles worked by hand, bins, honesty with few states, coverage."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.cost.intervals import (
    PREDICTED,
    Intervals,
    bin_number,
    calibrate,
    carried_quantities,
    conformal_margin,
    octave_bins,
    unbounded,
)
from tests.cost.score_samples import misses, spread


def test_both_quantiles_worked_by_hand() -> None:
    """Of 39 scores 36 of 40 gaps are to be inside: 4 are left for both tails, so the 2nd and the 38th."""
    scores = [float(i) for i in range(-9, 30)]
    assert conformal_margin(scores) == (8.0, 28.0)
    assert conformal_margin([-score for score in scores]) == (28.0, 8.0)


def test_a_prediction_is_in_its_own_interval_even_where_all_measured_more() -> None:
    assert conformal_margin([1.0 + i for i in range(39)]) == (0.0, 38.0)
    assert conformal_margin([-1.0 - i for i in range(39)]) == (38.0, 0.0)


def test_too_few_scores_for_two_tails_are_taken_alike() -> None:
    """Of 18 the ceil(0.9 x 19) = 18th largest miss; of 9 the 9th; of 8 there is none."""
    assert conformal_margin([float(-i) for i in range(18)]) == (17.0, 17.0)
    assert conformal_margin([float(i) for i in range(1, 10)]) == (9.0, 9.0)
    assert conformal_margin([1.0] * 8) == (inf, inf)


def test_too_few_states_make_an_infinite_interval_and_it_survives_the_file() -> None:
    intervals = calibrate([misses(100, 0.1)] * 8)
    assert intervals.room("ratio", 0, False) == (inf, inf)
    assert Intervals.from_dict(intervals.to_dict()) == intervals
    assert calibrate([]) == unbounded()


def test_bins_under_thirty_states_are_merged_with_a_neighbour() -> None:
    short = [misses(40 + i % 20, 0.1) for i in range(29)]
    middle = [misses(300 + i, 0.2) for i in range(40)]
    long = [misses(5000 + i, 0.3) for i in range(29)]
    assert calibrate([*short, *middle, *long]).states == (98,)
    apart = calibrate([*short, misses(63, 0.1), *middle, *long, misses(5100, 0.3)])
    assert apart.states == (30, 40, 30)
    assert apart.length_edges == (300, 5000)
    assert [apart.bin_of(tokens, 7) for tokens in (1, 299, 300, 4999, 5000, 10**6)] == [0, 0, 1, 1, 2, 2]


def test_bins_are_of_length_and_load() -> None:
    """Short states under two loads and long ones under one: three bins, each with its own room."""
    states = [*spread(40, 0.1, 30, 1), *spread(50, 0.2, 30, 9), *spread(900, 0.3, 45, 4)]
    intervals = calibrate(states)
    assert intervals.states == (30, 30, 45)
    assert (intervals.length_edges, intervals.load_edges) == ((900,), ((9,), ()))
    rooms = {(40, 0): 0.1, (899, 8): 0.1, (60, 9): 0.2, (60, 500): 0.2, (900, 0): 0.3, (10**6, 99): 0.3}
    for (tokens, running), size in rooms.items():
        assert intervals.room("swap", intervals.bin_of(tokens, running), False) == (size, size)
    assert intervals.span(1) == {"tokens_from": None, "tokens_below": 900, "running_from": 9, "running_below": None}
    assert Intervals.from_dict(intervals.to_dict()) == intervals


@given(tokens=st.floats(0, 1e6), running=st.floats(0, 1e3))
def test_every_situation_has_one_bin_and_lies_in_its_span(tokens: float, running: float) -> None:
    lengths, loads = (64.0, 512.0), ((2.0, 8.0), (), (4.0,))
    number = bin_number(lengths, loads, tokens, running)
    rooms = dict.fromkeys(PREDICTED, ((0.1, 0.1),) * 6)
    span = Intervals(lengths, loads, rooms, rooms, dict.fromkeys(PREDICTED, inf), (30,) * 6).span(number)
    for name, value in (("tokens", tokens), ("running", running)):
        assert span[f"{name}_from"] is None or span[f"{name}_from"] <= value
        assert span[f"{name}_below"] is None or value < span[f"{name}_below"]


def test_outside_the_trained_range_room_begins_with_the_wider_of_model_and_formula_and_grows() -> None:
    states = [misses(100, score / 100, law=score / 50) for score in range(-50, 50)]
    one = replace(calibrate(states, carried=["swap"]), growth={"recompute": 0.1, "swap": 0.3, "ratio": inf})
    inside = one.room("swap", 0, False, 5.0)
    assert one.room("recompute", 0, True) == pytest.approx((2 * inside[0], 2 * inside[1]))
    assert one.room("swap", 0, True) == inside
    assert one.room("swap", 0, True, 2.0) == pytest.approx((inside[0] + 0.6, inside[1] + 0.6))
    assert one.room("ratio", 0, True, 1e-9) == (inf, inf)
    assert Intervals.from_dict(one.to_dict()) == one


def test_a_ratio_is_the_models_outside_where_both_options_are() -> None:
    assert carried_quantities({"recompute": True, "swap": False}) == ("recompute",)
    assert carried_quantities({"recompute": True, "swap": True}) == ("recompute", "swap", "ratio")


@pytest.mark.parametrize("states", [30, 43, 99])
def test_ninety_percent_means_ninety_percent_of_skewed_misses_too(states: int) -> None:
    """Over many calibrations a new state of the same law is covered in 90% of cases, 2 / (states + 1) more at most."""
    rng = np.random.default_rng(3)
    held, tries = 0.0, 400
    for _ in range(tries):
        intervals = calibrate([misses(100, score) for score in rng.exponential(size=states) - 0.5])
        below, above = intervals.room("ratio", 0, False)
        fresh = rng.exponential(size=50) - 0.5
        held += float(np.mean((fresh >= -below) & (fresh <= above)))
    # Standard deviation of one calibration's coverage is at most 0.06; of the mean of 400, 0.003.
    assert 0.89 <= held / tries <= 0.91 + 2 / (states + 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length_edges": [5.0, 1.0]}, "length_edges are not in ascending"),
        ({"load_edges": [[3.0, 2.0]]}, "load_edges are not in ascending"),
        ({"load_edges": []}, "load_edges holds 0 lists, should hold 1"),
        ({"states": [1, 2]}, "states holds 2"),
        ({"confidence": 0.5}, "confidence is 0.5"),
        ({"inside": {of: [[-1.0, 1.0]] for of in PREDICTED}}, "inside.recompute"),
        ({"outside": {of: [[1.0]] for of in PREDICTED}}, "outside.recompute"),
        ({"outside": {of: [[0.1, 0.0]] for of in PREDICTED}}, "outside.recompute is narrower than inside"),
        ({"growth": dict.fromkeys(PREDICTED, -0.1)}, "growth.recompute is -0.1"),
    ],
)
def test_wrong_intervals_are_refused(change: dict[str, object], message: str) -> None:
    good = calibrate([misses(100, 0.1)] * 30).to_dict()
    with pytest.raises(ValueError, match=message):
        Intervals.from_dict(good | change)


def test_bins_are_of_whole_octaves_and_hold_enough() -> None:
    sizes = [1.0, 2.0, 3.0, 4.0, 5.0, 9.0, 17.0, 18.0, 33.0]
    bins = octave_bins(reversed(sizes), lambda size: size, lambda some: len(some) >= 2)
    assert bins == [[1.0, 2.0, 3.0], [4.0, 5.0], [9.0, 17.0, 18.0, 33.0]]
    assert octave_bins([], float) == [[]]
