"""Quantiles of a run within half a percent, and the rate of its output in the steady part."""

from __future__ import annotations

import numpy as np
import pytest

from kvpolicy.simulator.summary import MAX_POINTS, Histogram, OutputCurve


def test_quantiles_are_within_half_a_percent() -> None:
    values = np.exp(np.random.default_rng(0).normal(-4, 2, 20_000))
    histogram = Histogram()
    for value in values[:5000]:
        histogram.add(float(value))
    histogram.extend(values[5000:].tolist(), 1)
    for level in (0.01, 0.5, 0.9, 0.99, 0.999):
        assert histogram.quantile(level) == pytest.approx(np.quantile(values, level), rel=5e-3)
    assert histogram.count == 20_000


def test_weights_count_as_often() -> None:
    histogram = Histogram()
    histogram.add(1.0, 99)
    histogram.add(2.0, 1)
    assert histogram.quantile(0.98) == pytest.approx(1.0, rel=5e-3)
    assert histogram.quantile(0.995) == pytest.approx(2.0, rel=5e-3)
    assert np.isnan(Histogram().quantile(0.5))


def test_the_steady_rate_leaves_out_the_ramp_and_the_tail() -> None:
    """One token a second at first and last, ten a second in between."""
    curve = OutputCurve()
    for second in range(1, 41):
        curve.add(100.0 + second, 1 if second <= 10 or second > 30 else 10)
    assert curve.tokens == 220
    # 55 tokens were out half way through the 15th second, 165 half way through the 26th.
    assert curve.steady_tok_s(100.0) == pytest.approx(110 / 11)


def test_a_step_is_spread_over_its_time() -> None:
    """The quarter and the three quarters lie within single steps."""
    curve = OutputCurve()
    curve.add(2.0, 8)
    curve.add(6.0, 8)
    assert curve.steady_tok_s(0.0) == pytest.approx(8 / (4.0 - 1.0))
    assert np.isnan(OutputCurve().steady_tok_s(0.0))


def test_a_long_run_is_kept_in_bounded_memory() -> None:
    rng = np.random.default_rng(0)
    ends_s, tokens = np.cumsum(rng.exponential(0.02, 100_000)), rng.integers(1, 200, 100_000)
    curve = OutputCurve()
    for end_s, count in zip(ends_s.tolist(), tokens.tolist(), strict=True):
        curve.add(end_s, count)
    assert len(curve._counts) <= MAX_POINTS
    in_bulk = OutputCurve()
    for begin in range(0, 100_000, 700):
        in_bulk.extend(ends_s[begin : begin + 700].tolist(), 30)
    one_by_one = OutputCurve()
    for end_s in ends_s.tolist():
        one_by_one.add(end_s, 30)
    assert vars(in_bulk) == vars(one_by_one) and in_bulk.tokens == 3_000_000
    counts = np.cumsum(tokens)
    low_s, high_s = np.interp((counts[-1] / 4, 3 * counts[-1] / 4), counts, ends_s)
    assert curve.steady_tok_s(0.0) == pytest.approx(counts[-1] / 2 / (high_s - low_s), rel=1e-3)
