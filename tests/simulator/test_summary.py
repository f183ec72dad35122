"""Quantiles of a run within half a percent."""

from __future__ import annotations

import numpy as np
import pytest

from kvpolicy.simulator.summary import Histogram


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
