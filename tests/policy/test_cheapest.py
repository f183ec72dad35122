"""InferCept's rule, worked by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpolicy.cost import FittedModel
from kvpolicy.cost.laws import Channel, RecomputeRoofline, SwapRoofline
from kvpolicy.events import Preemption
from kvpolicy.policy import load, needs_engine
from kvpolicy.policy.cheapest import discard_waste, swap_waste
from tests.synthetic import fitted_model, options_for, situation


def model(s_per_token: float, s_per_byte: float, felt: float = 1.0) -> FittedModel:
    """A recompute takes ``s_per_token`` each; a copy ``s_per_byte`` each way, ``felt`` of it by the engine."""
    channel = Channel(0.0, s_per_byte, 0.0)
    recompute = RecomputeRoofline(fixed_s=0.0, alone_s=0.0, s_per_token=s_per_token, s_per_pair=0.0)
    swap = SwapRoofline(channel, channel, 0.0, 0.0, save_share=felt, load_alone_share=felt, load_beside_share=felt)
    bare = replace(fitted_model("analytic"), laws={"recompute": recompute, "swap": swap}, residuals={})
    return replace(bare, floor_s={"recompute": 0.0, "swap": 0.0})


def victim(own: int, other: int) -> Preemption:
    return replace(situation(own, 32), batch_tokens=other, shared_blocks=0)


def chosen(one: FittedModel, at: Preemption) -> str:
    policy, options = load("minwaste:x", lambda name: one), options_for(at)
    shares = policy.probabilities(at, options, policy.initial_state())
    return options[shares.index(1.0)].kind


def test_wastes_by_hand() -> None:
    """1000 tokens beside 3000, 0.2 s to compute again, 0.1 s each way."""
    assert discard_waste(0.2, 1000, 3000) == pytest.approx(0.2 * (500 + 3000))
    assert swap_waste(0.1 + 0.1, 1000, 3000) == pytest.approx(2 * 0.1 * 4000)


def test_the_lower_waste_is_taken() -> None:
    """640 tokens are 20 blocks. Nobody beside: half of the victim's memory against twice the copies of all of it."""
    one = victim(640, 0)
    moved = 20 * one.block_bytes
    for copy_s, expected in ((0.24, "swap"), (0.26, "recompute")):  # 1 s x 320 to compute again; 2 x copy x 640
        assert chosen(model(1 / 640, copy_s / moved), one) == expected


def test_others_make_both_dearer_alike_and_their_own_share_less() -> None:
    """Beside 100 times its own memory the rule compares the time to compute again with that of two copies."""
    one = victim(640, 64_000)
    moved = 20 * one.block_bytes
    for copy_s, expected in ((0.49, "swap"), (0.51, "recompute")):
        assert chosen(model(1 / 640, copy_s / moved), one) == expected


def test_a_copy_counts_in_full_however_little_of_it_the_engine_feels() -> None:
    one = victim(640, 64_000)
    option = options_for(one)[1]
    felt, unfelt = model(1e-3, 1e-9), model(1e-3, 1e-9, felt=0.1)
    costs = [each.predict(one, options_for(one))[1] for each in (felt, unfelt)]
    assert costs[1].engine_s == pytest.approx(0.1 * costs[0].engine_s)
    assert felt.copies_s(one, option, costs[0]) == unfelt.copies_s(one, option, costs[1]) > 0


def test_a_law_without_a_link_is_taken_at_its_word() -> None:
    linear, one = fitted_model("linear"), situation(500)
    cost = linear.predict(one, options_for(one))[1]
    assert linear.copies_s(one, options_for(one)[1], cost) == cost.save_s + cost.load_s


def test_in_a_server_it_may_ask_for_the_engines_own_model() -> None:
    assert needs_engine("minwaste:analytic")
    assert not needs_engine("minwaste:somewhere")
    with pytest.raises(ValueError, match="minwaste takes none"):
        needs_engine("minwaste:analytic,online=on")
