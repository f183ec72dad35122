"""Break-even lengths and the grid of choices, checked against the model."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from kvpolicy import cost
from kvpolicy.cost import FittedModel
from kvpolicy.events import Cost
from kvpolicy.explanation import Explanation, Question, breakdowns_of
from kvpolicy.explanation.boundary import break_even, grid, longest
from kvpolicy.explanation.question import resolve, with_length, with_running
from kvpolicy.policy import Objective
from tests.explanation.models import explain
from tests.synthetic import CostLaw, fitted_model


def costs_of(explanation: Explanation) -> tuple[Cost, Cost]:
    recompute, swap = explanation.breakdowns
    return recompute.cost, swap.cost


def turning_model() -> FittedModel:
    return fitted_model("analytic")


def test_the_choice_turns_exactly_at_the_break_even_length() -> None:
    model = turning_model()
    one = resolve(model, Question(500, running=3)).situation
    even = break_even(model, one, Objective())
    assert even.first == "recompute"
    assert [turn.to for turn in even.turns] == ["swap", "recompute"] * (len(even.turns) // 2) + ["swap"]
    for turn in even.turns:
        costs = [breakdowns_of(model, with_length(one, tokens)) for tokens in (turn.tokens - 1, turn.tokens)]
        swaps = [swap.cost.engine_s < again.cost.engine_s for again, swap in costs]
        assert swaps == [turn.to != "swap", turn.to == "swap"]
    law = CostLaw()
    assert law.copy_latency_s > 0  # what makes a swap of a short victim the dearer one
    assert f"swap from {turn.tokens} tokens on" in explain(cost_model="analytic").text()


@pytest.mark.parametrize(("name", "block_size"), [("cpu-llama-simulated-link", 64), ("cpu-llama-native", 32)])
def test_every_turn_of_the_staircase_is_listed(name: str, block_size: int) -> None:
    model = cost.load(name)
    one = resolve(model, Question(500, running=1, block_size=block_size)).situation
    even = break_even(model, one, Objective())
    assert even.every_up_to == even.up_to_tokens
    breakdowns = [breakdowns_of(model, with_length(one, tokens)) for tokens in range(1, even.up_to_tokens + 1)]
    swaps = [swap.cost.engine_s < again.cost.engine_s for again, swap in breakdowns]
    real = [tokens for tokens, (before, after) in enumerate(pairwise(swaps), 2) if before != after]
    assert [turn.tokens for turn in even.turns] == real


def test_another_length_keeps_the_shares_that_survive_and_are_saved() -> None:
    """Of 16 blocks 4 are shared, 3 of the other 12 survive and 8 are saved."""
    model = turning_model()
    one = resolve(model, Question(500, block_size=32, shared=4, hit=7.0, save=8)).situation
    assert (one.hit_blocks, one.save_blocks) == (7.0, 8.0)
    long, short = with_length(one, 1024), with_length(one, 64)
    assert (long.held_blocks, long.shared_blocks, long.hit_blocks, long.save_blocks) == (32, 4, 11.0, 16.0)
    assert (short.held_blocks, short.shared_blocks, short.hit_blocks, short.save_blocks) == (2, 2, 2.0, 1.0)
    plain = resolve(model, Question(500, block_size=32, shared=4)).situation
    assert (plain.hit_blocks, plain.save_blocks) == (4.0, 16.0)
    assert (with_length(plain, 777).hit_blocks, with_length(plain, 777).save_blocks) == (4.0, 25.0)


def test_what_survives_makes_a_recompute_cheaper_and_is_said() -> None:
    lost, kept = (explain(cost_model="analytic", **more) for more in ({}, {"hit": 12, "save": 5}))
    recomputes, swaps = zip(*((cost.engine_s for cost in costs_of(one)) for one in (lost, kept)), strict=True)
    assert recomputes[1] < recomputes[0] / 2 and swaps[1] < swaps[0]
    assert "0 shared, 12 expected to survive, 5 to be saved)" in kept.text()
    assert "0 shared)" in lost.text()


def test_long_lengths_are_evaluated_at_block_edges_which_is_noted() -> None:
    explanation = explain(cost_model="analytic", tokens=100_000, block_size=64)
    assert explanation.break_even.every_up_to < explanation.break_even.up_to_tokens == 400_000
    assert 64 < explanation.break_even.widest_gap < 4096
    assert (
        f"up to {explanation.break_even.widest_gap} tokens apart, between which the choice may change"
        in explanation.text()
    )


def test_a_constant_choice_has_no_turn() -> None:
    model = turning_model()
    free = replace(model, laws={"recompute": model.laws["recompute"], "swap": model.laws["recompute"]})
    cheap = replace(free, floor_s={"recompute": 1.0, "swap": 1e-9})
    even = break_even(cheap, resolve(cheap, Question(500)).situation, Objective())
    assert (even.first, even.turns) == ("swap", ())


def test_the_grid_is_what_the_model_chooses() -> None:
    model = turning_model()
    one = resolve(model, Question(500, running=3)).situation
    boundary_grid = grid(model, one, Objective())
    assert all(low < high for line in (boundary_grid.tokens, boundary_grid.running) for low, high in pairwise(line))
    assert boundary_grid.tokens[-1] == longest(model, one)
    for row, load in enumerate(boundary_grid.running):
        for column in (0, len(boundary_grid.tokens) // 2, len(boundary_grid.tokens) - 1):
            again, swap = breakdowns_of(model, with_length(with_running(one, load), boundary_grid.tokens[column]))
            assert (boundary_grid.log_ratio[row][column] < 0) == (swap.cost.engine_s < again.cost.engine_s)
