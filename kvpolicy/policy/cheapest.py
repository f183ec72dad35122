"""The option a cost model predicts to be the cheapest, by whatever is to be minimised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvpolicy.cost.model import CostModel
from kvpolicy.cost.online import Online, corrected
from kvpolicy.events import Cost, Option, Preemption
from kvpolicy.policy.base import Assessment, Feedback, NoState, PolicyBase, PolicyState, all_on
from kvpolicy.policy.objective import ENGINE, Objective


@dataclass(frozen=True)
class Cheapest(PolicyBase):
    """Ties go to the first option: recompute."""

    name: str
    cost_model: CostModel
    objective: Objective = ENGINE
    online: bool = False
    """Whether measured outcomes correct the model."""

    def initial_state(self) -> PolicyState:
        return Online() if self.online else NoState()

    def assess(self, situation: Preemption, options: Sequence[Option], state: PolicyState) -> Assessment:
        costs = self.cost_model.predict(situation, options)
        if isinstance(state, Online):
            costs = corrected(costs, options, situation.computed_tokens, state)
        return all_on(lowest(costs, self.objective), len(options)), costs

    def observe(self, state: PolicyState, feedback: Feedback) -> PolicyState:
        return state.updated(feedback.against(self.cost_model)) if isinstance(state, Online) else state

    def learned(self, state: PolicyState) -> Online | None:
        return state if isinstance(state, Online) else None

    def resume(self, learned: Online) -> PolicyState:
        return learned if self.online else NoState()


def lowest(costs: Sequence[Cost], objective: Objective = ENGINE) -> int:
    """Index of the lowest predicted cost, the first of equals."""
    if objective is ENGINE and len(costs) == 2:
        return 1 if costs[1].engine_s < costs[0].engine_s else 0
    return min(range(len(costs)), key=lambda i: objective.of(costs[i]))
