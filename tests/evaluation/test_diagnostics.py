"""What a log cannot say is refused, and what it can say is not."""

from __future__ import annotations

import numpy as np
import pytest

from kvpolicy.evaluation.bounds import Resamples
from kvpolicy.evaluation.diagnostics import Support, calibration, log_refusals, support
from kvpolicy.evaluation.estimators import importance_weights

N = 3000


def diagnosis_of(p_swap: np.ndarray, t_swap: np.ndarray, seed: int = 0) -> Support:
    rng = np.random.default_rng(seed)
    probability, target = np.column_stack([1 - p_swap, p_swap]), np.column_stack([1 - t_swap, t_swap])
    action = (rng.random(len(p_swap)) < p_swap).astype(int)
    weight = importance_weights(target, probability, action, np.ones(len(action), bool), np.ones(2))
    return support(target, probability, weight, np.ones(2), Resamples.of(np.arange(len(action)), rng))


def test_a_coin_supports_every_policy() -> None:
    claims = diagnosis_of(np.full(N, 0.5), np.ones(N))
    assert not claims.refused
    assert claims.effective_share == pytest.approx(0.5, abs=0.03)
    assert claims.mean_weight == pytest.approx(1.0, abs=0.05)
    assert claims.unsupported_share == 0.0


def test_thin_exploration_is_refused_for_its_effective_sample() -> None:
    claims = diagnosis_of(np.full(N, 0.1), np.ones(N))
    assert claims.effective_share < 0.2
    assert any("effective sample" in why and "under 20%" in why for why in claims.refused)


def test_few_records_are_refused_for_the_mean_weights_interval() -> None:
    claims = diagnosis_of(np.full(60, 0.5), np.ones(60))
    assert any("mean weight" in why for why in claims.refused)


def test_an_action_never_taken_has_no_support() -> None:
    never = np.where(np.arange(N) < 0.03 * N, 0.0, 0.5)
    claims = diagnosis_of(never, np.ones(N))
    assert claims.unsupported_share == pytest.approx(0.03)
    assert any("3.0% of its choices have no support" in why for why in claims.refused)
    assert not diagnosis_of(np.where(np.arange(N) < 0.005 * N, 0.0, 0.5), np.ones(N)).refused


def test_an_action_hardly_ever_taken_has_no_support() -> None:
    """A few dear situations in which the action was never drawn: weights are 1 on average, and say nothing of them."""
    hardly = np.where(np.arange(N) < 0.03 * N, 1e-6, 0.5)
    claims = diagnosis_of(hardly, np.ones(N))
    assert claims.unsupported_share == pytest.approx(0.03)
    assert any("with a probability under 1%, or never" in why for why in claims.refused)
    assert diagnosis_of(np.full(N, 1e-3), np.zeros(N)).unsupported_share == 0.0


def test_an_action_whose_costs_are_all_unknown_has_no_support() -> None:
    probability, target = np.full((N, 2), 0.5), np.column_stack([np.zeros(N), np.ones(N)])
    diagnosis = support(
        target, probability, np.zeros(N), np.array([1.0, 0.0]), Resamples.of(np.arange(N), np.random.default_rng(0))
    )
    assert diagnosis.unsupported_share == 1.0
    assert diagnosis.effective == 0.0
    assert len(diagnosis.refused) == 3


def test_logged_probabilities_that_are_right_pass() -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        p = rng.choice([0.0, 0.3, 0.5, 1.0], N)
        rows = calibration(np.column_stack([1 - p, p]), (rng.random(N) < p).astype(int))
        assert [round(bin_row.expected_share, 6) for bin_row in rows.bins] == [0.3, 0.5]
        assert not log_refusals(rows, N, np.ones(N, bool))


def test_logged_probabilities_that_are_wrong_are_refused_with_their_bin() -> None:
    rng = np.random.default_rng(0)
    p = rng.random(N)
    action = (rng.random(N) < np.where(p > 0.8, p - 0.2, p)).astype(int)
    rows = calibration(np.column_stack([1 - p, p]), action)
    (why,) = log_refusals(rows, N, np.ones(N, bool))
    assert "logged probabilities differ from how often" in why
    worst = max(rows.bins, key=lambda bin_row: abs(bin_row.misses))
    assert worst.low >= 0.75 and worst.misses < -3
    assert sum(bin_row.decisions for bin_row in rows.bins) == N


def test_without_chance_there_is_nothing_to_check() -> None:
    rows = calibration(np.tile([1.0, 0.0], (N, 1)), np.zeros(N, int))
    assert rows.chance is None and not rows.bins


def test_few_clusters_and_many_unknown_costs_are_refused() -> None:
    nothing = calibration(np.empty((0, 2)), np.empty(0, int))
    assert "19 clusters" in log_refusals(nothing, 19, np.ones(50, bool))[0]
    known = np.arange(100) >= 11
    assert "the cost of 11.0% of the records is not known" in log_refusals(nothing, 50, known)[0]
    assert not log_refusals(nothing, 50, np.arange(100) >= 10)
