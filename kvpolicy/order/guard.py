"""An order in a server: whatever its code does, requests are served."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from math import inf, isnan
from typing import Any, TypeVar

from kvpolicy.order.base import MAX_SHOWN, Order, Progress, Rank, View, among, group_of, levels
from kvpolicy.order.ranks import FIRST

Answer = TypeVar("Answer")
LAST = (inf,)
"""Rank of a request that never got one: nobody is displaced for it."""


class Guarded(Order):
    """Another order, whose errors are passed to ``complain``, called while the exception is handled, and answered as
    stock vLLM would: the request keeps its rank, nobody is displaced, and whoever fits is admitted.

    Ranks are in levels already, so that one which a request keeps is not rounded again.
    """

    def __init__(self, order: Order, complain: Callable[[str], None]) -> None:
        self.name = order.name
        self.displaces_by_rank = bool(order.displaces_by_rank)
        self.quantum_tokens = int(order.quantum_tokens)
        self.promote_s = float(order.promote_s)
        self.max_victims = int(order.max_victims)
        self.cool_down_s = float(order.cool_down_s)
        self._ratio = float(order.rank_ratio)
        self.max_held_steps = int(order.max_held_steps)
        self.base = order
        self._complain = complain

    @property
    def label(self) -> str:
        return self.base.label

    @property
    def max_candidates(self) -> int:
        return self._guarded("max_candidates", MAX_SHOWN, lambda: int(self.base.max_candidates))

    @property
    def holds(self) -> bool:
        return self._guarded("holds", False, lambda: bool(self.base.holds))

    @property
    def gates(self) -> bool:
        return self._guarded("gates", False, lambda: bool(self.base.gates))

    @property
    def groups_ranks(self) -> bool:
        return self._guarded("groups_ranks", False, lambda: bool(self.base.groups_ranks))

    def rank(self, request: Progress, view: View) -> Rank:
        kept = LAST if request.rank in ((), FIRST) else request.rank  # the first place is for one quantum only
        return self._guarded("rank", Rank(kept), lambda: self._in_levels(_comparable(*self.base.rank(request, view))))

    def rank_group(self, request: Progress) -> Hashable:
        return self._guarded("rank_group", None, lambda: _hashable(group_of(self.base, request)))

    def _in_levels(self, rank: Rank) -> Rank:
        return rank._replace(value=levels(rank.value, self._ratio))

    def displaces(self, waiting: Progress, running: Progress, view: View) -> bool:
        return self._guarded("displaces", False, lambda: bool(self.base.displaces(waiting, running, view)))

    def victims(self, waiting: Progress, running: Sequence[Progress], view: View) -> Sequence[Progress]:
        ask = self.base.victims
        return self._guarded("victims", (), lambda: among(self.base, "victims", running, ask(waiting, running, view)))

    def worth(self, waiting: Progress, victims: Sequence[Progress], view: View) -> bool:
        return self._guarded("worth", False, lambda: bool(self.base.worth(waiting, victims, view)))

    def admits(self, waiting: Progress, free_after_blocks: int, view: View) -> bool:
        return self._guarded("admits", True, lambda: bool(self.base.admits(waiting, free_after_blocks, view)))

    def hold(self, running: Sequence[Progress], view: View) -> Sequence[Progress]:
        return self._guarded("hold", (), lambda: among(self.base, "hold", running, self.base.hold(running, view)))

    def initial_state(self) -> Any:
        return self._guarded("initial_state", None, self.base.initial_state)

    def finished(self, state: Any, request: Progress) -> Any:
        return self._guarded("finished", state, lambda: self.base.finished(state, request))

    def probability(
        self, waiting: Progress, victims: Sequence[Progress], running: Sequence[Progress], view: View
    ) -> float:
        """0 where it is not known: nothing is judged by such a choice."""
        ask = self.base.probability
        return self._guarded("probability", 0.0, lambda: float(ask(waiting, victims, running, view)))

    def _guarded(self, method: str, otherwise: Answer, ask: Callable[[], Answer]) -> Answer:
        """The answer, or ``otherwise`` where the order's code fails."""
        try:
            return ask()
        # The boundary between an order and a server: whatever a user's code raises, the request is served.
        except Exception:  # noqa: BLE001
            self._complain(method)
            return otherwise


def _comparable(value: Sequence[float], until_tokens: float, until_s: float) -> Rank:
    """The rank, of numbers. Anything else raises, and so does NaN, which has no order."""
    rank = Rank(tuple(map(float, value)), float(until_tokens), float(until_s))
    if any(map(isnan, (*rank.value, rank.until_tokens, rank.until_s))):
        raise TypeError(f"{rank} contains NaN, which has no order")
    return rank


def _hashable(group: Hashable) -> Hashable:
    """The group itself. One that has no hash raises."""
    hash(group)
    return group
