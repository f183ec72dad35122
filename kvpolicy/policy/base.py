"""The base classes of policies, and the feedback that learning policies receive.

A user's policy extends :class:`Policy` and implements one method::

    class LongerSwaps(Policy):
        name = "longer-swaps"

        def probabilities(self, situation, options, state):
            longer = situation.computed_tokens > situation.batch_tokens / max(1, situation.running_requests)
            return [float((option.kind == "swap") == (longer and len(options) > 1)) for option in options]

Policies that decide by predicted costs extend :class:`PricedPolicy`, those that learn while they serve
:class:`LearningPolicy`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol

from kvpolicy.code_digest import digest_of, label_of
from kvpolicy.cost import CostModel
from kvpolicy.cost.online import MeasuredCost, Online
from kvpolicy.errors import KVPolicyError
from kvpolicy.events import Cost, Decision, Option, Preemption

Assessment = tuple[tuple[float, ...], tuple[Cost, ...]]
"""Probabilities, one per option, and the costs they are based on: one per option, or empty for a policy without."""


class PolicyError(KVPolicyError):
    """A policy or its cost model gave something other than it should; the message names it."""


class PolicyState(Protocol):
    """State of a policy: frozen, and recorded with every decision."""

    def to_json(self) -> str: ...


@dataclass(frozen=True, slots=True)
class NoState:
    """State of a policy without memory."""

    def to_json(self) -> str:
        return "{}"


if TYPE_CHECKING:
    from typing_extensions import TypeVar

    # The default allows Policy without a parameter; Python's own TypeVar has defaults from 3.13 on.
    S = TypeVar("S", bound=PolicyState, default=Any)
else:
    from typing import TypeVar

    S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Feedback:
    """The measured outcome of a decision, for policies that learn."""

    situation: Preemption
    """The situation at the time of the decision."""
    option: Option
    """The executed option: the chosen one, or the recompute in its place."""
    engine_s: float | None
    """Measured engine time; None if it could not be attributed completely."""
    victim_delay_s: float | None

    def against(self, model: CostModel) -> MeasuredCost:
        """The measured times together with the model's prediction."""
        (predicted,) = model.predict(self.situation, (self.option,))
        kind = self.option.kind
        seconds = self.engine_s, self.victim_delay_s
        return MeasuredCost(kind, self.situation.computed_tokens, predicted, *seconds, model.floor_s[kind])


class Policy(ABC, Generic[S]):
    """Decides what is done with a victim. All methods are pure functions of their arguments.

    ``S``: type of the policy's state, a frozen value that is recorded with every decision. A policy without memory
    need not override the methods for the state.
    """

    name: str
    """Name in reports and traces; policies that decide differently must have different names."""
    cost_model: CostModel | None = None
    """Source of the predicted costs; checked against the engine before the first decision."""

    @abstractmethod
    def probabilities(self, situation: Preemption, options: Sequence[Option], state: S) -> Sequence[float]:
        """Return the probability of each option, in their order: 0 or above, summing to 1.

        ``options``: the feasible ones, recompute first; often recompute alone.
        """

    def assess(self, situation: Preemption, options: Sequence[Option], state: S) -> Assessment:
        """Return the probabilities, and the costs they are based on, if any. Raises PolicyError for no numbers."""
        probabilities: object = self.probabilities(situation, options, state)
        try:
            return tuple(map(float, probabilities)), ()  # type: ignore[call-overload]  # whatever a user's class gives
        except (TypeError, ValueError) as error:
            raise PolicyError(
                f"policy {self.name}: probabilities are {probabilities!r}, should be a number for each of the "
                f"{len(options)} options"
            ) from error

    @property
    def digest(self) -> str:
        """SHA-256 of the policy's values and code. It distinguishes policies of the same name, and versions of one
        policy. See :mod:`kvpolicy.code_digest` for its limits."""
        return digest_of(self)

    @property
    def label(self) -> str:
        """Name in reports and traces; for a class from outside this package followed by the start of its digest."""
        return label_of(self)

    def loads(self, situation: Preemption, options: Sequence[Option], state: S) -> bool:
        """Whether a swapped request that is about to come back loads what it lacks, or computes it again.

        ``situation``: as of now: ``hit_blocks`` are known, and nothing is left to save. Pure, as an engine may ask in
        every step. Unless overridden, what was decided at the preemption stands.
        """
        return True

    def initial_state(self) -> S:
        return NoState()  # type: ignore[return-value]  # right unless S is given; a class that gives S overrides this

    def next_state(self, state: S, decision: Decision) -> S:
        """Return the state after ``decision``."""
        return state


