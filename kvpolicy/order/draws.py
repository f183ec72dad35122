"""Victims left to chance: so that a log can tell what other rules would have cost."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from kvpolicy.order.base import Order, Progress, Rank, View


@dataclass(frozen=True, repr=False)
class WithDraws(Order):
    """Another order, which in a share of the choices displaces those of equal rank in random order.

    The draw follows from the requests themselves, as a hash does: equal runs draw alike, and nothing is kept. Who goes
    before whom is left alone.
    """

    name: str
    base: Order
    share: float
    """Of the choices of victims."""

    def __post_init__(self) -> None:
        for attribute in ("displaces_by_rank", "quantum_tokens", "promote_s", "max_victims"):
            object.__setattr__(self, attribute, getattr(self.base, attribute))

    def rank(self, request: Progress, view: View) -> Rank:
        return self.base.rank(request, view)

    def displaces(self, waiting: Progress, running: Progress, view: View) -> bool:
        return self.base.displaces(waiting, running, view)

    def victims(self, waiting: Progress, running: Sequence[Progress], view: View) -> Sequence[Progress]:
        preferred = self.base.victims(waiting, running, view)
        drawn = random.Random(
            f"{waiting.number}/{waiting.output_tokens}/{waiting.preemptions}/"
            f"{[(other.number, other.output_tokens) for other in running]}"
        )
        if drawn.random() >= self.share:
            return preferred
        return [victim for equals in _equals(preferred) for victim in drawn.sample(equals, len(equals))]

    def probability(
        self, waiting: Progress, victims: Sequence[Progress], running: Sequence[Progress], view: View
    ) -> float:
        preferred = self.base.victims(waiting, running, view)
        taken = [victim.number for victim in victims]
        as_preferred = [victim.number for victim in preferred[: len(taken)]] == taken
        return (1.0 - self.share) * as_preferred + self.share * _chance(taken, preferred)

    def worth(self, waiting: Progress, victims: Sequence[Progress], view: View) -> bool:
        return self.base.worth(waiting, victims, view)

    def admits(self, waiting: Progress, free_after_blocks: int, view: View) -> bool:
        return self.base.admits(waiting, free_after_blocks, view)

    def initial_state(self) -> Any:
        return self.base.initial_state()

    def finished(self, state: Any, request: Progress) -> Any:
        return self.base.finished(state, request)


def _equals(preferred: Sequence[Progress]) -> list[list[Progress]]:
    """Neighbours of equal rank."""
    return [list(equals) for _, equals in groupby(preferred, key=lambda victim: victim.rank)]


def _chance(taken: Sequence[int], preferred: Sequence[Progress]) -> float:
    """Probability that these are the first, in this sequence, where equals are in random order."""
    chance, left = 1.0, list(taken)
    for equals in _equals(preferred):
        numbers = {victim.number for victim in equals}
        while left and numbers:
            number = left.pop(0)
            if number not in numbers:
                return 0.0
            chance /= len(numbers)
            numbers.discard(number)
    return chance if not left else 0.0
