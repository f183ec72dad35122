"""What every cost model promises, each family held to it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import isfinite, log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.cost.model import CostModel, FittedModel
from kvpolicy.events import KINDS, Preemption
from kvpolicy.training.family import FAMILIES
from tests.cost.model_costs import predicted
from tests.snippets import shown
from tests.synthetic import fitted_model, options_for, situation

situations = st.builds(
    lambda tokens, block_size, running, batch, free, waiting, queued, shared: situation(
        tokens, block_size, running, batch_tokens=batch, free_blocks=free, waiting_requests=waiting,
        queued_save_bytes=queued, queued_load_bytes=queued, shared_blocks=min(shared, -(-tokens // block_size)),
    ),
    tokens=st.integers(1, 200_000),
    block_size=st.sampled_from([16, 32, 64, 128]),
    running=st.integers(0, 300),
    batch=st.integers(0, 10**6),
    free=st.integers(0, 4000),
    waiting=st.integers(0, 10**4),
    queued=st.integers(0, 10**9),
    shared=st.integers(0, 40),
)  # fmt: skip


inside = st.builds(
    lambda tokens, running, batch: situation(tokens, 32, running, batch_tokens=batch),
    tokens=st.integers(1, 4000),
    running=st.integers(0, 5),
    batch=st.integers(0, 3000),
)


@pytest.fixture(params=[*FAMILIES, "boosted, carried"], scope="module")
def model(request: pytest.FixtureRequest) -> FittedModel:
    return _model_named(request.param)


def _model_named(name: str) -> FittedModel:
    if name == "boosted, carried":
        return replace(fitted_model("boosted"), carried=dict.fromkeys(KINDS, True))
    if name == "boosted":
        return replace(fitted_model("boosted"), carried=dict.fromkeys(KINDS, False))
    return fitted_model(name)


OWN: tuple[type[CostModel], ...] = (shown("Rates"),)
"""Cost models without laws, made without arguments."""


@pytest.fixture(params=[*FAMILIES, "boosted, carried", *OWN], scope="module", ids=str)
def any_model(request: pytest.FixtureRequest) -> CostModel:
    return request.param() if request.param in OWN else _model_named(request.param)


def test_the_boosted_model_of_these_tests_has_trees() -> None:
    assert set(fitted_model("boosted").residuals) == set(KINDS)


@given(one=situations | inside)
def test_costs_are_finite_not_negative_and_the_sum_of_their_parts(any_model: CostModel, one: Preemption) -> None:
    for cost in predicted(any_model, one):
        parts = (cost.save_s, cost.load_s, cost.recompute_s)
        assert isfinite(cost.engine_s)
        assert cost.engine_s > 0
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(cost.engine_s, rel=1e-9)
        assert isfinite(cost.stall_s)
        assert 0 <= cost.low_s <= cost.engine_s <= cost.high_s
        assert cost.log_ratio_low <= cost.log_ratio_high


@given(one=situations | inside, more=st.integers(1, 3000))
def test_costs_never_fall_with_length(any_model: CostModel, one: Preemption, more: int) -> None:
    longer = situation(
        one.computed_tokens + more, one.block_size, one.running_requests, batch_tokens=one.batch_tokens,
        free_blocks=one.free_blocks, waiting_requests=one.waiting_requests, shared_blocks=one.shared_blocks,
        queued_save_bytes=one.queued_save_bytes, queued_load_bytes=one.queued_load_bytes,
    )  # fmt: skip
    for before, after in zip(predicted(any_model, one), predicted(any_model, longer), strict=True):
        assert after.engine_s >= before.engine_s * (1 - 1e-12)


@given(one=situations | inside, less=st.floats(0, 1), more=st.floats(0, 1), saved=st.floats(0, 1))
def test_costs_never_rise_with_what_survives_or_need_not_be_saved(
    any_model: CostModel, one: Preemption, less: float, more: float, saved: float
) -> None:
    low, high = sorted((less * one.held_blocks, more * one.held_blocks))
    kept = predicted(any_model, replace(one, hit_blocks=high, save_blocks=saved * one.held_blocks))
    for before, after in zip(predicted(any_model, replace(one, hit_blocks=low)), kept, strict=True):
        assert after.engine_s <= before.engine_s * (1 + 1e-12)


def test_costs_never_fall_with_length_across_the_edges_of_the_range(model: FittedModel) -> None:
    """Every length from below the trained range to above it, one by one."""
    for running in (0, 3):
        costs = [predicted(model, situation(tokens, 32, running)) for tokens in range(1, 2600)]
        for which in (0, 1):
            line = [pair[which].engine_s for pair in costs]
            assert all(now >= was * (1 - 1e-12) for was, now in pairwise(line))
        assert costs[0][0].extrapolated
        assert not costs[500][0].extrapolated
        assert costs[-1][0].extrapolated


@given(one=situations | inside)
def test_predicting_is_pure(any_model: CostModel, one: Preemption) -> None:
    assert predicted(any_model, one) == predicted(any_model, one)


@given(one=inside)
def test_the_first_option_is_what_log_ratios_are_against(any_model: CostModel, one: Preemption) -> None:
    recompute, swap = predicted(any_model, one)
    assert (recompute.log_ratio_low, recompute.log_ratio_high) == (0.0, 0.0)
    assert swap.log_ratio_low <= log(swap.engine_s / recompute.engine_s) + 1e-12
    assert swap.log_ratio_high >= log(swap.engine_s / recompute.engine_s) - 1e-12
    turned = any_model.predict(one, options_for(one)[::-1])[1]
    assert turned.log_ratio_low == pytest.approx(-swap.log_ratio_high)
    assert turned.log_ratio_high == pytest.approx(-swap.log_ratio_low)
    alone = any_model.predict(one, options_for(one)[1:])[0]
    assert alone == replace(swap, log_ratio_low=0.0, log_ratio_high=0.0)
