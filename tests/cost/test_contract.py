"""What every cost model promises, each family held to it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import exp, inf, isfinite, log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.cost.forest import Forest
from kvpolicy.cost.laws import LinearLaw
from kvpolicy.cost.model import CostModel, FittedModel
from kvpolicy.events import KINDS, Cost, Option, Preemption
from kvpolicy.features import features_of
from kvpolicy.training.family import FAMILIES
from tests.snippets import shown
from tests.synthetic import CostLaw, fitted_model, options_for, situation, true_cost_s

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
    return _of(request.param)


def _of(name: str) -> FittedModel:
    if name == "boosted, carried":
        return replace(fitted_model("boosted"), carried=dict.fromkeys(KINDS, True))
    if name == "boosted":
        return replace(fitted_model("boosted"), carried=dict.fromkeys(KINDS, False))
    return fitted_model(name)


OWN: tuple[type[CostModel], ...] = (shown("Rates"),)
"""Cost models without laws, made without arguments."""


@pytest.fixture(params=[*FAMILIES, "boosted, carried", *OWN], scope="module", ids=str)
def any_model(request: pytest.FixtureRequest) -> CostModel:
    return request.param() if request.param in OWN else _of(request.param)


def predicted(model: CostModel, one: Preemption) -> tuple[Cost, ...]:
    return model.predict(one, options_for(one))


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


@pytest.mark.parametrize("kept", [True, False])
def test_outside_the_range_a_residual_is_kept_or_left_out_and_the_interval_is_wider(kept: bool) -> None:
    model = replace(fitted_model("boosted"), carried=dict.fromkeys(KINDS, kept))
    near, far = situation(1000, 32, 3), situation(1000, 32, 40)
    for kind, close, distant in zip(KINDS, predicted(model, near), predicted(model, far), strict=True):
        option = options_for(far)[KINDS.index(kind)]
        assert not close.extrapolated
        assert distant.extrapolated
        x = features_of(far, option)
        factor = exp(model.residuals[kind].predict(x)) if kept else 1.0
        assert distant.engine_s == pytest.approx(model.law_seconds(kind, x) * factor)
        assert log(distant.high_s / distant.engine_s) >= log(close.high_s / close.engine_s) * (1 - 1e-9)
        assert model.distance(kind, x) == pytest.approx(log(41 / (1 + model.ranges[kind]["running_requests"][1])))


def test_the_interval_widens_with_the_distance_and_the_ratios_does() -> None:
    model = fitted_model("boosted")
    growth = {"recompute": 0.2, "swap": 0.1, "ratio": 0.3}
    model = replace(model, intervals=replace(model.intervals, growth=growth))
    lines = [predicted(model, situation(tokens, 32, 3)) for tokens in (1500, 4000, 16_000, 64_000)]
    assert not lines[0][0].extrapolated and lines[1][0].extrapolated
    rooms = [[log(cost.high_s / cost.engine_s) for cost in pair] for pair in lines]
    assert all(before < after for one, other in pairwise(rooms) for before, after in zip(one, other, strict=True))
    ratios = [pair[1].log_ratio_high - pair[1].log_ratio_low for pair in lines]
    assert all(before < after for before, after in pairwise(ratios))


def test_a_cost_that_did_not_grow_in_training_is_not_known_beyond_it() -> None:
    """A law without any length in it, as fits find them in noise: a victim ten times longer is extrapolated still."""
    model = fitted_model("linear")
    flat = replace(model, laws=dict.fromkeys(KINDS, LinearLaw(0.01, {})))
    assert not predicted(flat, situation(1000, 32, 3))[0].extrapolated
    assert all(cost.extrapolated for cost in predicted(flat, situation(20_000, 32, 3)))


def test_a_feature_that_nothing_depends_on_extrapolates_nothing() -> None:
    """Thousands of waiting requests were never measured, and take no part in any step."""
    assert not predicted(fitted_model("boosted"), situation(1000, 32, 3, waiting_requests=10**4))[0].extrapolated


def test_far_beyond_the_trained_lengths_physics_is_near_the_truth() -> None:
    model, one = fitted_model("boosted", bend=0.0), situation(16_000, 32, 3)
    for kind, cost in zip(KINDS, predicted(model, one), strict=True):
        assert cost.engine_s == pytest.approx(true_cost_s(CostLaw(), kind, one), rel=0.07)


def test_too_few_states_mean_an_infinite_interval() -> None:
    model = fitted_model("analytic", states=14)
    _, swap = predicted(model, situation(500))
    assert (swap.low_s, swap.high_s) == (0.0, inf)
    assert (swap.log_ratio_low, swap.log_ratio_high) == (-inf, inf)


def test_stall_is_the_cost_times_those_who_wait_for_it() -> None:
    cost = predicted(fitted_model("analytic"), situation(500, running_requests=3))[0]
    assert cost.stall_s == pytest.approx(3 * cost.engine_s)


def test_the_delay_of_a_victim_is_predicted_and_never_falls_with_length() -> None:
    """In these traces nobody waits for anything but what the engine does: delay and cost are near each other."""
    model = fitted_model("boosted")
    delays = [predicted(model, situation(tokens, 32, 3)) for tokens in range(40, 2000, 40)]
    for which in (0, 1):
        line = [pair[which].victim_delay_s or 0.0 for pair in delays]
        assert min(line) > 0
        assert line == sorted(line)
        assert [pair[which].engine_s for pair in delays] == pytest.approx(line, rel=0.5)
    silent = replace(model, victim_delays={})
    assert predicted(silent, situation(500))[0].victim_delay_s is None


def test_compiling_changes_no_number() -> None:
    model = fitted_model("boosted")
    fresh = {kind: Forest(forest.nodes) for kind, forest in model.residuals.items()}
    warm = replace(model, residuals=fresh)
    one = situation(700, 32, 2)
    assert warm.warm()
    for plain, quick in zip(predicted(model, one), predicted(warm, one), strict=True):
        assert quick.engine_s == pytest.approx(plain.engine_s, rel=1e-12)


def test_an_unknown_feature_value_is_an_error() -> None:
    one = replace(situation(), batch_tokens=float("nan"))  # type: ignore[arg-type]  # what a broken engine might report
    with pytest.raises(ValueError, match="batch_tokens"):
        fitted_model("boosted").predict(one, [Option("recompute")])
