"""What every policy promises, each held to it."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import FrozenInstanceError, dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.cost import CostModel
from kvpolicy.cost.online import Online
from kvpolicy.events import Cost, Option, Preemption
from kvpolicy.policy import FORMS, Feedback, LearningPolicy, Policy, decide, feasible_options, load
from kvpolicy.policy.explore import ExploreState
from tests.synthetic import fitted_model, options_for, situation

SPECS = (
    "always-recompute",
    "always-swap",
    "threshold:0",
    "threshold:256",
    "random:0",
    "random:0.3",
    "random:1",
    "cheapest:linear",
    "cheapest:boosted",
    "cheapest:boosted,objective=engine+0.5*victim+0.1*others",
    "cheapest:boosted,online=on",
    "explore:analytic",
    "explore:boosted",
    "explore:boosted,budget=0.01",
    "explore:boosted,budget=1%",
    "explore:boosted,online=on,objective=victim",
    "minwaste:boosted",
    "minwaste:linear",
)

situations = st.builds(
    situation,
    computed_tokens=st.integers(1, 50_000),
    block_size=st.sampled_from([32, 64]),
    running_requests=st.integers(0, 30),
    free_host_blocks=st.integers(0, 2000),
)


def test_every_policy_that_ships_is_held_to_it() -> None:
    shipped = {form.partition(":")[0] for form in FORMS} - {"python"}
    assert {spec.partition(":")[0] for spec in SPECS} == shipped


@pytest.fixture(params=SPECS, scope="module")
def policy(request: pytest.FixtureRequest) -> Policy:
    return load(request.param, fitted_model)


@given(one=situations)
def test_probabilities_sum_to_one_over_feasible_options(policy: Policy, one: Preemption) -> None:
    options = feasible_options(one)
    shares, costs = policy.assess(one, options, policy.initial_state())
    assert len(shares) == len(options)
    assert all(0 <= share <= 1 for share in shares)
    assert sum(shares) == pytest.approx(1.0, abs=1e-12)
    assert len(costs) == (len(options) if policy.cost_model else 0)
    assert shares == policy.probabilities(one, options, policy.initial_state())


@given(one=situations)
def test_assessing_is_pure(policy: Policy, one: Preemption) -> None:
    options = feasible_options(one)
    state = policy.initial_state()
    assert policy.assess(one, options, state) == policy.assess(one, options, state)
    assert state == policy.initial_state()


@given(one=situations, seed=st.integers(0, 1000))
def test_what_is_infeasible_is_never_done(policy: Policy, one: Preemption, seed: int) -> None:
    full = replace(one, free_host_blocks=one.held_blocks - 1)
    decision = decide(policy, full, feasible_options(full), policy.initial_state(), random.Random(seed))
    assert decision.options == (Option("recompute"),)
    assert decision.probabilities == (1.0,)
    assert decision.intended == "recompute"


@given(one=situations, seed=st.integers(0, 1000))
def test_a_decision_records_what_it_was_based_on(policy: Policy, one: Preemption, seed: int) -> None:
    options, state = feasible_options(one), policy.initial_state()
    decision = decide(policy, one, options, state, random.Random(seed))
    shares, costs = policy.assess(one, options, state)
    assert (decision.options, decision.probabilities, decision.costs) == (options, shares, costs)
    assert decision.probabilities[decision.chosen] > 0
    assert (decision.policy, decision.state) == (policy.name, state.to_json())
    json.loads(decision.state)


def test_states_are_frozen(policy: Policy) -> None:
    with pytest.raises((FrozenInstanceError, AttributeError, TypeError)):
        policy.initial_state().events = 7  # type: ignore[attr-defined]  # that it cannot is the promise


@pytest.mark.parametrize("seed", range(3))
def test_one_number_is_drawn_each_time(policy: Policy, seed: int) -> None:
    """So that two policies with the same seed see the same chance at the same preemption."""
    rng, other, one = random.Random(seed), random.Random(seed), situation(300)
    decide(policy, one, feasible_options(one), policy.initial_state(), rng)
    other.random()
    assert rng.random() == other.random()


@given(one=situations, by=st.floats(0.01, 100.0))
def test_what_is_observed_changes_the_state_of_policies_that_learn(policy: Policy, one: Preemption, by: float) -> None:
    assert isinstance(policy, LearningPolicy) == policy.name.endswith(("online=on", "objective=victim"))
    if not isinstance(policy, LearningPolicy):
        return
    state = policy.initial_state()
    told = state.to_json()
    option = feasible_options(one)[-1]
    later = policy.observe(state, Feedback(one, option, 1e-3 * by, 2e-3 * by))
    learned = policy.learned(later)
    assert state.to_json() == told
    assert learned is not None and learned.events == 1
    assert policy.learned(policy.resume(learned)) == learned
    policy.assess(one, feasible_options(one), later)


def test_a_policy_that_learns_leaves_an_option_that_has_become_dear_and_returns() -> None:
    policy, one = load("cheapest:boosted,online=on", fitted_model), situation(2000)
    assert isinstance(policy, LearningPolicy)
    state = policy.initial_state()
    recompute, swap = options_for(one)
    costs = policy.assess(one, (recompute, swap), state)[1]
    best, other = sorted((0, 1), key=lambda i: costs[i].engine_s)
    options, seconds = (recompute, swap), [cost.engine_s for cost in costs]
    assert policy.probabilities(one, options, state)[best] == 1.0
    dear = 3.0 * seconds[other]
    for _ in range(50):
        share = policy.probabilities(one, options, state)
        took = best if share[best] == 1.0 else other
        state = policy.observe(state, Feedback(one, options[took], dear if took == best else seconds[other], None))
    assert policy.probabilities(one, options, state)[other] == 1.0
    for _ in range(1500):
        took = best if policy.probabilities(one, options, state)[best] == 1.0 else other
        state = policy.observe(state, Feedback(one, options[took], seconds[took], None))
    assert policy.probabilities(one, options, state)[best] == 1.0


def test_draws_follow_the_probabilities() -> None:
    policy, one, rng = load("random:0.3"), situation(300), random.Random(1)
    drawn = Counter(decide(policy, one, options_for(one), policy.initial_state(), rng).intended for _ in range(10_000))
    assert drawn["swap"] / 10_000 == pytest.approx(0.3, abs=0.02)


@dataclass
class Priced:
    """A cost model that says what it is told."""

    costs: tuple[tuple[float, float, float], ...]
    """(engine_s, log ratio low, log ratio high) per option."""

    def predict(self, one: Preemption, options: Sequence[Option]) -> tuple[Cost, ...]:
        return tuple(Cost(s, 0, 0, s, 0, s, s, low, high) for s, low, high in self.costs[: len(options)])


def shares_of(spec: str, recompute_s: float, swap_s: float, low: float, high: float) -> tuple[float, ...]:
    model: CostModel = Priced(((recompute_s, 0, 0), (swap_s, low, high)))  # type: ignore[assignment]  # enough of one
    policy = load(f"{spec}:x", lambda name: model)
    return policy.probabilities(situation(), options_for(situation()), policy.initial_state())


def test_cheapest_worked_by_hand() -> None:
    assert shares_of("cheapest", 2.0, 1.0, -2, 2) == (0.0, 1.0)
    assert shares_of("cheapest", 1.0, 2.0, -2, 2) == (1.0, 0.0)
    assert shares_of("cheapest", 1.0, 1.0, -2, 2) == (1.0, 0.0)


def test_explore_worked_by_hand() -> None:
    """A coin where the interval of the log ratio holds 0; else the cheapest."""
    assert shares_of("explore", 2.0, 1.0, -1.4, 0.0) == (0.5, 0.5)
    assert shares_of("explore", 1.0, 2.0, float("-inf"), float("inf")) == (0.5, 0.5)
    assert shares_of("explore", 2.0, 1.0, -1.4, -0.1) == (0.0, 1.0)
    assert shares_of("explore", 1.0, 2.0, 0.1, 1.4) == (1.0, 0.0)


def test_explore_counts_what_it_left_to_chance() -> None:
    policy, one, state = load("explore:analytic", fitted_model), situation(300), ExploreState(4)
    sure = decide(load("always-swap"), one, options_for(one), state, random.Random(0))
    open_one = decide(load("random:0.5"), one, options_for(one), state, random.Random(0))
    assert policy.next_state(state, sure) == ExploreState(4)
    assert policy.next_state(state, open_one) == ExploreState(5)
    assert ExploreState(5).to_json() == '{"explored": 5}'
    told = json.loads(ExploreState(5, Online()).to_json())
    assert (told["explored"], told["online"]["outcomes"]) == (5, 0)


def test_threshold_worked_by_hand() -> None:
    policy = load("threshold:256")
    for tokens, expected in ((255, (1.0, 0.0)), (256, (0.0, 1.0))):
        one = situation(tokens)
        assert policy.probabilities(one, options_for(one), policy.initial_state()) == expected
