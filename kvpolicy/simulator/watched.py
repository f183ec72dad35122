"""A policy with somebody looking over its shoulder: how often it had a choice, and how often its model guessed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvpolicy.cost import CostModel
from kvpolicy.cost.online import Online
from kvpolicy.events import Decision, Option, Preemption
from kvpolicy.policy import Assessment, Feedback, Policy, PolicyState


@dataclass(slots=True)
class Seen:
    choices: int = 0
    """Situations with more than one feasible option."""
    extrapolated: int = 0
    """Of those, where a cost that was compared lay outside what the model was trained on."""


@dataclass(frozen=True, slots=True)
class Watched:
    """Implements :class:`~kvpolicy.policy.Policy` by another one, which decides as if nobody looked."""

    policy: Policy
    seen: Seen = field(default_factory=Seen)

    @property
    def name(self) -> str:
        return self.policy.name

    @property
    def cost_model(self) -> CostModel | None:
        return self.policy.cost_model

    def initial_state(self) -> PolicyState:
        return self.policy.initial_state()

    def assess(self, situation: Preemption, options: Sequence[Option], state: PolicyState) -> Assessment:
        told = self.policy.assess(situation, options, state)
        if len(options) > 1:
            self.seen.choices += 1
            self.seen.extrapolated += any(cost.extrapolated for cost in told[1])
        return told

    def probabilities(self, situation: Preemption, options: Sequence[Option], state: PolicyState) -> tuple[float, ...]:
        return self.policy.probabilities(situation, options, state)

    def next_state(self, state: PolicyState, decision: Decision) -> PolicyState:
        return self.policy.next_state(state, decision)

    def observe(self, state: PolicyState, feedback: Feedback) -> PolicyState:
        return self.policy.observe(state, feedback)

    def learned(self, state: PolicyState) -> Online | None:
        return self.policy.learned(state)

    def resume(self, learned: Online) -> PolicyState:
        return self.policy.resume(learned)
