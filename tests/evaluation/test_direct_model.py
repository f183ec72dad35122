"""The direct model: linear costs, cross-fitted by cluster."""

from __future__ import annotations

import numpy as np
import pytest

from kvpolicy.evaluation.direct_model import Design, DirectCosts, folds_of


def predict(x: np.ndarray, action: np.ndarray, cost_s: np.ndarray, known: np.ndarray, fold: np.ndarray) -> DirectCosts:
    return Design.of(x, action, known, 2, fold).predict(cost_s)


def made_up(n: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = np.column_stack([np.ones(n), rng.random(n) * 1e6, rng.random(n)])
    action = rng.integers(0, 2, n)
    return x, action, np.where(action == 0, 2.0 + 3e-6 * x[:, 1], 1.0 + 5.0 * x[:, 2])


def test_the_direct_model_finds_a_linear_law() -> None:
    x, action, cost_s = made_up(300, 0)
    fold = folds_of(np.arange(300), np.random.default_rng(0))
    prediction = predict(x, action, cost_s, np.ones(300, bool), fold)
    expected = np.column_stack([2.0 + 3e-6 * x[:, 1], 1.0 + 5.0 * x[:, 2]])
    assert prediction.in_sample == pytest.approx(expected, rel=1e-4)
    assert prediction.cross_fitted == pytest.approx(expected, rel=1e-4)


def test_cross_fitting_never_sees_a_records_own_cluster() -> None:
    x, action, cost_s = made_up(300, 1)
    cluster = np.arange(300) // 3
    fold = folds_of(cluster, np.random.default_rng(0))
    assert all(len(set(fold[cluster == number])) == 1 for number in range(100))
    known = np.ones(300, bool)
    before = predict(x, action, cost_s, known, fold)
    moved = np.where(fold == 0, cost_s + 100.0, cost_s)
    after = predict(x, action, moved, known, fold)
    assert after.cross_fitted[fold == 0] == pytest.approx(before.cross_fitted[fold == 0])
    assert (np.abs(after.in_sample - before.in_sample)[fold == 0] > 1.0).all()


def test_implied_weights_are_the_direct_method_as_a_weighted_mean_of_costs() -> None:
    x, action, cost_s = made_up(300, 2)
    known = np.random.default_rng(5).random(300) < 0.9
    target = np.column_stack([np.full(300, 0.3), np.full(300, 0.7)])
    fold = folds_of(np.arange(300), np.random.default_rng(0))
    q = predict(x, action, cost_s, known, fold).in_sample
    weight = Design.of(x, action, known, 2, fold).implied_weights(target)
    assert (weight * cost_s).mean() == pytest.approx((target * q).sum(axis=1).mean(), rel=1e-4)
    assert not weight[~known].any()


def test_an_action_never_taken_is_guessed_by_the_mean() -> None:
    x, _, cost_s = made_up(50, 3)
    prediction = predict(x, np.zeros(50, int), cost_s, np.ones(50, bool), np.arange(50) % 5)
    assert prediction.in_sample[:, 1] == pytest.approx(np.full(50, cost_s.mean()))
    with pytest.raises(ValueError, match="no record has a known cost"):
        predict(x, np.zeros(50, int), cost_s, np.zeros(50, bool), np.arange(50) % 5)
