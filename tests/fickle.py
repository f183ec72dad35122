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
        swap = first_option_of("swap", options)
        resumes = situation.save_blocks == 0.0 and situation.cause == "memory"
        if swap is None or (resumes and (situation.hit_blocks % 2 or situation.queued_load_bytes > 0)):
            return certain_choice(0, len(options))
        return certain_choice(swap, len(options))
