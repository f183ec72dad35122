"""Every test answers yes, no or cannot tell: by hand, on data with a known truth, and on data with none."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvpolicy.reporting.evidence import Evidence, cheaper, coincide, flat, lower, lowest_at, trend

ROUNDS = 200


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_five_points_in_order_by_hand() -> None:
    """Kendall's exact p is 2 / 5!; every pair of points has slope 2."""
    evidence = trend([1, 2, 3, 4, 5], [2, 4, 6, 8, 10], rises=True, effect="s")
    assert evidence.answer == "yes" and evidence.p == pytest.approx(2 / 120)
    assert (evidence.value, evidence.low, evidence.high) == (2.0, 2.0, 2.0)
    assert trend([1, 2, 3, 4, 5], [10, 8, 6, 4, 2], rises=True, effect="s").answer == "no"
    assert trend([1, 2, 3, 4, 5], [10, 8, 6, 4, 2], rises=False, effect="s").answer == "yes"


def test_a_trend_without_a_slope_is_none() -> None:
    """A pool that is empty but for the last moments: ranks go together, and between most moments nothing changes."""
    x, y = list(range(120)), [0.0] * 100 + [float(number) for number in range(20)]
    evidence = trend(x, y, rises=True, effect="MiB")
    assert evidence.p is not None and evidence.p < 1e-4 and evidence.value == 0.0
    assert evidence.answer == "cannot tell" and "median slope is 0" in evidence.why


def test_six_pairs_by_hand() -> None:
    """All six agree: p is 2 / 2**6; the totals are 6 and 12."""
    evidence = cheaper([1.0] * 6, [1.5, 1.6, 1.7, 2.2, 2.4, 2.6], rng())
    assert evidence.answer == "yes" and evidence.p == pytest.approx(2 / 64) and evidence.value == pytest.approx(0.5)
    assert cheaper([1.5, 1.6, 1.7, 2.2, 2.4, 2.6], [1.0] * 6, rng()).answer == "no"


def test_four_against_four_by_hand() -> None:
    """No overlap: p is 2 / (8 choose 4)."""
    evidence = lower([1, 2, 3, 4], [5, 6, 7, 8], rng())
    assert evidence.answer == "yes" and evidence.p == pytest.approx(2 / 70) and evidence.value == pytest.approx(10 / 26)
    assert lower([5, 6, 7, 8], [1, 2, 3, 4], rng()).answer == "no"


def test_a_flat_line_a_steep_one_and_a_noisy_one() -> None:
    x = [0, 0, 1, 1, 2, 2]
    assert flat(x, [10.0, 10.1, 10.0, 10.1, 10.0, 10.1]).answer == "yes"
    steep = flat(x, [5.0, 5.1, 10.0, 10.1, 15.0, 15.1])
    assert steep.answer == "no" and steep.value == pytest.approx(10 / 10.05)
    assert flat(x, [2.0, 18.0, 15.0, 4.0, 1.0, 19.0]).answer == "cannot tell"


def test_the_lowest_level_of_runs_that_do_not_overlap() -> None:
    runs = {10: [9.0, 9.1, 9.2], 30: [1.0, 1.1, 1.2], 60: [5.0, 5.1, 5.2]}
    assert lowest_at(runs, (30, 50), rng()).answer == "yes"
    assert lowest_at(runs, (60,), rng()).answer == "no"
    assert lowest_at({10: [1.0, 2.0, 3.0], 30: [1.0, 2.0, 3.0]}, (30,), rng()).answer == "cannot tell"


def test_coincidence_by_hand() -> None:
    """Three marks on the three events of ten steps: p is 1 / (10 choose 3)."""
    marked = [True] * 3 + [False] * 7
    evidence = coincide(marked, marked)
    assert evidence.answer == "yes" and evidence.p == pytest.approx(1 / 120)
    assert coincide([True, False] * 10, [True] * 10 + [False] * 10).answer == "cannot tell"


@pytest.mark.parametrize(
    "few",
    [
        trend([1, 2, 3, 4], [1, 2, 3, 4], rises=True, effect="s"),
        trend([1, 1, 1, 2, 2, 2], [1, 2, 3, 4, 5, 6], rises=True, effect="s"),
        trend([1, 2, 3, 4, 5], [1, 1, 1, 1, 1], rises=True, effect="s"),
        cheaper([1.0] * 5, [2.0] * 5, rng()),
        cheaper([1.0] * 6, [1.0] * 6, rng()),
        lower([1, 2, 3], [4, 5, 6, 7], rng()),
        lower([], [4, 5, 6, 7], rng()),
        flat([], []),
        flat([1, 1, 1, 1, 1], [1, 2, 3, 4, 5]),
        flat([1, 2, 3, 4, 5], [-1, -1, -1, -1, -1]),
        lowest_at({30: [1.0, 1.0]}, (30,), rng()),
        coincide([], []),
        coincide([False] * 4, [True, False] * 2),
    ],
)
def test_too_few_values_are_undecided_with_a_reason(few: Evidence) -> None:
    assert few.answer == "cannot tell" and few.why


