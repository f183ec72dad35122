"""Orders whose code fails in one of its methods, as a user's does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvpolicy import Order, Progress, Rank, View
from kvpolicy.order.rules import Mlfq, Srpt

FAILS = "# here"
"""Comment on the line that fails."""
METHODS = ("rank", "displaces", "victims", "worth", "admits", "hold", "initial_state", "finished", "holds")


class Unpicklable(Exception):
    """An error that no worker process can hand on."""

    def __init__(self, first: object, second: object) -> None:
        super().__init__("made up")


@dataclass(frozen=True, repr=False)
class Failing(Order):
    """Chats and what is urgent first; fails in ``method``."""

    method: str = "rank"
    name: str = "failing"
    displaces_by_rank = True

    def _fail(self, method: str) -> None:
        if method == self.method:
            raise Unpicklable(self, 0)  # here

    @property
    def holds(self) -> bool:
        self._fail("holds")
        return True

    def rank(self, request: Progress, view: View) -> Rank:
        self._fail("rank")
        return Rank((0 if request.class_name in ("chat", "urgent") else 1,))

    def displaces(self, waiting: Progress, running: Progress, view: View) -> bool:
        self._fail("displaces")
        return True

    def victims(self, waiting: Progress, running: Sequence[Progress], view: View) -> Sequence[Progress]:
        self._fail("victims")
        return list(running)

    def worth(self, waiting: Progress, victims: Sequence[Progress], view: View) -> bool:
        self._fail("worth")
        return True

    def admits(self, waiting: Progress, free_after_blocks: int, view: View) -> bool:
        self._fail("admits")
        return True

    def hold(self, running: Sequence[Progress], view: View) -> Sequence[Progress]:
        self._fail("hold")
        return ()

    def initial_state(self) -> Any:
        self._fail("initial_state")

    def finished(self, state: Any, request: Progress) -> Any:
        self._fail("finished")
        return state


class Unfit(Mlfq):
    """Its rank takes what somebody might have written."""

    def rank(self, request: Progress) -> Rank:  # type: ignore[override]
        return Rank((request.priority,))


def unfit() -> Order:
    return Unfit("unfit")


def no_prediction(request: Progress, state: object) -> float:
    return 1000 / (request.priority - request.priority)  # here


def predicted() -> Order:
    """An order that ships, by a user's predictor."""
    return Srpt("predicted", no_prediction)
