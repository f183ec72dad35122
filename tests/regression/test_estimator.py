"""The regressors keep scikit-learn's protocol, and extrapolate as physics does."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.utils.estimator_checks import parametrize_with_checks

from kvpolicy.regression.ceilings import LAUNCH, Ceilings
from kvpolicy.regression.estimator import AnalyticRegressor, BoostedRegressor, LinearRegressor, grouped_folds
from tests.regression.measured_steps import COLUMNS, PHYSICS, mean_error, measured


def not_promised(estimator: Any) -> dict[str, str]:
    """Checks that may fail, with the reason. Those that need pandas or an array API are skipped without it."""
    if not isinstance(estimator, BoostedRegressor):
        return {}
    why = "a row of weight 2 is one row where folds are dealt and where a leaf's rows are counted, two rows are two"
    return {f"check_sample_weight_equivalence_on_{kind}_data": why for kind in ("dense", "sparse")}


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
@parametrize_with_checks(
    [LinearRegressor(), AnalyticRegressor(), BoostedRegressor()], expected_failed_checks=not_promised
)
def test_scikit_learn_agrees(estimator: Any, check: Any) -> None:
    check(estimator)


def test_outliers_are_held_down() -> None:
    x, seconds = measured(400, bend=0.0)
    seconds[::20] *= 20
    assert mean_error(AnalyticRegressor(PHYSICS, COLUMNS).fit(x, seconds), x, bend=0.0) < 0.05


def test_no_constant_is_below_zero() -> None:
    x, seconds = measured(200)
    regressor = AnalyticRegressor(PHYSICS, COLUMNS).fit(x[:, [1, 0, 2]][:, [1, 0, 2]], seconds[::-1].copy())
    assert min(constant.value for constant in regressor.constants_) >= 0


def test_far_beyond_the_trained_lengths_physics_leads() -> None:
    x, seconds = measured(1500)
    regressor = BoostedRegressor(PHYSICS, COLUMNS).fit(x, seconds)
    far, _ = measured(300, seed=2)
    far[:, 0] *= 4
    far[:, 1] = far[:, 0] * (far[:, 0] + 1) / 2
    trees_alone = BoostedRegressor(Ceilings(((LAUNCH,),)), COLUMNS).fit(x, seconds)
    long = far[far[:, 0] > 8000]
    assert mean_error(regressor, long) < 0.07
    assert mean_error(trees_alone, long) > 0.3


def test_no_prediction_falls_beyond_the_edge() -> None:
    x, seconds = measured(1500)
    regressor = BoostedRegressor(PHYSICS, COLUMNS).fit(x, seconds)
    tokens = np.geomspace(x[:, 0].max(), 1e7, 200)
    line = regressor.predict(np.column_stack([tokens, tokens * (tokens + 1) / 2, np.full(200, 700.0)]))
    assert (np.diff(line) >= 0).all()


def test_monotone_columns_are_kept_to() -> None:
    x, seconds = measured(1500, bend=-0.4)
    regressor = BoostedRegressor(PHYSICS, COLUMNS, monotone=("batch",)).fit(x, seconds)
    batch = np.linspace(0, 2000, 300)
    line = regressor.predict(np.column_stack([np.full(300, 500.0), np.full(300, 125250.0), batch]))
    assert (np.diff(line) >= -1e-15).all()
    with pytest.raises(ValueError, match="there is no column 'tocens'"):
        BoostedRegressor(PHYSICS, COLUMNS, monotone=("tocens",)).fit(x, seconds)


def test_a_clone_fitted_alike_predicts_alike_and_so_does_a_copy_from_disk() -> None:
    x, seconds = measured(800)
    regressor = BoostedRegressor(PHYSICS, COLUMNS, leaves=15).fit(x, seconds)
    again = clone(regressor).fit(x, seconds)
    assert again.leaves == 15
    assert np.array_equal(regressor.predict(x), again.predict(x))
    assert np.array_equal(pickle.loads(pickle.dumps(regressor)).predict(x), regressor.predict(x))


@pytest.mark.parametrize(
    ("row", "value", "message"),
    [(3, 0.0, "Times: row 3 holds 0.0, should be above 0 s"), (5, -1.0, "row 5"), (2, np.nan, "NaN")],
)
def test_impossible_times_are_refused_by_row(row: int, value: float, message: str) -> None:
    x, seconds = measured(50)
    seconds[row] = value
    with pytest.raises(ValueError, match=message):
        BoostedRegressor(PHYSICS, COLUMNS).fit(x, seconds)


def test_counts_below_zero_are_refused_by_row() -> None:
    x, seconds = measured(50)
    x[7, 1] = -4
    with pytest.raises(ValueError, match=r"row 7 holds -4\.0"):
        LinearRegressor(COLUMNS).fit(x, seconds)


def test_wrong_column_names_are_refused() -> None:
    x, seconds = measured(50)
    with pytest.raises(ValueError, match="columns: 2 different names for 3 columns"):
        AnalyticRegressor(PHYSICS, ("tokens", "pairs")).fit(x, seconds)


def test_folds_never_split_a_group() -> None:
    groups = np.repeat(np.arange(23), 3)
    judged = []
    for seen, unseen in grouped_folds(groups, 5, seed=1):
        assert not set(groups[seen]) & set(groups[unseen])
        judged += unseen.tolist()
    assert sorted(judged) == list(range(69))


def test_intervals_of_a_kernel_that_leaves_a_cache_level_widen_by_what_its_longer_rows_show() -> None:
    """Up to a quarter it is flat, then three times as steep, as beyond a cache: the fit to the short rows misses it."""
    tokens = np.repeat(np.arange(8.0, 513.0, 8.0), 3)
    noise = np.random.default_rng(0).normal(0.0, 0.01, len(tokens))
    bent = 5e-6 + 1e-8 * tokens + 4e-8 * np.maximum(tokens - 128, 0.0)
    straight = 5e-6 + 1e-8 * tokens

    def widening(seconds: Any) -> Any:
        regressor = BoostedRegressor(Ceilings(((LAUNCH,), ("tokens",))), ("tokens",))
        regressor.fit(tokens[:, None], seconds * np.exp(noise), groups=tokens, lengths=tokens)
        return regressor.widening((0.03, 0.03))

    assert widening(straight).step < 0.03 and widening(straight).growth < 0.05
    assert widening(bent).step > 0.2 and widening(bent).growth > 0.4


def test_too_few_longer_points_leave_the_interval_unbounded() -> None:
    tokens = np.repeat(np.arange(1.0, 23.0), 2)
    lengths = np.where(tokens > 20, 100.0, 1.0 + tokens / 100)
    regressor = BoostedRegressor(Ceilings(((LAUNCH,), ("tokens",))), ("tokens",))
    regressor.fit(tokens[:, None], 1e-6 + 1e-8 * tokens, groups=tokens, lengths=lengths)
    assert regressor.widening((0.1, 0.1)).at(1.0) == np.inf
