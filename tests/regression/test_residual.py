"""Boosted trees on top of physics: grown where they help, dropped where they do not."""

from __future__ import annotations

import numpy as np
import pytest

from kvpolicy.regression.estimator import AnalyticRegressor, BoostedRegressor
from tests.regression.measured_steps import COLUMNS, PHYSICS, mean_error, measured


def test_trees_learn_what_physics_does_not_know() -> None:
    x, seconds = measured(1500)
    new, _ = measured(500, seed=1)
    both = BoostedRegressor(PHYSICS, COLUMNS).fit(x, seconds)
    assert both.trees_ > 0
    assert mean_error(both, new) < 0.3 * mean_error(AnalyticRegressor(PHYSICS, COLUMNS).fit(x, seconds), new)


def test_trees_are_dropped_where_they_do_not_help() -> None:
    x, seconds = measured(600, bend=0.0)
    regressor = BoostedRegressor(PHYSICS, COLUMNS).fit(x, seconds)
    assert regressor.trees_ == 0
    assert regressor.predict(x) == pytest.approx(AnalyticRegressor(PHYSICS, COLUMNS).fit(x, seconds).predict(x))


def test_repeats_of_one_point_are_one_group_when_trees_are_decided_on() -> None:
    """Every point has its own error, the same in all its repeats: ungrouped, trees would learn it by heart."""
    x, seconds = measured(60, bend=0.0, noise=0.3)
    points = np.repeat(np.arange(60), 10)
    x, seconds = x[points], seconds[points]
    assert BoostedRegressor(PHYSICS, COLUMNS).fit(x, seconds).trees_ > 0
    assert BoostedRegressor(PHYSICS, COLUMNS).fit(x, seconds, groups=points).trees_ == 0
