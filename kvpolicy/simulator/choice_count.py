"""An observer that counts decisions with a choice, and those in which a cost model extrapolated."""

from __future__ import annotations

from dataclasses import dataclass

from kvpolicy.events import Decision


@dataclass(slots=True)
class ChoiceCount:
    """A :data:`kvpolicy.simulator.base.DecisionObserver`."""

    choices: int = 0
    """Situations with more than one feasible option."""
    extrapolated: int = 0
    """Choices in which a compared cost lay outside the model's training range."""

    def __call__(self, decision: Decision) -> None:
        if len(decision.options) > 1:
            self.choices += 1
            self.extrapolated += any(cost.extrapolated for cost in decision.costs)
