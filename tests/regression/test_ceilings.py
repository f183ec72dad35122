"""Physics with ceilings: a step is as slow as its slowest bound."""

from __future__ import annotations

import numpy as np
import pytest

from kvpolicy.regression.ceilings import LAUNCH, Ceilings
from kvpolicy.regression.estimator import AnalyticRegressor
from tests.regression.measured_steps import COLUMNS, PHYSICS, measured


def test_physics_finds_the_constants_and_names_their_units() -> None:
    x, seconds = measured(400, bend=0.0)
    launch, tokens, pairs = AnalyticRegressor(PHYSICS, COLUMNS).fit(x, seconds).constants_
    assert [launch.value, tokens.value, pairs.value] == pytest.approx([1e-3, 2e-5, 3e-9], rel=0.1)
    assert (launch.unit, tokens.unit, pairs.unit) == ("s", "s/token", "s/pairs")


def test_a_ceiling_is_as_slow_as_its_slowest_term() -> None:
    work, moved = np.meshgrid(np.geomspace(1, 1e4, 30), np.geomspace(1, 1e4, 30))
    x = np.column_stack([work.ravel(), moved.ravel()])
    seconds = 1e-5 + np.maximum(3e-6 * x[:, 0], 5e-7 * x[:, 1])
    regressor = AnalyticRegressor(Ceilings(((LAUNCH,), ("work", "moved"))), ("work", "moved")).fit(x, seconds)
    assert [constant.value for constant in regressor.constants_] == pytest.approx([1e-5, 3e-6, 5e-7], rel=0.02)
    with pytest.raises(ValueError, match="needs column 'bytes'"):
        AnalyticRegressor(Ceilings((("bytes",),)), ("work", "moved")).fit(x, seconds)
