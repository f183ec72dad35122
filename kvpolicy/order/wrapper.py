"""The base of orders that change one thing about another order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvpolicy.order.base import Order, Progress, Rank, View


@dataclass(frozen=True, repr=False)
class Wrapper(Order):
    """Another order under a name of its own: extend it and override what differs."""

    name: str
    base: Order

    def __post_init__(self) -> None:
        for attribute in ("displaces_by_rank", "quantum_tokens", "promote_s", "max_victims"):
            object.__setattr__(self, attribute, getattr(self.base, attribute))

    def of_base(self, view: View) -> View:
        """The view that the other order is given."""
        return view

    def rank(self, request: Progress, view: View) -> Rank:
        return self.base.rank(request, self.of_base(view))

    def displaces(self, waiting: Progress, running: Progress, view: View) -> bool:
        return self.base.displaces(waiting, running, self.of_base(view))

    def victims(self, waiting: Progress, running: Sequence[Progress], view: View) -> Sequence[Progress]:
        return self.base.victims(waiting, running, self.of_base(view))

    def probability(
        self, waiting: Progress, victims: Sequence[Progress], running: Sequence[Progress], view: View
    ) -> float:
        return self.base.probability(waiting, victims, running, self.of_base(view))

    def worth(self, waiting: Progress, victims: Sequence[Progress], view: View) -> bool:
        return self.base.worth(waiting, victims, self.of_base(view))

    def admits(self, waiting: Progress, free_after_blocks: int, view: View) -> bool:
        return self.base.admits(waiting, free_after_blocks, self.of_base(view))

    def initial_state(self) -> Any:
        return self.base.initial_state()

    def finished(self, state: Any, request: Progress) -> Any:
        return self.base.finished(state, request)
