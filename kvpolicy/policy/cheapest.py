"""Policies: fixed options, a coin, a threshold, the least predicted cost.

What is minimised is an objective over predicted costs, or InferCept's waste of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvpolicy.cost import CostModel
from kvpolicy.cost.online import Online, corrected
from kvpolicy.events import Cost, Kind, Option, Preemption
from kvpolicy.policy.base import Feedback, LearningPolicy, NoState, Policy, PricedPolicy, S, all_on, first_of
from kvpolicy.policy.objective import ENGINE, Objective


@dataclass(frozen=True)
class Threshold(Policy[NoState]):
    """Swap iff the victim has at least that many computed tokens, and swap is feasible."""

    name: str
    tokens: int

    def probabilities(self, situation: Preemption, options: Sequence[Option], state: NoState) -> tuple[float, ...]:
        swap = first_of("swap", options) if situation.computed_tokens >= self.tokens else None
        return all_on(swap or 0, len(options))


@dataclass(frozen=True)
class Always(Policy[NoState]):
    """One kind wherever it is feasible, recompute elsewhere."""

    name: str
    kind: Kind

    def probabilities(self, situation: Preemption, options: Sequence[Option], state: NoState) -> tuple[float, ...]:
        return all_on(first_of(self.kind, options) or 0, len(options))


@dataclass(frozen=True)
class Coin(Policy[NoState]):
    """Swap with a fixed probability wherever it is feasible."""

    name: str
    p_swap: float

    def probabilities(self, situation: Preemption, options: Sequence[Option], state: NoState) -> tuple[float, ...]:
        swap = first_of("swap", options)
        if swap is None:
            return all_on(0, len(options))
        shares = [0.0] * len(options)
        shares[0] = 1.0 - self.p_swap
        shares[swap] += self.p_swap
        return tuple(shares)


@dataclass(frozen=True)
class Cheapest(PricedPolicy[S]):
    """Ties go to the first option: recompute."""

    name: str
    cost_model: CostModel = field()
    objective: Objective = ENGINE

    def by_costs(
        self, situation: Preemption, options: Sequence[Option], costs: Sequence[Cost], state: S
    ) -> tuple[float, ...]:
        return all_on(lowest(costs, self.objective), len(options))


@dataclass(frozen=True)
class CheapestOnline(Cheapest[Online], LearningPolicy[Online]):
    """The same by a cost model that measured outcomes correct."""

    def initial_state(self) -> Online:
        return Online()

    def costs(self, situation: Preemption, options: Sequence[Option], state: Online) -> tuple[Cost, ...]:
        return corrected(super().costs(situation, options, state), options, situation.computed_tokens, state)

    def observe(self, state: Online, feedback: Feedback) -> Online:
        return state.updated(feedback.against(self.cost_model))

    def learned(self, state: Online) -> Online:
        return state

    def resume(self, learned: Online) -> Online:
        return learned


def lowest(costs: Sequence[Cost], objective: Objective = ENGINE) -> int:
    """Index of the lowest predicted cost, the first of equals."""
    if objective is ENGINE and len(costs) == 2:
        return 1 if costs[1].engine_s < costs[0].engine_s else 0
    return min(range(len(costs)), key=lambda i: objective.of(costs[i]))


OWN_SHARE = 0.5
"""Of the victim's memory, held on the mean while chunks fill it evenly."""


@dataclass(frozen=True)
class MinWaste(PricedPolicy[NoState]):
    """InferCept's minimum-waste rule: the option that leaves less device memory idle, in token-seconds.

    Abhyankar et al., "InferCept: Efficient Intercept Support for Augmented Large Language Model Inference", ICML 2024,
    PMLR 235:81-95. There a request pauses for a tool; here it is preempted, so keeping its memory is no option. Waste
    is memory that does no work times how long. With C the victim's context and C_other that of the requests beside it:

        discard, recomputed in chunks:  T_forward(C) * C / 2 + T_forward(C) * C_other
        swap, out and back:             2 * T_copy(C) * (C + C_other)

    A recompute fills its memory chunk by chunk, half of it on the mean, and delays the others by the time it takes; a
    copy in either direction is taken to stop the whole batch. Bytes per token are a factor of both sides and left out.
    Not taken over: InferCept hides copies within a budget of bytes per iteration and counts those as free. Both times
    come from a cost model. Ties go to the first option: recompute.
    """

    name: str
    cost_model: CostModel = field()

    def by_costs(
        self, situation: Preemption, options: Sequence[Option], costs: Sequence[Cost], state: NoState
    ) -> tuple[float, ...]:
        wastes = [self._waste(situation, *pair) for pair in zip(options, costs, strict=True)]
        return all_on(min(range(len(wastes)), key=wastes.__getitem__), len(options))

    def _waste(self, situation: Preemption, option: Option, cost: Cost) -> float:
        own, other = situation.computed_tokens, situation.batch_tokens
        if option.kind == "recompute":
            return discard_waste(cost.recompute_s, own, other)
        return swap_waste(self.cost_model.copies_s(situation, option, cost), own, other)


def discard_waste(forward_s: float, own_tokens: int, other_tokens: int) -> float:
    """Token-seconds of a recompute that takes the engine ``forward_s``."""
    return forward_s * (OWN_SHARE * own_tokens + other_tokens)


def swap_waste(both_copies_s: float, own_tokens: int, other_tokens: int) -> float:
    """Token-seconds of copies that take ``both_copies_s``, out and back together."""
    return both_copies_s * (own_tokens + other_tokens)
