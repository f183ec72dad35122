"""Exploration: the cheapest option where the cost model is certain, a random one where it is not.

A production log with random decisions supports off-policy estimates and training. A random decision has a cost: the
mean predicted cost of the options it may take, less that of the cheapest. This is the *predicted expected regret*. A
budget bounds its sum: a random decision that would exceed it is replaced by that of
:class:`~kvpolicy.policy.cheapest.Cheapest`. The budget bounds predicted regret only, not measured regret.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf

from kvpolicy.cost import CostModel
from kvpolicy.cost.online import Online, corrected_costs
from kvpolicy.events import Cost, Decision, Option, Preemption
from kvpolicy.policy.base import Feedback, LearningPolicy, PricedPolicy, certain_choice
from kvpolicy.policy.cheapest import lowest
from kvpolicy.policy.objective import ENGINE, Objective


@dataclass(frozen=True, slots=True)
class Budget:
    """Maximum predicted regret of all random decisions together, in the objective's seconds; infinite: no bound."""

    seconds: float = inf
    share: float = inf
    """Maximum as a share of the predicted cost of the cheapest options, over all decisions including the current."""

    @property
    def bounds(self) -> bool:
        return self.seconds < inf or self.share < inf

    def allows(self, spent_s: float, cheapest_s: float) -> bool:
        """Whether a regret of ``spent_s`` is within the budget, given the cheapest options' cost of all decisions."""
        return spent_s <= self.seconds and (self.share == inf or spent_s <= self.share * cheapest_s)


@dataclass(frozen=True, slots=True)
class ExploreState:
    """State of :class:`Explore`: number of random decisions so far, online corrections if any, regret spent."""

    decisions: int = 0
    online: Online | None = None
    spent_s: float | None = None
    """Predicted expected regret so far; None without a budget."""
    cheapest_s: float = 0.0
    """Predicted cost of the cheapest options of all decisions so far; counted with a budget only."""

    def to_json(self) -> str:
        text = json.dumps({"explored": self.decisions})
        if self.spent_s is not None:
            text = f'{text[:-1]}, "spent_s": {self.spent_s!r}, "cheapest_s": {self.cheapest_s!r}}}'
        return text if self.online is None else f'{text[:-1]}, "online": {self.online.to_json()}}}'


@dataclass(frozen=True)
class Explore(PricedPolicy[ExploreState]):
    """Equal probabilities for the first option and every option whose log ratio to it has an interval that contains 0;
    if there is no such option, the cheapest.

    The ratio is that of engine times, whatever the objective. Regret is measured by the objective.
    """

    name: str
    cost_model: CostModel = field()
    objective: Objective = ENGINE
    budget: Budget = Budget()

    def initial_state(self) -> ExploreState:
        return ExploreState(spent_s=0.0 if self.budget.bounds else None)

    def by_costs(
        self, situation: Preemption, options: Sequence[Option], costs: Sequence[Cost], state: ExploreState
    ) -> tuple[float, ...]:
        undecided = [i for i in range(1, len(costs)) if costs[i].log_ratio_low <= 0 <= costs[i].log_ratio_high]
        if undecided:
            share = 1.0 / (len(undecided) + 1)
            randomised = tuple(share if i == 0 or i in undecided else 0.0 for i in range(len(costs)))
            if not self.budget.bounds or self.budget.allows(*self._after(state, randomised, costs)):
                return randomised
        return certain_choice(lowest(costs, self.objective), len(options))

    def next_state(self, state: ExploreState, decision: Decision) -> ExploreState:
        if self.budget.bounds and decision.costs:
            spent_s, cheapest_s = self._after(state, decision.probabilities, decision.costs)
            state = replace(state, spent_s=spent_s, cheapest_s=cheapest_s)
        if max(decision.probabilities) < 1.0:
            return replace(state, decisions=state.decisions + 1)
        return state

    def _after(
        self, state: ExploreState, probabilities: Sequence[float], costs: Sequence[Cost]
    ) -> tuple[float, float]:  # fmt: skip
        """Regret spent, and cost of the cheapest options, including a decision with these probabilities."""
        regret_s, min_s = predicted_regret(probabilities, costs, self.objective)
        return (state.spent_s or 0.0) + regret_s, state.cheapest_s + min_s


@dataclass(frozen=True)
class ExploreOnline(Explore, LearningPolicy[ExploreState]):
    """:class:`Explore` with predictions that are corrected online by measured outcomes."""

    def initial_state(self) -> ExploreState:
        return self.resume(Online())

    def costs(self, situation: Preemption, options: Sequence[Option], state: ExploreState) -> tuple[Cost, ...]:
        return corrected_costs(
            super().costs(situation, options, state), options, situation.computed_tokens, self.learned(state)
        )

    def observe(self, state: ExploreState, feedback: Feedback) -> ExploreState:
        return replace(state, online=self.learned(state).updated(feedback.against(self.cost_model)))

    def learned(self, state: ExploreState) -> Online:
        return state.online or Online()

    def resume(self, learned: Online) -> ExploreState:
        """The state after a restart. The budget holds for one run of a server: nothing of it is spent yet."""
        return replace(super().initial_state(), online=learned)


def predicted_regret(
    probabilities: Sequence[float], costs: Sequence[Cost], objective: Objective = ENGINE
) -> tuple[float, float]:  # fmt: skip
    """Expected cost above that of the cheapest option, 0 or above, and the cheapest option's cost; seconds."""
    seconds = [objective.of(cost) for cost in costs]
    min_s = min(seconds)
    return sum(share * (option_s - min_s) for share, option_s in zip(probabilities, seconds, strict=True)), min_s
