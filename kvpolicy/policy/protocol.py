"""What a policy is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvpolicy.cost import CostModel
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


def all_on(chosen: int, count: int) -> tuple[float, ...]:
    """Certainty for option ``chosen`` of ``count``."""
    return tuple(float(i == chosen) for i in range(count))


def first_of(kind: str, options: Sequence[Option]) -> int | None:
    """Index of the first option of that kind, if there is one."""
    return next((i for i, option in enumerate(options) if option.kind == kind), None)
