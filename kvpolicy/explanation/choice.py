"""What a policy makes of the situation that is explained, and where along the victim's length it turns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvpolicy.cost import FittedModel
from kvpolicy.events import KINDS, Preemption
from kvpolicy.explanation.boundary import BreakEven, turning
from kvpolicy.explanation.breakdown import options_of
from kvpolicy.explanation.question import as_long_as
from kvpolicy.policy import Policy, probabilities_of


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """Of a policy in its first state."""

    policy: str
    """Its label."""
    probabilities: tuple[float, float]
    """Of recompute and of swap."""
    turns: BreakEven
    """Where swap becomes, or ceases to be, the likelier option."""

    def to_dict(self) -> dict[str, Any]:
        shares = dict(zip(KINDS, self.probabilities, strict=True))
        return {"policy": self.policy, "probabilities": shares, "break_even": self.turns.to_dict()}

    def lines(self) -> list[str]:
        shares = ", ".join(f"{kind} {share:.0%}" for kind, share in zip(KINDS, self.probabilities, strict=True))
        return [f"policy {self.policy}: {shares}"]


def choice_of(policy: Policy, model: FittedModel, situation: Preemption) -> PolicyChoice:
    """``model``: says up to what length is looked. Raises ValueError for probabilities that are none."""
    state = policy.initial_state()

    def swap_share(one: Preemption) -> float:
        return probabilities_of(policy, one, options_of(one), state)[1]

    share = swap_share(situation)
    turns = turning(model, situation, lambda tokens: swap_share(as_long_as(situation, tokens)) > 0.5)
    return PolicyChoice(policy.label, (1.0 - share, share), turns)
