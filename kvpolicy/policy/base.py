"""What a policy is, and what it is told of its decisions.

A policy of one's own extends :class:`Policy` and writes one method::

    class LongerSwaps(Policy):
        name = "longer-swaps"

        def probabilities(self, situation, options, state):
            longer = situation.computed_tokens > situation.batch_tokens / max(1, situation.running_requests)
            return [float((option.kind == "swap") == (longer and len(options) > 1)) for option in options]

Policies that go by predicted costs extend :class:`PricedPolicy`, those that learn while they serve
:class:`LearningPolicy`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol

from kvpolicy.code_digest import digest_of, label_of
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


if TYPE_CHECKING:
    from typing_extensions import TypeVar

    # The default lets people write Policy alone; Python itself knows defaults from 3.13 on.
    S = TypeVar("S", bound=PolicyState, default=Any)
else:
    from typing import TypeVar

    S = TypeVar("S")


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


class Policy(ABC, Generic[S]):
    """Decides what is done with a victim. All methods are pure in their arguments.

    ``S`` is its state, a frozen value that is recorded with every decision; a policy that remembers nothing has none
    to speak of and leaves the methods about it alone.
    """

    name: str
    """In reports and traces; different for policies that decide differently."""
    cost_model: CostModel | None = None
    """What its costs come from; checked against the engine before anything is decided."""

    @abstractmethod
    def probabilities(self, situation: Preemption, options: Sequence[Option], state: S) -> Sequence[float]:
        """The probability of each option, in their order: 0 or above, summing to 1.

        ``options``: feasible ones only, recompute first; often that one alone.
        """

    def assess(self, situation: Preemption, options: Sequence[Option], state: S) -> Assessment:
        """The probabilities, and the costs behind them where there are any."""
        return tuple(map(float, self.probabilities(situation, options, state))), ()

    @property
    def digest(self) -> str:
        """SHA-256 of its values and its code: two policies of one name are told apart by it, and a changed one from
        what it was. See :mod:`kvpolicy.code_digest` for what it cannot know."""
        return digest_of(self)

    @property
    def label(self) -> str:
        """In reports and traces: the name, and for a class from outside this package the digest's beginning."""
        return label_of(self)

    def initial_state(self) -> S:
        return NoState()  # type: ignore[return-value]  # right where S is left open; who chooses S writes this method

    def next_state(self, state: S, decision: Decision) -> S:
        """The state after ``decision``."""
        return state


class PricedPolicy(Policy[S]):
    """Decides by what each option is predicted to cost; the costs are recorded with the decision."""

    @abstractmethod
    def by_costs(
        self, situation: Preemption, options: Sequence[Option], costs: Sequence[Cost], state: S
    ) -> tuple[float, ...]:
        """The probability of each option. ``costs``: one per option."""

    def costs(self, situation: Preemption, options: Sequence[Option], state: S) -> tuple[Cost, ...]:
        """What its cost model predicts."""
        assert self.cost_model is not None
        return self.cost_model.predict(situation, options)

    def assess(self, situation: Preemption, options: Sequence[Option], state: S) -> Assessment:
        costs = self.costs(situation, options, state)
        return self.by_costs(situation, options, costs, state), costs

    def probabilities(self, situation: Preemption, options: Sequence[Option], state: S) -> tuple[float, ...]:
        return self.assess(situation, options, state)[0]


class LearningPolicy(Policy[S]):
    """Is told what became of its decisions while it serves."""

    @abstractmethod
    def observe(self, state: S, feedback: Feedback) -> S:
        """The state after what became of a preemption is known."""

    def learned(self, state: S) -> Online | None:
        """What of the state is worth keeping over a restart; None for nothing."""
        return None

    def resume(self, learned: Online) -> S:
        """The state to begin with where that was kept."""
        return self.initial_state()


CERTAIN = {(i, count): tuple(float(i == j) for j in range(count)) for count in (1, 2) for i in range(count)}


def all_on(chosen: int, count: int) -> tuple[float, ...]:
    """Certainty for option ``chosen`` of ``count``."""
    known = CERTAIN.get((chosen, count))
    return tuple(float(i == chosen) for i in range(count)) if known is None else known


def first_of(kind: str, options: Sequence[Option]) -> int | None:
    """Index of the first option of that kind, if there is one."""
    return next((i for i, option in enumerate(options) if option.kind == kind), None)
