"""An observer of a run's decisions: how many left a choice, and in how many of those a cost model extrapolated."""

from __future__ import annotations

from dataclasses import dataclass

from kvpolicy.events import Decision


@dataclass(slots=True)
class ChoiceCount:
    """A :data:`kvpolicy.simulator.base.DecisionObserver`."""

    choices: int = 0
    """Situations with more than one feasible option."""
    extrapolated: int = 0
    """Of those, where a cost that was compared lay outside what the model was trained on."""

    def __call__(self, decision: Decision) -> None:
        if len(decision.options) > 1:
            self.choices += 1
            self.extrapolated += any(cost.extrapolated for cost in decision.costs)
