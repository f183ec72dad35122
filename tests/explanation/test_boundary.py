"""Break-even lengths and the grid of choices, checked against the model."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from kvpolicy import cost
from kvpolicy.cost import FittedModel
from kvpolicy.explanation import Question, breakdowns_of
from kvpolicy.explanation.boundary import break_even, grid, longest
from kvpolicy.explanation.question import resolve, with_length, with_running
from kvpolicy.policy import Objective
from tests.explanation.models import explain
from tests.synthetic import CostLaw, fitted_model


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
