"""Estimators against formulas written out in fractions, record by record, and their properties."""

from __future__ import annotations

from fractions import Fraction
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.evaluation.bounds import Terms
from kvpolicy.evaluation.estimators import (
    ESTIMATORS,
    Records,
    dm_terms,
    dr_terms,
    importance_weights,
    ips_terms,
    shrunk_weights,
    switch_weights,
)

N = 60


class Golden:
    """A small log in exact fractions, and every estimate of it by loops over its records."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.p = [Fraction(int(k), 10) for k in rng.integers(1, 10, N)]  # of action 1
        self.t = [Fraction(int(k), 8) for k in rng.integers(0, 9, N)]
        self.a = [int(k) for k in rng.integers(0, 2, N)]
        self.c = [None if k == 0 else Fraction(int(k), 7) for k in rng.integers(0, 40, N)]
        self.q = [(Fraction(int(j), 5), Fraction(int(k), 3)) for j, k in rng.integers(0, 20, (N, 2))]
        self.share = [
            Fraction(sum(c is not None for c, a in zip(self.c, self.a, strict=True) if a == one), self.a.count(one))
            for one in (0, 1)
        ]

    def weight(self, i: int) -> Fraction:
        if self.c[i] is None:
            return Fraction(0)
        target = self.t[i] if self.a[i] else 1 - self.t[i]
        logged = self.p[i] if self.a[i] else 1 - self.p[i]
        return target / (logged * self.share[self.a[i]])

    def model(self, i: int) -> Fraction:
        return (1 - self.t[i]) * self.q[i][0] + self.t[i] * self.q[i][1]

    def missed(self, i: int) -> Fraction:
        cost = self.c[i]
        return Fraction(0) if cost is None else cost - self.q[i][self.a[i]]

    def value(self, name: str, parameter: Fraction | None = None) -> Fraction:
        total, weights = Fraction(0), Fraction(0)
        for i in range(N):
            w = self.weight(i)
            weights += w
            if name == "dm":
                total += self.model(i)
            elif name in ("ips", "snips"):
                total += w * (self.c[i] or 0)
            elif name == "dr":
                total += self.model(i) + w * self.missed(i)
            elif name == "switch":
                total += self.model(i) + (w * self.missed(i) if parameter is None or w <= parameter else 0)
            elif name == "dros":
                assert parameter is not None
                total += self.model(i) + parameter * w / (w * w + parameter) * self.missed(i)
        return total / (weights if name == "snips" else N)

    # ---- the same for the library ----

    @property
    def target(self) -> np.ndarray:
        return np.array([[float(1 - t), float(t)] for t in self.t])

    @property
    def probability(self) -> np.ndarray:
        return np.array([[float(1 - p), float(p)] for p in self.p])

    @property
    def cost_s(self) -> np.ndarray:
        return np.array([np.nan if c is None else float(c) for c in self.c])

    def records(self) -> Records:
        action, q = np.array(self.a), np.array([[float(one) for one in pair] for pair in self.q])
        known = ~np.isnan(self.cost_s)
        weight = importance_weights(self.target, self.probability, action, known, np.array(self.share, float))
        return Records(self.target, self.probability, weight, self.cost_s, action, q, q, np.zeros(N), np.arange(N))


@pytest.mark.parametrize("seed", range(5))
def test_every_formula_is_the_one_written_out_in_fractions(seed: int) -> None:
    golden = Golden(seed)
    one = golden.records()
    dr = dr_terms(one.target, one.q_s, one.weight, one.cost_s, one.action)
    assert one.weight == pytest.approx([float(golden.weight(i)) for i in range(N)])
    for result, expected in (
        (dm_terms(one.target, one.q_s).mean(), golden.value("dm")),
        (ips_terms(one.weight, one.cost_s).mean(), golden.value("ips")),
        (dr.mean(), golden.value("dr")),
        (ESTIMATORS["ips"](one).terms.mean(), golden.value("ips")),
        (ESTIMATORS["snips"](one).terms.mean(), golden.value("snips")),
        (ESTIMATORS["dm"](one).terms.mean(), golden.value("dm")),
        (ESTIMATORS["dr"](one).terms.mean(), golden.value("dr")),
        (ESTIMATORS["cross-fitted-dr"](one).terms.mean(), golden.value("dr")),
    ):
        assert result == pytest.approx(float(expected), rel=1e-12)
    for parameter in (Fraction(1, 2), Fraction(2), Fraction(9)):
        for changed, name in ((switch_weights, "switch"), (shrunk_weights, "dros")):
            weight = changed(one.weight, float(parameter))
            result = dr_terms(one.target, one.q_s, weight, one.cost_s, one.action).mean()
            assert result == pytest.approx(float(golden.value(name, parameter)), rel=1e-12)


@pytest.mark.parametrize("name", ["switch-dr", "dros"])
@pytest.mark.parametrize("seed", range(5))
def test_what_is_tuned_is_the_formula_at_its_parameter(name: str, seed: int) -> None:
    golden = Golden(seed)
    result = ESTIMATORS[name](golden.records())
    assert result.tuning is not None
    if result.tuning == inf:
        expected = golden.value("dr")
    else:
        rounded_up = Fraction(result.tuning) * (1 + Fraction(1, 10**12))  # a threshold is one of the weights
        expected = golden.value(name.removesuffix("-dr"), rounded_up)
    assert result.terms.mean() == pytest.approx(float(expected), rel=1e-9)


def test_tuning_cuts_weights_that_only_add_noise_and_keeps_those_that_are_needed() -> None:
    """Where the direct model is right, dropping heavy weights costs no bias; where it is wrong, it does."""
    rng = np.random.default_rng(3)
    n = 20_000
    p = np.where(rng.random(n) < 0.02, 0.01, 0.9)
    action = (rng.random(n) < p).astype(int)
    probability, target = np.column_stack([1 - p, p]), np.column_stack([np.zeros(n), np.ones(n)])
    cost_s = 1.0 + rng.normal(0, 0.3, n)
    weight = importance_weights(target, probability, action, np.ones(n, bool), np.ones(2))
    for q, heavy_is_kept in ((np.ones((n, 2)), False), (np.zeros((n, 2)), True)):
        result = ESTIMATORS["switch-dr"](
            Records(target, probability, weight, cost_s, action, q, q, np.zeros(n), np.arange(n))
        )
        assert result.tuning is not None
        assert (result.tuning >= 100) == heavy_is_kept


@given(st.floats(0.0, 1e4), st.floats(1e-3, 1e6))
def test_shrinkage_lies_between_nothing_and_all(weight: float, lam: float) -> None:
    one = np.array([weight])
    assert 0.0 <= shrunk_weights(one, lam)[0] <= weight * (1 + 1e-12)
    assert shrunk_weights(one, inf)[0] == weight
    assert shrunk_weights(one, 0.0)[0] == 0.0
    assert switch_weights(one, lam)[0] in (0.0, weight)


def test_logging_policy_itself_is_the_mean_of_what_was_seen() -> None:
    golden = Golden(1)
    action, cost_s = np.array(golden.a), np.nan_to_num(golden.cost_s)
    weight = importance_weights(golden.probability, golden.probability, action, np.ones(N, bool), np.ones(2))
    assert weight == pytest.approx(np.ones(N))
    assert ips_terms(weight, cost_s).mean() == pytest.approx(cost_s.mean())


def test_a_right_model_makes_dr_exact_whatever_the_weights() -> None:
    rng = np.random.default_rng(0)
    target = np.full((N, 2), 0.5)
    q = rng.random((N, 2))
    action = rng.integers(0, 2, N)
    cost_s = q[np.arange(N), action]
    assert dr_terms(target, q, rng.random(N), cost_s, action) == pytest.approx(dm_terms(target, q))


def test_a_mean_over_no_weight_is_refused() -> None:
    with pytest.raises(ValueError, match="weights sum to 0"):
        Terms(np.ones(3), np.zeros(3)).mean()
