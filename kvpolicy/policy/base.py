"""What a policy is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvpolicy.cost import CostModel
from kvpolicy.cost.online import Measured, Online
from kvpolicy.events import Cost, Decision, Option, Preemption

Assessment = tuple[tuple[float, ...], tuple[Cost, ...]]
"""Probabilities, one per option, and the costs they are based on: one per option, or none where there are none."""


class PolicyState(Protocol):
    """Frozen; recorded with every decision."""

    def to_json(self) -> str: ...


@dataclass(frozen=True, slots=True)
class NoState:
    """Of a policy that remembers nothing."""

    def to_json(self) -> str:
        return "{}"


@dataclass(frozen=True, slots=True)
class Feedback:
    """What became of a decision, as far as a policy can learn from it."""

    situation: Preemption
    """As it was decided on."""
    option: Option
    """As executed: what was chosen, or the recompute in its place."""
    engine_s: float | None
    """Measured; None where it could not be attributed in full."""
    victim_delay_s: float | None

    def against(self, model: CostModel) -> Measured:
        """Beside what the model predicts for it."""
        (predicted,) = model.predict(self.situation, (self.option,))
        kind = self.option.kind
        seconds = self.engine_s, self.victim_delay_s
        return Measured(kind, self.situation.computed_tokens, predicted, *seconds, model.floor_s[kind])


class Policy(Protocol):
    """Pure in its arguments. ``options`` are feasible ones only, recompute first."""

    @property
    def name(self) -> str: ...

    @property
    def cost_model(self) -> CostModel | None: ...

    def initial_state(self) -> PolicyState: ...

    def assess(self, situation: Preemption, options: Sequence[Option], state: PolicyState) -> Assessment:
        """Probabilities that sum to 1, and the costs behind them."""
        ...

    def probabilities(
        self, situation: Preemption, options: Sequence[Option], state: PolicyState
    ) -> tuple[float, ...]: ...

    def next_state(self, state: PolicyState, decision: Decision) -> PolicyState:
        """The state after ``decision``."""
        ...

    def observe(self, state: PolicyState, feedback: Feedback) -> PolicyState:
        """The state after what became of a preemption is known."""
        ...

    def learned(self, state: PolicyState) -> Online | None:
        """What of the state is worth keeping over a restart."""
        ...

    def resume(self, learned: Online) -> PolicyState:
        """The state to begin with where that was kept."""
        ...


class PolicyBase(ABC):
    """What policies share; by itself one without memory and without a cost model."""

    cost_model: CostModel | None = None

    def initial_state(self) -> PolicyState:
        return NoState()

    @abstractmethod
    def assess(self, situation: Preemption, options: Sequence[Option], state: PolicyState) -> Assessment:
        """See :class:`Policy`."""

    def probabilities(self, situation: Preemption, options: Sequence[Option], state: PolicyState) -> tuple[float, ...]:
        return self.assess(situation, options, state)[0]

    def next_state(self, state: PolicyState, decision: Decision) -> PolicyState:
        return state

    def observe(self, state: PolicyState, feedback: Feedback) -> PolicyState:
        return state

    def learned(self, state: PolicyState) -> Online | None:
        return None

    def resume(self, learned: Online) -> PolicyState:
        return self.initial_state()


CERTAIN = {(i, count): tuple(float(i == j) for j in range(count)) for count in (1, 2) for i in range(count)}


def all_on(chosen: int, count: int) -> tuple[float, ...]:
    """Certainty for option ``chosen`` of ``count``."""
    known = CERTAIN.get((chosen, count))
    return tuple(float(i == chosen) for i in range(count)) if known is None else known


def first_of(kind: str, options: Sequence[Option]) -> int | None:
    """Index of the first option of that kind, if there is one."""
    return next((i for i, option in enumerate(options) if option.kind == kind), None)
