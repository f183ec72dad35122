"""The cheapest option where the cost model is sure, a coin where it is not: so that a production log can teach."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvpolicy.cost import CostModel
from kvpolicy.cost.online import Online, corrected
from kvpolicy.events import Decision, Option, Preemption
from kvpolicy.policy.cheapest import lowest
from kvpolicy.policy.objective import ENGINE, Objective
from kvpolicy.policy.protocol import Assessment, Feedback, PolicyBase, PolicyState, all_on


@dataclass(frozen=True, slots=True)
class Explored:
    """How many decisions were left to chance so far, and what was learned online, where that is on."""

    decisions: int = 0
    online: Online | None = None

    def to_json(self) -> str:
        told = json.dumps({"explored": self.decisions})
        return told if self.online is None else f'{told[:-1]}, "online": {self.online.to_json()}}}'


@dataclass(frozen=True)
class Explore(PolicyBase):
    """Chance, in equal parts, among the first option and those the interval of whose log ratio to it contains 0.

    The ratio is that of engine times, whatever the objective that decides outside the band.
    """

    name: str
    cost_model: CostModel
    objective: Objective = ENGINE
    online: bool = False
    """Whether measured outcomes correct the model."""

    def initial_state(self) -> Explored:
        return Explored(online=Online() if self.online else None)

    def assess(self, situation: Preemption, options: Sequence[Option], state: PolicyState) -> Assessment:
        costs = self.cost_model.predict(situation, options)
        learned = self.learned(state)
        if learned is not None:
            costs = corrected(costs, options, situation.computed_tokens, learned)
        open_ones = [i for i in range(1, len(costs)) if costs[i].log_ratio_low <= 0 <= costs[i].log_ratio_high]
        if not open_ones:
            return all_on(lowest(costs, self.objective), len(options)), costs
        share = 1.0 / (len(open_ones) + 1)
        return tuple(share if i == 0 or i in open_ones else 0.0 for i in range(len(costs))), costs

    def next_state(self, state: PolicyState, decision: Decision) -> PolicyState:
        if isinstance(state, Explored) and max(decision.probabilities) < 1.0:
            return replace(state, decisions=state.decisions + 1)
        return state

    def observe(self, state: PolicyState, feedback: Feedback) -> PolicyState:
        if isinstance(state, Explored) and state.online is not None:
            return replace(state, online=state.online.updated(feedback.against(self.cost_model)))
        return state

    def learned(self, state: PolicyState) -> Online | None:
        return state.online if isinstance(state, Explored) else None

    def resume(self, learned: Online) -> Explored:
        return Explored(online=learned if self.online else None)
