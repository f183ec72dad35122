"""A policy that swaps and thinks better of it: whether a load comes about is decided at resume."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvpolicy import Option, Policy, Preemption
from kvpolicy.policy.base import NoState, certain_choice, first_option_of


@dataclass(frozen=True)
class Fickle(Policy[NoState]):
    """Swaps every victim; loads only where few loads wait and the hit has an even number of blocks."""

    name: str = "fickle"

    def probabilities(self, situation: Preemption, options: Sequence[Option], state: NoState) -> Sequence[float]:
        return certain_choice(first_option_of("swap", options) or 0, len(options))

    def loads(self, situation: Preemption, options: Sequence[Option], state: NoState) -> bool:
        return situation.hit_blocks % 2 == 0 and situation.queued_load_bytes == 0
