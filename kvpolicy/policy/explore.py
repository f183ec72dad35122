"""The cheapest option where the cost model is sure, a coin where it is not: so that a production log can teach."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from kvpolicy.cost import CostModel
from kvpolicy.events import Decision, Option, Preemption
from kvpolicy.policy.cheapest import lowest
from kvpolicy.policy.protocol import Assessment, PolicyBase, PolicyState, all_on


@dataclass(frozen=True, slots=True)
class Explored:
    """How many decisions were left to chance so far."""

    decisions: int = 0

    def to_json(self) -> str:
        return json.dumps({"explored": self.decisions})


@dataclass(frozen=True)
class Explore(PolicyBase):
    """Chance, in equal parts, among the first option and those the interval of whose log ratio to it contains 0."""

    name: str
    cost_model: CostModel

    def initial_state(self) -> Explored:
        return Explored()

    def assess(self, situation: Preemption, options: Sequence[Option], state: PolicyState) -> Assessment:
        costs = self.cost_model.predict(situation, options)
        open_ones = [i for i in range(1, len(costs)) if costs[i].log_ratio_low <= 0 <= costs[i].log_ratio_high]
        if not open_ones:
            return all_on(lowest(costs), len(options)), costs
        share = 1.0 / (len(open_ones) + 1)
        return tuple(share if i == 0 or i in open_ones else 0.0 for i in range(len(costs))), costs

    def next_state(self, state: PolicyState, decision: Decision) -> PolicyState:
        if isinstance(state, Explored) and max(decision.probabilities) < 1.0:
            return Explored(state.decisions + 1)
        return state