def _share(answer: str, make: Callable[[np.random.Generator], Evidence]) -> float:
    return sum(make(rng(seed)).answer == answer for seed in range(ROUNDS)) / ROUNDS


LEVELS = np.repeat([1.0, 2.0, 3.0, 4.0], 4)


@pytest.mark.parametrize("answer", ["yes", "no"])
def test_noise_alone_is_rarely_taken_for_an_effect(answer: str) -> None:
    """Two-sided at 5%: each direction in 2.5% of cases; 200 rounds allow for 6.5%."""
    noise = {
        "trend": lambda r: trend(LEVELS, r.normal(10, 1, 16), rises=True, effect="s"),
        "cheaper": lambda r: cheaper(r.normal(10, 1, 12), r.normal(10, 1, 12), r),
        "lower": lambda r: lower(r.normal(10, 1, 8), r.normal(10, 1, 8), r),
        "coincide": lambda r: coincide(r.random(80) < 0.3, r.random(80) < 0.3),
    }
    for name, make in noise.items():
        assert _share(answer, make) <= 0.065, name


def test_a_known_effect_is_found() -> None:
    effects = {
        "trend": lambda r: trend(LEVELS, LEVELS + r.normal(0, 0.5, 16), rises=True, effect="s"),
        "cheaper": lambda r: cheaper(r.normal(9, 0.5, 12), r.normal(10, 0.5, 12), r),
        "lower": lambda r: lower(r.normal(9, 0.4, 8), r.normal(10, 0.4, 8), r),
        "flat": lambda r: flat(LEVELS, r.normal(10, 0.5, 16)),
    }
    for name, make in effects.items():
        assert _share("yes", make) >= 0.9, name


def test_a_line_at_the_margin_is_rarely_called_flat() -> None:
    """The tests are one-sided at 5%."""

    def at_the_margin(r: np.random.Generator) -> Evidence:
        return flat(LEVELS, 10 + 2.5 * (LEVELS - 2.5) / 3 + r.normal(0, 0.5, 16))

    assert _share("yes", at_the_margin) <= 0.09


def test_intervals_of_the_slope_hold_the_truth() -> None:
    held = 0
    for seed in range(ROUNDS):
        evidence = trend(LEVELS, 3 * LEVELS + rng(seed).normal(0, 1, 16), rises=True, effect="s")
        assert evidence.low is not None and evidence.high is not None
        held += evidence.low <= 3 <= evidence.high
    assert held / ROUNDS >= 0.9


def _known_levels(means: dict[int, float], runs: int, spread: float) -> Callable[[np.random.Generator], Evidence]:
    """Runs of levels whose true means are known; the claim is that 30 or 50 has the lowest."""
    return lambda r: lowest_at({at: r.normal(mean, spread, runs).tolist() for at, mean in means.items()}, (30, 50), r)


@pytest.mark.parametrize("runs", [3, 5, 10])
def test_the_lowest_of_levels_far_apart_is_found(runs: int) -> None:
    lowest_is_30 = {10: 9.0, 20: 7.0, 30: 5.0, 40: 6.5, 50: 7.0, 60: 7.5}
    lowest_is_40 = lowest_is_30 | {30: 6.5, 40: 5.0}
    assert _share("yes", _known_levels(lowest_is_30, runs, 0.25)) >= 0.95
    assert _share("no", _known_levels(lowest_is_40, runs, 0.25)) >= 0.95


@pytest.mark.parametrize("runs", [3, 5, 10])
def test_a_tie_for_the_lowest_is_rarely_decided(runs: int) -> None:
    """30 and 40 are truly alike: neither answer is right, and each may be given in no more than about 5% of cases."""
    tie = {10: 9.0, 20: 7.0, 30: 5.0, 40: 5.0, 50: 7.0, 60: 7.5}
    for answer in ("yes", "no"):
        assert _share(answer, _known_levels(tie, runs, 0.5)) <= 0.09, (runs, answer)