class PricedPolicy(Policy[S]):
    """Decides by the predicted cost of each option; the costs are recorded with the decision."""

    @abstractmethod
    def by_costs(
        self, situation: Preemption, options: Sequence[Option], costs: Sequence[Cost], state: S
    ) -> tuple[float, ...]:
        """Return the probability of each option. ``costs``: one per option."""

    def costs(self, situation: Preemption, options: Sequence[Option], state: S) -> tuple[Cost, ...]:
        """Return the costs that the policy's cost model predicts, one per option. Raises PolicyError without a
        cost model, and for another number of costs."""
        if self.cost_model is None:
            raise PolicyError(f"policy {self.name}: has no cost model: set cost_model, or write costs")
        costs = self.cost_model.predict(situation, options)
        if not isinstance(costs, Sequence):
            raise self._no_costs(costs, options)
        for cost in costs:
            if not isinstance(cost, Cost):
                raise self._no_costs(costs, options)
        if len(costs) != len(options):
            raise PolicyError(
                f"policy {self.name}: cost model {self.cost_model.name} predicts {len(costs)} costs for {len(options)} "
                "options, should predict one each"
            )
        return costs

    def _no_costs(self, predicted: object, options: Sequence[Option]) -> PolicyError:
        name = "none" if self.cost_model is None else self.cost_model.name
        return PolicyError(
            f"policy {self.name}: cost model {name} predicts {predicted!r}, should predict a Cost for each of the "
            f"{len(options)} options"
        )

    def assess(self, situation: Preemption, options: Sequence[Option], state: S) -> Assessment:
        costs = self.costs(situation, options, state)
        return self.by_costs(situation, options, costs, state), costs

    def probabilities(self, situation: Preemption, options: Sequence[Option], state: S) -> tuple[float, ...]:
        return self.assess(situation, options, state)[0]

    def loads(self, situation: Preemption, options: Sequence[Option], state: S) -> bool:
        """See :meth:`Policy.loads`. By the costs as of now: where they make the policy certain of a recompute, the rest
        is computed again; where it would draw, the draw at the preemption stands."""
        return self.probabilities(situation, options, state)[0] < 1.0


class LearningPolicy(Policy[S]):
    """Receives the measured outcomes of its decisions while it serves."""

    @abstractmethod
    def observe(self, state: S, feedback: Feedback) -> S:
        """Return the state after the outcome of a preemption."""

    def learned(self, state: S) -> Online | None:
        """Return the part of the state to save for a restart; None for nothing."""
        return None

    def resume(self, learned: Online) -> S:
        """Return the initial state after a restart, from what was saved."""
        return self.initial_state()


CERTAINTIES = {(i, count): tuple(float(i == j) for j in range(count)) for count in (1, 2) for i in range(count)}


def certain_choice(chosen: int, count: int) -> tuple[float, ...]:
    """Probability 1 for option ``chosen`` of ``count``."""
    certain = CERTAINTIES.get((chosen, count))
    return tuple(float(i == chosen) for i in range(count)) if certain is None else certain


def first_option_of(kind: str, options: Sequence[Option]) -> int | None:
    """Index of the first option of kind ``kind``; None if there is none."""
    return next((i for i, option in enumerate(options) if option.kind == kind), None)
