"""Split-conformal intervals: the quantile worked by hand, bins, honesty with few states, coverage."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest

from kvpolicy.cost.intervals import Intervals, Misses, calibrate, conformal_quantile


def misses(tokens: float, score: float) -> Misses:
    scores = {"recompute": score, "swap": score, "ratio": score}
    return Misses(tokens, scores, scores)


def test_quantile_worked_by_hand() -> None:
    """Of 19 scores the ceil(0.9 x 20) = 18th; of 9 the 9th; of 8 there is none."""
    assert conformal_quantile([float(i) for i in range(19, 0, -1)]) == 18.0
    assert conformal_quantile([float(i) for i in range(1, 10)]) == 9.0
    assert conformal_quantile([1.0] * 8) == inf


def test_too_few_states_make_an_infinite_interval_and_it_survives_the_file() -> None:
    found = calibrate([misses(100, 0.1)] * 8)
    assert found.half_width("ratio", 100, False) == inf
    assert Intervals.from_dict(found.to_dict()) == found
    assert calibrate([]).half_width("swap", 5, True) == inf


def test_bins_under_thirty_states_are_merged_with_a_neighbour() -> None:
    short = [misses(40 + i % 20, 0.1) for i in range(29)]
    middle = [misses(300 + i, 0.2) for i in range(40)]
    long = [misses(5000 + i, 0.3) for i in range(29)]
    assert calibrate([*short, *middle, *long]).states == (98,)
    apart = calibrate([*short, misses(63, 0.1), *middle, *long, misses(5100, 0.3)])
    assert apart.states == (30, 40, 30)
    assert apart.edges == (300, 5000)
    assert [apart.half_width("swap", tokens, False) for tokens in (1, 299, 300, 4999, 5000, 10**6)] == [
        0.1, 0.1, 0.2, 0.2, 0.3, 0.3,
    ]  # fmt: skip


def test_outside_the_trained_range_the_interval_is_wider() -> None:
    one = calibrate([misses(100, 0.1)] * 30)
    assert one.half_width("swap", 100, True) == pytest.approx(0.2)


def test_ninety_percent_means_ninety_percent() -> None:
    """Over many calibrations, a new state of the same law is covered in 90% of cases, and not in much more."""
    rng = np.random.default_rng(3)
    held, tries, states = 0.0, 400, 99
    for _ in range(tries):
        found = calibrate([misses(100, abs(score)) for score in rng.standard_normal(states)])
        held += float(np.mean(np.abs(rng.standard_normal(50)) <= found.half_width("ratio", 100, False)))
    # Standard deviation of one calibration's coverage is 0.03; of the mean of 400, 0.0015.
    assert held / tries == pytest.approx(0.9, abs=0.006)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"edges": [5.0, 1.0]}, "ascending"),
        ({"states": [1, 2]}, "states holds 2"),
        ({"inside": {"recompute": [-1.0], "swap": [1.0], "ratio": [1.0]}}, "inside.recompute"),
    ],
)
def test_wrong_intervals_are_refused(change: dict[str, object], message: str) -> None:
    good = calibrate([misses(100, 0.1)] * 30).to_dict()
    with pytest.raises(ValueError, match=message):
        Intervals.from_dict(good | change)
