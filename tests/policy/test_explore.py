"""What exploring may cost: a budget of predicted regret that is never exceeded, whatever comes."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.cost.online import Online
from kvpolicy.events import Cost, Decision, Option, Preemption
from kvpolicy.policy import Policy, decide, load
from kvpolicy.policy.explore import Explore, ExploreState, predicted_regret
from tests.examples import examples
from tests.synthetic import fitted_model, options_for, situation

Told = tuple[float, float, float, float]
"""recompute_s, swap_s, and the interval of their log ratio."""


@dataclass
class Saying:
    """A cost model that says what it is told next."""

    costs: Told = (1.0, 1.0, 0.0, 0.0)

    def predict(self, one: Preemption, options: Sequence[Option]) -> tuple[Cost, ...]:
        recompute_s, swap_s, low, high = self.costs
        both = Cost(recompute_s, 0, 0, recompute_s, 0, 0, 0), Cost(swap_s, 0, swap_s, 0, 0, 0, 0, low, high)
        return both[: len(options)]


def exploring(spec: str) -> tuple[Explore, Saying]:
    model = Saying()
    policy: Policy = load(f"explore:x{spec}", lambda name: model)  # type: ignore[arg-type,return-value]  # enough of one
    assert isinstance(policy, Explore)
    return policy, model


def played(policy: Explore, model: Saying, told: Sequence[Told], seed: int) -> tuple[list[Decision], ExploreState]:
    state: Any = policy.initial_state()
    rng, made = random.Random(seed), []
    for costs in told:
        model.costs = costs
        made.append(decide(policy, situation(), options_for(situation()), state, rng))
        state = policy.next_state(state, made[-1])
    return made, state


seconds = st.floats(1e-6, 1e3)
several = st.lists(st.tuples(seconds, seconds, st.floats(-5, 1), st.floats(-1, 5)), max_size=30)


@given(told=several, budget=st.floats(0, 10), seed=st.integers(0, 9))
@examples(150)
def test_a_budget_in_seconds_is_never_exceeded(told: list[Told], budget: float, seed: int) -> None:
    policy, model = exploring(f",budget={budget!r}")
    made, state = played(policy, model, told, seed)
    spent_s = sum(
        share * (cost.engine_s - min(one.engine_s for one in decision.costs))
        for decision in made
        for share, cost in zip(decision.probabilities, decision.costs, strict=True)
    )
    assert state.spent_s is not None and state.spent_s <= budget
    assert spent_s == pytest.approx(state.spent_s)
    assert state.decisions == sum(max(decision.probabilities) < 1 for decision in made)


@given(told=several, percent=st.floats(0, 50), seed=st.integers(0, 9))
@examples(150)
def test_a_budget_as_a_share_is_never_exceeded_at_any_time(told: list[Told], percent: float, seed: int) -> None:
    policy, model = exploring(f",budget={percent!r}%")
    for upto in range(0, len(told) + 1, 5):
        made, state = played(policy, model, told[:upto], seed)
        min_s = sum(min(cost.engine_s for cost in decision.costs) for decision in made)
        assert state.cheapest_s == pytest.approx(min_s)
        assert state.spent_s is not None
        assert state.spent_s <= percent / 100 * state.cheapest_s


@given(told=several, seed=st.integers(0, 9))
@examples(50)
def test_a_budget_that_is_ample_changes_nothing(told: list[Told], seed: int) -> None:
    (free, one), (bound, other) = exploring(""), exploring(",budget=1e9")
    without, _ = played(free, one, told, seed)
    within, _ = played(bound, other, told, seed)
    assert [d.probabilities for d in without] == [d.probabilities for d in within]
    assert [d.chosen for d in without] == [d.chosen for d in within]


def test_a_budget_worked_by_hand() -> None:
    """Each coin between 1 s and 1.5 s is expected to cost 0.25 s more than the cheapest: a second is four of them."""
    policy, model = exploring(",budget=1")
    made, state = played(policy, model, [(1.0, 1.5, -1.0, 1.0)] * 6, 0)
    assert [decision.probabilities for decision in made] == [(0.5, 0.5)] * 4 + [(1.0, 0.0)] * 2
    assert state == ExploreState(4, None, 1.0, 6.0)
    assert json.loads(made[3].state) == {"explored": 3, "spent_s": 0.75, "cheapest_s": 3.0}
    assert json.loads(made[5].state) == {"explored": 4, "spent_s": 1.0, "cheapest_s": 5.0}


def test_what_is_too_dear_is_passed_over_and_what_is_not_goes_on() -> None:
    policy, model = exploring(",budget=0.3")
    told = [(1.0, 3.0, -1.0, 1.0), (1.0, 1.2, -1.0, 1.0), (2.0, 1.0, -1.0, 1.0), (1.2, 1.0, -1.0, 1.0)]
    made, _ = played(policy, model, told, 0)
    assert [decision.probabilities for decision in made] == [(1.0, 0.0), (0.5, 0.5), (0.0, 1.0), (0.5, 0.5)]


def test_nothing_to_spend_is_cheapest_but_where_it_costs_nothing() -> None:
    policy, model = exploring(",budget=0")
    made, state = played(policy, model, [(1.0, 1.1, -1, 1), (1.0, 0.9, -1, 1), (1.0, 1.0, -1, 1)], 0)
    assert [decision.probabilities for decision in made] == [(1.0, 0.0), (0.0, 1.0), (0.5, 0.5)]
    assert state.spent_s == 0.0


def test_a_share_earns_its_coins_first() -> None:
    policy, model = exploring(",budget=10%")
    made, _ = played(policy, model, [(1.0, 1.5, -1.0, 1.0)] * 6, 0)
    assert [max(decision.probabilities) for decision in made] == [1.0, 1.0, 0.5, 1.0, 0.5, 1.0]


def test_assessing_spends_nothing_and_the_state_is_frozen() -> None:
    policy, model = exploring(",budget=1")
    model.costs = (1.0, 1.5, -1.0, 1.0)
    state = policy.initial_state()
    for _ in range(9):
        assert policy.probabilities(situation(), options_for(situation()), state) == (0.5, 0.5)
    assert state == ExploreState(0, None, 0.0)


def test_regret_is_the_objectives() -> None:
    costs = (Cost(1, 0, 0, 1, 0, 0, 0, victim_delay_s=4.0), Cost(2, 0, 2, 0, 0, 0, 0, victim_delay_s=1.0))
    assert predicted_regret((0.5, 0.5), costs) == (0.5, 1.0)
    policy = load("explore:boosted,objective=victim,budget=1", fitted_model)
    assert isinstance(policy, Explore)
    assert predicted_regret((0.5, 0.5), costs, policy.objective) == (1.5, 1.0)


def test_a_budget_goes_with_learning_and_is_whole_after_a_restart() -> None:
    policy = load("explore:boosted,online=on,budget=0.5", fitted_model)
    state = policy.initial_state()
    assert state == ExploreState(0, Online(), 0.0)
    told = json.loads(state.to_json())
    assert (told["spent_s"], told["online"]["outcomes"]) == (0.0, 0)
    assert policy.resume(Online()) == ExploreState(0, Online(), 0.0)


@pytest.mark.parametrize("given_budget", ["", "-1", "nan", "inf", "much", "1%%", "%", "-1%"])
def test_a_wrong_budget_is_an_error(given_budget: str) -> None:
    with pytest.raises(ValueError, match=r"has budget=.*, should be seconds, or a share"):
        load(f"explore:boosted,budget={given_budget}", fitted_model)


def test_only_exploring_has_a_budget() -> None:
    with pytest.raises(ValueError, match="nothing to spend it on"):
        load("cheapest:boosted,budget=1", fitted_model)
