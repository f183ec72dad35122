"""An order in a server: whatever its code does, requests are served."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, isnan
from typing import Any

from kvpolicy.order.base import Order, Progress, Rank, View

LAST = (inf,)
"""Rank of a request that never got one: nobody is displaced for it."""


class Guarded(Order):
    """Another order, whose errors are passed to ``complain``, called while the exception is handled, and answered as
    stock vLLM would: the request keeps its rank, nobody is displaced, and whoever fits is admitted."""

    def __init__(self, order: Order, complain: Callable[[str], None]) -> None:
        self.name = order.name
        self.displaces_by_rank = bool(order.displaces_by_rank)
        self.quantum_tokens = int(order.quantum_tokens)
        self.promote_s = float(order.promote_s)
        self.max_victims = int(order.max_victims)
        self.base = order
        self._complain = complain

    @property
    def label(self) -> str:
        return self.base.label

    def rank(self, request: Progress, view: View) -> Rank:
        try:
            value, until_tokens, until_s = self.base.rank(request, view)
            rank = Rank(tuple(map(float, value)), float(until_tokens), float(until_s))
            if any(map(isnan, (*rank.value, rank.until_tokens, rank.until_s))):
                raise TypeError(f"{rank} contains NaN, which has no order")
            return rank
        except Exception:  # noqa: BLE001
            self._complain("rank")
            return Rank(request.rank or LAST)

    def displaces(self, waiting: Progress, running: Progress, view: View) -> bool:
        try:
            return bool(self.base.displaces(waiting, running, view))
        except Exception:  # noqa: BLE001
            self._complain("displaces")
            return False

    def victims(self, waiting: Progress, running: Sequence[Progress], view: View) -> Sequence[Progress]:
        try:
            chosen = self.base.victims(waiting, running, view)
            by_number = {other.number: other for other in running}
            return list({victim.number: by_number[victim.number] for victim in chosen}.values())
        except Exception:  # noqa: BLE001
            self._complain("victims")
            return ()

    def worth(self, waiting: Progress, victims: Sequence[Progress], view: View) -> bool:
        try:
            return bool(self.base.worth(waiting, victims, view))
        except Exception:  # noqa: BLE001
            self._complain("worth")
            return False

    def admits(self, waiting: Progress, free_after_blocks: int, view: View) -> bool:
        try:
            return bool(self.base.admits(waiting, free_after_blocks, view))
        except Exception:  # noqa: BLE001
            self._complain("admits")
            return True

    def initial_state(self) -> Any:
        try:
            return self.base.initial_state()
        except Exception:  # noqa: BLE001
            self._complain("initial_state")
            return None

    def finished(self, state: Any, request: Progress) -> Any:
        try:
            return self.base.finished(state, request)
        except Exception:  # noqa: BLE001
            self._complain("finished")
            return state
