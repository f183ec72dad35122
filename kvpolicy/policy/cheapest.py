"""Policies: fixed option, random, threshold, and lowest predicted cost.

The cost is an objective over predicted times, or the waste of memory as defined by InferCept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvpolicy.cost import CostModel
from kvpolicy.cost.online import Online, corrected_costs
from kvpolicy.events import Cost, Kind, Option, Preemption
from kvpolicy.policy.base import (
    Feedback,
    LearningPolicy,
    NoState,
    Policy,
    PricedPolicy,
    S,
    certain_choice,
    first_option_of,
)
from kvpolicy.policy.objective import ENGINE, Objective


@dataclass(frozen=True)
class Threshold(Policy[NoState]):
    """Swap if it is feasible and the victim has at least ``tokens`` computed tokens; else recompute."""

    name: str
    tokens: int

    def probabilities(self, situation: Preemption, options: Sequence[Option], state: NoState) -> tuple[float, ...]:
        swap = first_option_of("swap", options) if situation.computed_tokens >= self.tokens else None
        return certain_choice(swap or 0, len(options))


@dataclass(frozen=True)
class Always(Policy[NoState]):
    """Option ``kind`` if it is feasible, else recompute."""

    name: str
    kind: Kind

    def probabilities(self, situation: Preemption, options: Sequence[Option], state: NoState) -> tuple[float, ...]:
        return certain_choice(first_option_of(self.kind, options) or 0, len(options))


@dataclass(frozen=True)
class Coin(Policy[NoState]):
    """Swap with probability ``p_swap`` if it is feasible, else recompute."""

    name: str
    p_swap: float

    def probabilities(self, situation: Preemption, options: Sequence[Option], state: NoState) -> tuple[float, ...]:
        swap = first_option_of("swap", options)
        if swap is None:
            return certain_choice(0, len(options))
        shares = [0.0] * len(options)
        shares[0] = 1.0 - self.p_swap
        shares[swap] += self.p_swap
        return tuple(shares)


@dataclass(frozen=True)
class Cheapest(PricedPolicy[S]):
    """The option with the lowest predicted cost; in a tie the first: recompute."""

    name: str
    cost_model: CostModel = field()
    objective: Objective = ENGINE

    def by_costs(
        self, situation: Preemption, options: Sequence[Option], costs: Sequence[Cost], state: S
    ) -> tuple[float, ...]:
        return certain_choice(lowest(costs, self.objective), len(options))


@dataclass(frozen=True)
class CheapestOnline(Cheapest[Online], LearningPolicy[Online]):
    """:class:`Cheapest` with predictions that are corrected online by measured outcomes."""

    def initial_state(self) -> Online:
        return Online()

    def costs(self, situation: Preemption, options: Sequence[Option], state: Online) -> tuple[Cost, ...]:
        return corrected_costs(super().costs(situation, options, state), options, situation.computed_tokens, state)

    def observe(self, state: Online, feedback: Feedback) -> Online:
        return state.updated(feedback.against(self.cost_model))

    def learned(self, state: Online) -> Online:
        return state

    def resume(self, learned: Online) -> Online:
        return learned


def lowest(costs: Sequence[Cost], objective: Objective = ENGINE) -> int:
    """Index of the lowest predicted cost; the first of equal ones."""
    if objective is ENGINE and len(costs) == 2:
        return 1 if costs[1].engine_s < costs[0].engine_s else 0
    return min(range(len(costs)), key=lambda i: objective.of(costs[i]))


MEAN_MEMORY_SHARE = 0.5
"""Mean share of the victim's memory that is held while chunks fill it evenly."""


@dataclass(frozen=True)
class MinWaste(PricedPolicy[NoState]):
    """InferCept's minimum-waste rule: the option that leaves less device memory idle, in token-seconds.

    Abhyankar et al., "InferCept: Efficient Intercept Support for Augmented Large Language Model Inference", ICML 2024,
    PMLR 235:81-95. There a request pauses for a tool call; here it is preempted, so its memory cannot be kept. Waste is
    idle memory times duration. With C the victim's context and C_other that of the other running requests:

        discard, recomputed in chunks:  T_forward(C) * C / 2 + T_forward(C) * C_other
        swap, out and back:             2 * T_copy(C) * (C + C_other)

    A recompute fills its memory chunk by chunk, half of it on average, and delays the other requests for its whole
    duration. A copy in either direction is assumed to stop the whole batch. Bytes per token are a common factor and
    omitted. InferCept also hides copies within a budget of bytes per iteration and counts these as free; that is not
    implemented here. Both times come from a cost model. In a tie the first option is taken: recompute.
    """

    name: str
    cost_model: CostModel = field()

    def by_costs(
        self, situation: Preemption, options: Sequence[Option], costs: Sequence[Cost], state: NoState
    ) -> tuple[float, ...]:
        wastes = [self._waste(situation, *pair) for pair in zip(options, costs, strict=True)]
        return certain_choice(min(range(len(wastes)), key=wastes.__getitem__), len(options))

    def _waste(self, situation: Preemption, option: Option, cost: Cost) -> float:
        own, other = situation.computed_tokens, situation.batch_tokens
        if option.kind == "recompute":
            return discard_waste(cost.recompute_s, own, other)
        return swap_waste(self.cost_model.copies_s(situation, option, cost), own, other)


def discard_waste(forward_s: float, own_tokens: int, other_tokens: int) -> float:
    """Token-seconds of a recompute that takes the engine ``forward_s``."""
    return forward_s * (MEAN_MEMORY_SHARE * own_tokens + other_tokens)


def swap_waste(both_copies_s: float, own_tokens: int, other_tokens: int) -> float:
    """Token-seconds of a swap whose copies, out and back, take ``both_copies_s`` together."""
    return both_copies_s * (own_tokens + other_tokens)
