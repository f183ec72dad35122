"""The cheapest option where the cost model is sure, a coin where it is not: so that a production log can teach.

A coin has a price: by the model's own prediction, the mean of what it may choose less the cheapest. That is the
*predicted expected regret*. A budget bounds its sum, whatever comes; once the next coin would exceed it, the policy
decides as :class:`~kvpolicy.policy.cheapest.Cheapest` there. What the model does not predict, no budget bounds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf

from kvpolicy.cost import CostModel
from kvpolicy.cost.online import Online, corrected
from kvpolicy.events import Cost, Decision, Option, Preemption
from kvpolicy.policy.base import Feedback, LearningPolicy, PricedPolicy, all_on
from kvpolicy.policy.cheapest import lowest
from kvpolicy.policy.objective import ENGINE, Objective


@dataclass(frozen=True, slots=True)
class Budget:
    """What all coins together may cost, in the objective's seconds, as predicted; infinite where nothing bounds it."""

    seconds: float = inf
    share: float = inf
    """Of what all decisions would have cost at the cheapest, predicted, up to and with the present one."""

    @property
    def bounds(self) -> bool:
        return self.seconds < inf or self.share < inf

    def allows(self, spent_s: float, cheapest_s: float) -> bool:
        """Whether so much may have been spent once decisions worth ``cheapest_s`` were taken."""
        return spent_s <= self.seconds and (self.share == inf or spent_s <= self.share * cheapest_s)


@dataclass(frozen=True, slots=True)
class Explored:
    """How many decisions were left to chance so far, and what was learned online, where that is on."""

    decisions: int = 0
    online: Online | None = None
    spent_s: float | None = None
    """Predicted expected regret so far; None without a budget."""
    cheapest_s: float = 0.0
    """Of all decisions so far, the predicted cost of the cheapest option; counted with a budget only."""

    def to_json(self) -> str:
        told = json.dumps({"explored": self.decisions})
        if self.spent_s is not None:
            told = f'{told[:-1]}, "spent_s": {self.spent_s!r}, "cheapest_s": {self.cheapest_s!r}}}'
        return told if self.online is None else f'{told[:-1]}, "online": {self.online.to_json()}}}'


@dataclass(frozen=True)
class Explore(PricedPolicy[Explored]):
    """Chance, in equal parts, among the first option and those the interval of whose log ratio to it contains 0.

    The ratio is that of engine times, whatever the objective that decides outside the band. Regret is the objective's.
    """

    name: str
    cost_model: CostModel = field()
    objective: Objective = ENGINE
    budget: Budget = Budget()

    def initial_state(self) -> Explored:
        return Explored(spent_s=0.0 if self.budget.bounds else None)

    def by_costs(
        self, situation: Preemption, options: Sequence[Option], costs: Sequence[Cost], state: Explored
    ) -> tuple[float, ...]:
        open_ones = [i for i in range(1, len(costs)) if costs[i].log_ratio_low <= 0 <= costs[i].log_ratio_high]
        if open_ones:
            share = 1.0 / (len(open_ones) + 1)
            coin = tuple(share if i == 0 or i in open_ones else 0.0 for i in range(len(costs)))
            if not self.budget.bounds or self.budget.allows(*self._after(state, coin, costs)):
                return coin
        return all_on(lowest(costs, self.objective), len(options))

    def next_state(self, state: Explored, decision: Decision) -> Explored:
        if self.budget.bounds and decision.costs:
            spent_s, cheapest_s = self._after(state, decision.probabilities, decision.costs)
            state = replace(state, spent_s=spent_s, cheapest_s=cheapest_s)
        if max(decision.probabilities) < 1.0:
            return replace(state, decisions=state.decisions + 1)
        return state

    def _after(
        self, state: Explored, probabilities: Sequence[float], costs: Sequence[Cost]
    ) -> tuple[float, float]:  # fmt: skip
        """Regret spent, and cost at the cheapest, once a decision with these probabilities is taken."""
        regret_s, min_s = predicted_regret(probabilities, costs, self.objective)
        return (state.spent_s or 0.0) + regret_s, state.cheapest_s + min_s


@dataclass(frozen=True)
class ExploreOnline(Explore, LearningPolicy[Explored]):
    """The same by a cost model that measured outcomes correct."""

    def initial_state(self) -> Explored:
        return self.resume(Online())

    def costs(self, situation: Preemption, options: Sequence[Option], state: Explored) -> tuple[Cost, ...]:
        return corrected(
            super().costs(situation, options, state), options, situation.computed_tokens, self.learned(state)
        )

    def observe(self, state: Explored, feedback: Feedback) -> Explored:
        return replace(state, online=self.learned(state).updated(feedback.against(self.cost_model)))

    def learned(self, state: Explored) -> Online:
        return state.online or Online()

    def resume(self, learned: Online) -> Explored:
        """The budget is that of one life of a server: it is whole again after a restart."""
        return replace(super().initial_state(), online=learned)


def predicted_regret(
    probabilities: Sequence[float], costs: Sequence[Cost], objective: Objective = ENGINE
) -> tuple[float, float]:  # fmt: skip
    """Expected cost beyond that of the cheapest option, never below 0, and the cheapest option's cost; seconds."""
    seconds = [objective.of(cost) for cost in costs]
    min_s = min(seconds)
    return sum(share * (one - min_s) for share, one in zip(probabilities, seconds, strict=True)), min_s
