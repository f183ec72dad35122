"""Ratios over blocks: paired, geometric, with intervals that hold."""

from __future__ import annotations

import math
import random

import pytest

from kvpolicy_vllm.bench.ratios import Ratio, mean_and_percentiles, paired_ratio, widened_tail


def test_ratio_is_the_geometric_mean() -> None:
    ratio = paired_ratio([2.0, 8.0], [1.0, 1.0], random.Random(0))
    assert ratio.value == pytest.approx(4.0)
    assert (ratio.low, ratio.high) == pytest.approx((2.0, 8.0))


def test_ratio_turned_round_is_its_inverse() -> None:
    above, below = [1.1, 1.3, 0.9, 1.2], [1.0, 1.1, 1.05, 0.8]
    there, back = (paired_ratio(a, b, random.Random(0)) for a, b in ((above, below), (below, above)))
    assert there.value * back.value == pytest.approx(1.0)
    assert there.low * back.high == pytest.approx(1.0, rel=0.02)


def test_ratio_is_repeatable() -> None:
    above, below = [1.1, 1.3, 0.9], [1.0, 1.1, 1.05]
    assert paired_ratio(above, below, random.Random(5)) == paired_ratio(above, below, random.Random(5))


def test_intervals_hold_the_truth_at_their_stated_rate() -> None:
    rng = random.Random(0)
    held = 0
    for trial in range(400):
        noisy = [math.exp(rng.gauss(0.0, 0.05)) for _ in range(8)]
        held += paired_ratio(noisy, [1.0] * 8, random.Random(trial), resamples=1000).tie
    assert 0.90 <= held / 400 <= 0.99


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
        paired_ratio(above, below, random.Random(0))


def test_a_tie_is_called_a_tie() -> None:
    assert Ratio(1.02, 0.99, 1.05).tie
    assert Ratio(1.02, 0.99, 1.05).text().startswith("tie")
    assert not Ratio(1.02, 1.01, 1.05).tie
    assert "tie" not in Ratio(0.9, 0.8, 0.95).text()


def test_percentiles_by_hand() -> None:
    statistics = mean_and_percentiles([4.0, 1.0, 3.0, 2.0, 5.0])
    assert statistics == {"mean": 3.0, "p50": 3.0, "p99": pytest.approx(4.96)}
    with pytest.raises(ValueError, match="no values"):
        mean_and_percentiles([])
