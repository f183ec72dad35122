"""A policy that learns, one of whose methods fails as a user's code does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpolicy import Cost, CostModel, LearningPolicy, Option, Policy, Preemption
from kvpolicy.policy import Feedback, NoState
from kvpolicy.policy.cheapest import Cheapest

FAILS = "# here"
"""Comment on the line that fails."""


class Unpicklable(Exception):
    """An error that no worker process can hand on."""

    def __init__(self, first: object, second: object) -> None:
        super().__init__("made up")


class Recorded(NoState):
    def to_json(self) -> str:
        return str(self.count)  # type: ignore[attr-defined]  # here


@dataclass(frozen=True)
class Failing(LearningPolicy[Any]):
    """Fails in ``method``."""

    method: str = "probabilities"
    name: str = "failing"

    def probabilities(self, situation: Preemption, options: Sequence[Option], state: Any) -> list[float]:
        if self.method == "probabilities":
            return [float(situation.max_tokens)]  # type: ignore[attr-defined]  # here
        return [0.5, 0.5] if len(options) > 1 else [1.0]

    def initial_state(self) -> Any:
        if self.method == "initial_state":
            return Path("/no such file").read_text()  # here
        return Recorded() if self.method == "to_json" else NoState()

    def next_state(self, state: Any, decision: object) -> Any:
        return len(state) if self.method == "next_state" else state  # here

    def loads(self, situation: Preemption, options: Sequence[Option], state: Any) -> bool:
        return bool({}["loads"] if self.method == "loads" else True)  # here

    def observe(self, state: Any, feedback: Feedback) -> Any:
        if self.method == "observe":
            _fail(feedback)
        return state


def _fail(feedback: object) -> None:
    raise Unpicklable(lambda: feedback, 0)  # here


class Unfit(Failing):
    def observe(self, state: Any) -> Any:  # type: ignore[override]  # what somebody might write
        return state


class Unpriced(CostModel):
    name = "unpriced"

    def predict(self, situation: Preemption, options: Sequence[Option]) -> tuple[Cost, ...]:
        return 1 // 0  # type: ignore[return-value]  # here


def by_no_price() -> Policy:
    """A policy that ships, by a user's own cost model."""
    return Cheapest("by-no-price", Unpriced())


def unfit() -> Policy:
    return Unfit("none", "unfit")
