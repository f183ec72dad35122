"""A decider: the policy's state goes along with its decisions, and what is executed may be another option."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from kvpolicy.events import Decision, Option, Preemption
from kvpolicy.policy import Assessment, Decider, Feedback, PolicyState, load
from kvpolicy.policy.base import PolicyBase
from kvpolicy.policy.cheapest import Always
from tests.synthetic import situation


@dataclass(frozen=True)
class Count:
    decisions: int = 0
    outcomes: int = 0

    def to_json(self) -> str:
        return f'{{"decisions": {self.decisions}}}'


class Counting(PolicyBase):
    """Swaps at every other decision, and counts."""

    name = "counting"

    def initial_state(self) -> PolicyState:
        return Count()

    def assess(self, situation: Preemption, options: Sequence[Option], state: PolicyState) -> Assessment:
        assert isinstance(state, Count)
        swap = state.decisions % 2 == 1 and len(options) == 2
        return ((0.0, 1.0) if swap else (1.0, 0.0)[: len(options)]), ()

    def next_state(self, state: PolicyState, decision: Decision) -> PolicyState:
        assert isinstance(state, Count)
        return replace(state, decisions=state.decisions + 1)

    def observe(self, state: PolicyState, feedback: Feedback) -> PolicyState:
        assert isinstance(state, Count)
        return replace(state, outcomes=state.outcomes + 1)


SWAPPABLE = situation(computed_tokens=64)


def test_the_state_goes_along() -> None:
    decider = Decider(Counting(), random.Random(0))
    decisions = [decider.decide(SWAPPABLE) for _ in range(3)]
    assert [one.executed for one in decisions] == ["recompute", "swap", "recompute"]
    assert [one.state for one in decisions] == [f'{{"decisions": {i}}}' for i in range(3)]
    decider.learn(Feedback(SWAPPABLE, decisions[1].options[1], 1.0, None))
    assert decider.state == Count(3, 1) and not decider.learns
    decider.adopt(Always("always-swap", "swap"))
    assert decider.decide(SWAPPABLE).policy == "always-swap"


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
