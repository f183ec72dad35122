"""What can be done with a victim, and why not more; the policy's state goes along with its decisions."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from kvpolicy.events import Cause, Cost, Decision, Option, Preemption
from kvpolicy.features import features_of
from kvpolicy.policy import (
    Decider,
    Feedback,
    LearningPolicy,
    feasible_options,
    load,
    why_no_swap,
)
from kvpolicy.policy.base import NoState
from kvpolicy.policy.cheapest import Always, Cheapest
from kvpolicy.policy.decision import at_resume
from tests.synthetic import situation

VICTIM = replace(situation(100, 32), cause="memory", free_host_blocks=4)


@pytest.mark.parametrize(
    ("cause", "computed_tokens", "refused", "free_host_blocks", "why"),
    [
        ("memory", 100, "", 4, ""),
        ("forced", 100, "", 4, ""),
        ("memory", 100, "", 3, "host_full"),
        ("memory", 100, "not_loadable", 3, "not_loadable"),
        ("memory", 0, "not_loadable", 4, "nothing_computed"),
        ("reset", 0, "not_loadable", 3, "reset"),
    ],
)
def test_the_first_reason_is_told(
    cause: Cause, computed_tokens: int, refused: str, free_host_blocks: int, why: str
) -> None:
    one = replace(VICTIM, cause=cause, computed_tokens=computed_tokens, free_host_blocks=free_host_blocks)
    assert why_no_swap(one, refused) == why


@pytest.mark.parametrize("free_host_blocks", [0, 3, 4, 5])
@pytest.mark.parametrize("computed_tokens", [0, 100])
def test_a_swap_is_an_option_where_nothing_speaks_against_it(free_host_blocks: int, computed_tokens: int) -> None:
    one = replace(VICTIM, free_host_blocks=free_host_blocks, computed_tokens=computed_tokens)
    kinds = [option.kind for option in feasible_options(one)]
    assert kinds == (["recompute"] if why_no_swap(one) else ["recompute", "swap"])


@dataclass(frozen=True)
class Priced(Cheapest[NoState]):
    """A millisecond for each token that is computed, 40 for a swap."""

    cost_model: Any = None

    def costs(self, situation: Preemption, options: Sequence[Option], state: NoState) -> tuple[Cost, ...]:
        features = [features_of(situation, option) for option in options]
        seconds = [one.recomputed_tokens * 1e-3 or 40e-3 for one in features]
        return tuple(Cost(engine_s, 0.0, 0.0, 0.0, 0.0, engine_s, engine_s) for engine_s in seconds)


class Undecided(Priced):
    def by_costs(
        self, situation: Preemption, options: Sequence[Option], costs: Sequence[Cost], state: NoState
    ) -> tuple[float, ...]:
        return (0.9, 0.1)


class TestAtResume:
    """Of 100 tokens in blocks of 32, two blocks are still there."""

    RESUMED = at_resume(VICTIM, 100, 64, 7, 5, 11, 13)

    def test_what_is_known_then_takes_the_place_of_what_was_expected(self) -> None:
        known = self.RESUMED
        assert (known.computed_tokens, known.held_blocks, known.hit_blocks, known.save_blocks) == (100, 4, 2.0, 0.0)
        assert (known.free_blocks, known.running_requests, known.queued_save_bytes, known.queued_load_bytes) == (
            7, 5, 11, 13,
        )  # fmt: skip
        assert known.batch_tokens == VICTIM.batch_tokens * 5 // VICTIM.running_requests
        recompute, swap = (features_of(known, option) for option in feasible_options(known))
        assert (recompute.recomputed_tokens, swap.save_bytes) == (36, 0)
        assert swap.load_bytes == 2 * VICTIM.block_bytes

    def test_blocks_of_several_tables_are_as_many_as_were_saved(self) -> None:
        """Their number does not follow from that of the tokens."""
        victim = replace(VICTIM, computed_tokens=100, held_blocks=7)
        assert at_resume(victim, 100, 0, 7, 5, 0, 0).held_blocks == 7
        assert at_resume(victim, 99, 0, 7, 5, 0, 0).held_blocks == 4

    def test_what_is_found_of_several_tables_is_counted_in_blocks_and_in_tokens(self) -> None:
        """96 tokens are three blocks of full attention. Of a window the last of two blocks is needed still, and of a
        state its only one: two of six are loaded, not three of them."""
        victim = replace(VICTIM, computed_tokens=100, held_blocks=6, hashed_tokens=96, hit_tokens=0.0)
        known = at_resume(victim, 100, 96, 7, 5, 0, 0, 2)
        assert (known.hit_blocks, known.hit_tokens, known.hashed_tokens) == (4.0, 96.0, 96)
        recompute, swap = (features_of(known, option) for option in feasible_options(known))
        assert (recompute.recomputed_tokens, swap.load_bytes) == (4, 2 * VICTIM.block_bytes)

    @pytest.mark.parametrize("name", ["always-swap", "threshold:101", "random:0.01"])
    def test_what_was_decided_stands(self, name: str) -> None:
        assert Decider(load(name), random.Random(0)).loads(self.RESUMED)

    def test_a_policy_that_goes_by_costs_is_asked_again(self) -> None:
        """At the preemption 100 tokens are to be computed in 100 ms, now 36 in 36 ms; a swap costs 40 ms."""
        decider = Decider(Priced("priced"), random.Random(0))
        assert decider.decide(VICTIM).intended == "swap"
        before = decider._rng.getstate()
        assert not decider.loads(self.RESUMED)
        assert decider.loads(at_resume(VICTIM, 100, 32, 7, 5, 0, 0)), "64 tokens are to be computed"
        assert decider._rng.getstate() == before, "vLLM may ask any number of times"
        assert Decider(Undecided("undecided"), random.Random(0)).loads(self.RESUMED), "an earlier draw stands"

    def test_what_was_pinned_is_loaded(self) -> None:
        decider = Decider(load("always-recompute"), random.Random(0))
        decider.pin("swap")
        assert decider.loads(self.RESUMED)


@dataclass(frozen=True)
class Count:
    decisions: int = 0
    outcomes: int = 0

    def to_json(self) -> str:
        return f'{{"decisions": {self.decisions}}}'


class Counting(LearningPolicy[Count]):
    """Swaps at every other decision, and counts."""

    name = "counting"

    def initial_state(self) -> Count:
        return Count()

    def probabilities(self, situation: Preemption, options: Sequence[Option], state: Count) -> Sequence[float]:
        swap = state.decisions % 2 == 1 and len(options) == 2
        return (0.0, 1.0) if swap else (1.0, 0.0)[: len(options)]

    def next_state(self, state: Count, decision: Decision) -> Count:
        return replace(state, decisions=state.decisions + 1)

    def observe(self, state: Count, feedback: Feedback) -> Count:
        return replace(state, outcomes=state.outcomes + 1)


SWAPPABLE = situation(computed_tokens=64)


def test_the_state_goes_along() -> None:
    decider = Decider(Counting(), random.Random(0))
    decisions = [decider.decide(SWAPPABLE) for _ in range(3)]
    assert [one.executed for one in decisions] == ["recompute", "swap", "recompute"]
    assert [one.state for one in decisions] == [f'{{"decisions": {i}}}' for i in range(3)]
    decider.learn(Feedback(SWAPPABLE, decisions[1].options[1], 1.0, None))
    assert decider.state == Count(3, 1) and decider.learns and decider.learned is None
    decider.adopt(Always("always-swap", "swap"))
    assert decider.decide(SWAPPABLE).policy == "always-swap" and not decider.learns
    decider.learn(Feedback(SWAPPABLE, decisions[1].options[1], 1.0, None))  # nobody listens


def test_what_keeps_an_engine_from_swapping_is_the_reason() -> None:
    decision = Decider(load("always-swap"), random.Random(0)).decide(SWAPPABLE, "copies_failing")
    assert (decision.intended, decision.executed, decision.reason) == ("recompute", "recompute", "copies_failing")
    assert [option.kind for option in decision.options] == ["recompute"]


@pytest.mark.parametrize(("policy", "reason"), [("always-swap", "shadow"), ("always-recompute", "")])
def test_a_shadow_intends_and_recomputes(policy: str, reason: str) -> None:
    decision = Decider(load(policy), random.Random(0), shadow=True).decide(SWAPPABLE)
    assert (decision.intended, decision.executed) == (policy.removeprefix("always-"), "recompute")
    assert decision.reason == reason


def test_a_decision_takes_one_number_whatever_is_feasible() -> None:
    decider, twin = Decider(load("random:0.5"), random.Random(7)), random.Random(7)
    for why_not in ("", "host_full", ""):
        decider.decide(SWAPPABLE, why_not)
        twin.random()
    assert decider._rng.getstate() == twin.getstate()
