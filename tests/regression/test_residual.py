"""Boosted trees on top of physics: grown where they help, dropped where they do not."""

from __future__ import annotations

import numpy as np
import pytest

from kvpolicy.regression.estimator import AnalyticRegressor, BoostedRegressor
from kvpolicy.regression.residual import Growth, Residual, cross_validated, fold_rows, inner_rows
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


def test_each_row_is_held_out_of_one_fold() -> None:
    folds = fold_rows([1, 0, 1, 2, 0])
    assert [held_out.tolist() for _, held_out in folds] == [[1, 4], [0, 2], [3]]
    assert [fitting.tolist() for fitting, _ in folds] == [[0, 2, 3], [1, 3, 4], [0, 1, 2, 4]]


def test_longer_rows_are_tested_on_and_shorter_ones_fitted_to() -> None:
    parts = [(share, short.tolist(), longer.tolist()) for share, short, longer in inner_rows([8.0, 2.0, 4.0, 1.0])]
    assert parts == [(0.25, [1, 3], [0, 2]), (0.5, [1, 2, 3], [0])]


def test_a_fold_that_weighs_nothing_has_no_say() -> None:
    """Held out are rows that trees would get right, and rows that they would get wrong."""
    x = np.linspace(0.0, 1.0, 200)[:, None]
    bent, growth = np.where(x[:, 0] > 0.5, 1.0, -1.0), Growth(leaves=4)
    fitting, right, wrong = (
        Residual(x, log_ratio, np.full(200, weight), ("x",), growth)
        for log_ratio, weight in ((bent, 1.0), (bent, 1.0), (-bent, 0.0))
    )
    assert cross_validated([(fitting, right), (fitting, wrong)]).trees > 0


def test_the_first_trees_of_a_forest_are_those_of_a_smaller_one() -> None:
    x = np.linspace(0.0, 1.0, 200)[:, None]
    residual = Residual(x, np.sin(7 * x[:, 0]), np.ones(200), ("x",), Growth(leaves=4))
    assert np.array_equal(residual.misses(residual.grown(30), 10), residual.misses(residual.grown(10), 10))
    assert np.array_equal(residual.misses(None, 0), residual.log_ratio)
