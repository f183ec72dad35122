"""A policy with an argument, given as a number in Python and as text in a name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvpolicy import Option, Policy, Preemption


@dataclass(frozen=True)
class ByLength(Policy):
    """Swaps victims of more than so many computed tokens."""

    tokens: int | str = 256
    name: str = "by-length"

    def probabilities(self, situation: Preemption, options: Sequence[Option], state: object) -> list[float]:
        swap = len(options) > 1 and situation.computed_tokens > int(self.tokens)
        return [1.0 - swap, float(swap)][: len(options)]
