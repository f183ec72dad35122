"""The regressors keep scikit-learn's protocol, and extrapolate as physics does."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.utils.estimator_checks import parametrize_with_checks

from kvpolicy.arrays import Floats
from kvpolicy.regression.ceilings import LAUNCH, Ceilings
from kvpolicy.regression.estimator import AnalyticRegressor, BoostedRegressor, LinearRegressor, grouped_folds

COLUMNS = ("tokens", "pairs", "batch")
PHYSICS = Ceilings(((LAUNCH,), ("tokens",), ("pairs",)), {"tokens": "token"})


def measured(
    rows: int, seed: int = 0, bend: float = 0.3, noise: float = 0.02, most: float = 4000
) -> tuple[Floats, Floats]:
    """Prefill times under a known law, of up to so many tokens, with what no roofline knows of (``bend``)."""
    rng = np.random.default_rng(seed)
    tokens = np.exp(rng.uniform(np.log(16), np.log(most), rows)).round()
    x = np.column_stack([tokens, tokens * (tokens + 1) / 2, rng.uniform(0, 2000, rows)])
    return x, law(x, bend) * np.exp(rng.normal(0, noise, rows))


def law(x: Floats, bend: float = 0.3) -> Floats:
    return np.exp(bend * np.sin(x[:, 2] / 300)) * (1e-3 + 2e-5 * x[:, 0] + 3e-9 * x[:, 1])


def missed(made: Any, x: Floats, bend: float = 0.3) -> float:
    return float(np.abs(made.predict(x) / law(x, bend) - 1).mean())


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


def test_physics_finds_the_constants_and_names_their_units() -> None:
    x, seconds = measured(400, bend=0.0)
    launch, tokens, pairs = AnalyticRegressor(PHYSICS, COLUMNS).fit(x, seconds).constants_
    assert [launch.value, tokens.value, pairs.value] == pytest.approx([1e-3, 2e-5, 3e-9], rel=0.1)
    assert (launch.unit, tokens.unit, pairs.unit) == ("s", "s/token", "s/pairs")


def test_outliers_are_held_down() -> None:
    x, seconds = measured(400, bend=0.0)
    seconds[::20] *= 20
    assert missed(AnalyticRegressor(PHYSICS, COLUMNS).fit(x, seconds), x, bend=0.0) < 0.05


def test_no_constant_is_below_zero() -> None:
    x, seconds = measured(200)
    made = AnalyticRegressor(PHYSICS, COLUMNS).fit(x[:, [1, 0, 2]][:, [1, 0, 2]], seconds[::-1].copy())
    assert min(one.value for one in made.constants_) >= 0


def test_a_ceiling_is_as_slow_as_its_slowest_term() -> None:
    work, moved = np.meshgrid(np.geomspace(1, 1e4, 30), np.geomspace(1, 1e4, 30))
    x = np.column_stack([work.ravel(), moved.ravel()])
    seconds = 1e-5 + np.maximum(3e-6 * x[:, 0], 5e-7 * x[:, 1])
    made = AnalyticRegressor(Ceilings(((LAUNCH,), ("work", "moved"))), ("work", "moved")).fit(x, seconds)
    assert [one.value for one in made.constants_] == pytest.approx([1e-5, 3e-6, 5e-7], rel=0.02)
    with pytest.raises(ValueError, match="needs column 'bytes'"):
        AnalyticRegressor(Ceilings((("bytes",),)), ("work", "moved")).fit(x, seconds)


def test_trees_learn_what_physics_does_not_know() -> None:
    x, seconds = measured(1500)
    new, _ = measured(500, seed=1)
    both = BoostedRegressor(PHYSICS, COLUMNS).fit(x, seconds)
    assert both.trees_ > 0
    assert missed(both, new) < 0.3 * missed(AnalyticRegressor(PHYSICS, COLUMNS).fit(x, seconds), new)


def test_trees_are_dropped_where_they_do_not_help() -> None:
    x, seconds = measured(600, bend=0.0)
    made = BoostedRegressor(PHYSICS, COLUMNS).fit(x, seconds)
    assert made.trees_ == 0
    assert made.predict(x) == pytest.approx(AnalyticRegressor(PHYSICS, COLUMNS).fit(x, seconds).predict(x))


def test_repeats_of_one_point_are_one_group_when_trees_are_decided_on() -> None:
    """Every point has its own error, the same in all its repeats: ungrouped, trees would learn it by heart."""
    x, seconds = measured(60, bend=0.0, noise=0.3)
    points = np.repeat(np.arange(60), 10)
    x, seconds = x[points], seconds[points]
    assert BoostedRegressor(PHYSICS, COLUMNS).fit(x, seconds).trees_ > 0
    assert BoostedRegressor(PHYSICS, COLUMNS).fit(x, seconds, groups=points).trees_ == 0


def test_far_beyond_the_trained_lengths_physics_leads() -> None:
    x, seconds = measured(1500)
    made = BoostedRegressor(PHYSICS, COLUMNS).fit(x, seconds)
    far, _ = measured(300, seed=2)
    far[:, 0] *= 4
    far[:, 1] = far[:, 0] * (far[:, 0] + 1) / 2
    trees_alone = BoostedRegressor(Ceilings(((LAUNCH,),)), COLUMNS).fit(x, seconds)
    long = far[far[:, 0] > 8000]
    assert missed(made, long) < 0.07
    assert missed(trees_alone, long) > 0.3


def test_no_prediction_falls_beyond_the_edge() -> None:
    x, seconds = measured(1500)
    made = BoostedRegressor(PHYSICS, COLUMNS).fit(x, seconds)
    tokens = np.geomspace(x[:, 0].max(), 1e7, 200)
    line = made.predict(np.column_stack([tokens, tokens * (tokens + 1) / 2, np.full(200, 700.0)]))
    assert (np.diff(line) >= 0).all()


def test_monotone_columns_are_kept_to() -> None:
    x, seconds = measured(1500, bend=-0.4)
    made = BoostedRegressor(PHYSICS, COLUMNS, monotone=("batch",)).fit(x, seconds)
    batch = np.linspace(0, 2000, 300)
    line = made.predict(np.column_stack([np.full(300, 500.0), np.full(300, 125250.0), batch]))
    assert (np.diff(line) >= -1e-15).all()
    with pytest.raises(ValueError, match="there is no column 'tocens'"):
        BoostedRegressor(PHYSICS, COLUMNS, monotone=("tocens",)).fit(x, seconds)


def test_a_clone_fitted_alike_predicts_alike_and_so_does_a_copy_from_disk() -> None:
    x, seconds = measured(800)
    made = BoostedRegressor(PHYSICS, COLUMNS, leaves=15).fit(x, seconds)
    again = clone(made).fit(x, seconds)
    assert again.leaves == 15
    assert np.array_equal(made.predict(x), again.predict(x))
    assert np.array_equal(pickle.loads(pickle.dumps(made)).predict(x), made.predict(x))


@pytest.mark.parametrize(
    ("row", "value", "message"),
    [(3, 0.0, "Times: row 3 holds 0.0, should be above 0 s"), (5, -1.0, "row 5"), (2, np.nan, "NaN")],
)
def test_times_that_cannot_be_are_refused_by_row(row: int, value: float, message: str) -> None:
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
