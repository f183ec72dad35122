"""A policy's choice in the explained situation, and the lengths of the victim at which it turns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvpolicy.cost import FittedModel
from kvpolicy.events import KINDS, Preemption
from kvpolicy.explanation.boundary import BreakEven, choice_turns
from kvpolicy.explanation.breakdown import options_of
from kvpolicy.explanation.question import with_length
from kvpolicy.policy import Policy, initial_state_of, probabilities_of


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """Choice of a policy in its initial state."""

    policy: str
    """Label of the policy."""
    probabilities: tuple[float, float]
    """Probabilities of recompute and swap."""
    turns: BreakEven
    """Where swap becomes, or ceases to be, the likelier option."""

    def to_dict(self) -> dict[str, Any]:
        shares = dict(zip(KINDS, self.probabilities, strict=True))
        return {"policy": self.policy, "probabilities": shares, "break_even": self.turns.to_dict()}

    def lines(self) -> list[str]:
        shares = ", ".join(f"{kind} {share:.0%}" for kind, share in zip(KINDS, self.probabilities, strict=True))
        return [f"policy {self.policy}: {shares}"]


def choice_of(policy: Policy, model: FittedModel, situation: Preemption) -> PolicyChoice:
    """The policy's choice. ``model`` sets the longest length evaluated.

    Raises PolicyError for invalid probabilities.
    """
    state = initial_state_of(policy)

    def swap_share(situation: Preemption) -> float:
        return probabilities_of(policy, situation, options_of(situation), state)[1]

    share = swap_share(situation)

    def swaps(tokens: int) -> bool:
        return swap_share(with_length(situation, tokens, model.provenance)) > 0.5

    turns = choice_turns(model, situation, swaps)
    return PolicyChoice(policy.label, (1.0 - share, share), turns)
