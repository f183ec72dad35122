"""Another order, of which a rule changes one part."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from kvpolicy.order.base import Order, Progress, Rank, View, group_of

TAKEN_OVER = (
    "displaces_by_rank", "quantum_tokens", "promote_s", "max_victims", "cool_down_s", "rank_ratio", "max_held_steps",
)  # fmt: skip


@dataclass(frozen=True, repr=False)
class Wrapper(Order):
    """All that a subclass leaves alone is the other order's: values, ranks, victims, state."""

    name: str
    base: Order

    def __post_init__(self) -> None:
        for attribute in TAKEN_OVER:
            object.__setattr__(self, attribute, getattr(self.base, attribute))

    @property
    def holds(self) -> bool:
        return type(self).hold is not Wrapper.hold or self.base.holds

    @property
    def gates(self) -> bool:
        return type(self).admits is not Wrapper.admits or self.base.gates

    @property
    def max_candidates(self) -> int:
        return self.base.max_candidates

    def rank(self, request: Progress, view: View) -> Rank:
        return self.base.rank(request, self.of_base(view))

    @property
    def groups_ranks(self) -> bool:
        return super().groups_ranks and (type(self).rank_group is not Wrapper.rank_group or self.base.groups_ranks)

    def rank_group(self, request: Progress) -> Hashable:
        return group_of(self.base, request)

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

    def hold(self, running: Sequence[Progress], view: View) -> Sequence[Progress]:
        return self.base.hold(running, self.of_base(view))

    def initial_state(self) -> Any:
        return self.base.initial_state()

    def finished(self, state: Any, request: Progress) -> Any:
        return self.base.finished(state, request)

    def of_base(self, view: View) -> View:
        """The view as the other order knows it: a subclass with a state of its own gives the other's."""
        return view
