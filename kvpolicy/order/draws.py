"""Victims left to chance: so that a log can tell what other rules would have cost."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from kvpolicy.order.base import MAX_SHOWN, Progress, View
from kvpolicy.order.wrapper import Wrapper


@dataclass(frozen=True, repr=False)
class WithDraws(Wrapper):
    """Another order, which in a share of the choices displaces those of equal rank in random order.

    The draw follows from the requests themselves, as a hash does: equal runs draw alike, and nothing is kept. Who goes
    before whom is left alone.
    """

    share: float
    """Of the choices of victims."""

    @property
    def max_candidates(self) -> int:
        return MAX_SHOWN

    def victims(self, waiting: Progress, running: Sequence[Progress], view: View) -> Sequence[Progress]:
        preferred = super().victims(waiting, running, view)
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
