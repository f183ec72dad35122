"""A fitted model: its predictions, its intervals in and beyond the trained range, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import exp, inf, log

import pytest

from kvpolicy.cost.forest import Forest
from kvpolicy.cost.laws import LinearLaw
from kvpolicy.cost.model import oriented_margin
from kvpolicy.events import KINDS, Option
from kvpolicy.features import features_of
from tests.cost.model_costs import predicted
from tests.synthetic import CostLaw, fitted_model, options_for, situation, true_cost_s


def test_room_around_a_ratio_turns_with_it() -> None:
    assert oriented_margin((0.1, 0.3), "recompute", "swap") == (0.1, 0.3)
    assert oriented_margin((0.1, 0.3), "swap", "recompute") == (0.3, 0.1)
    assert oriented_margin((0.1, 0.3), "swap", "swap") == (0.3, 0.3)


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
    victim = situation(700, 32, 2)
    assert warm.warm()
    for plain, quick in zip(predicted(model, victim), predicted(warm, victim), strict=True):
        assert quick.engine_s == pytest.approx(plain.engine_s, rel=1e-12)


def test_an_unknown_feature_value_is_an_error() -> None:
    one = replace(situation(), batch_tokens=float("nan"))  # type: ignore[arg-type]  # what a broken engine might report
    with pytest.raises(ValueError, match="batch_tokens"):
        fitted_model("boosted").predict(one, [Option("recompute")])
