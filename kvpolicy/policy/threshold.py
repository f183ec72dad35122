"""Swap long requests, recompute short ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvpolicy.events import Option, Preemption
from kvpolicy.policy.base import Assessment, PolicyBase, PolicyState, all_on, first_of


@dataclass(frozen=True)
class Threshold(PolicyBase):
    """Swap iff the victim has at least that many computed tokens, and swap is feasible."""

    name: str
    tokens: int

    def assess(self, situation: Preemption, options: Sequence[Option], state: PolicyState) -> Assessment:
        swap = first_of("swap", options) if situation.computed_tokens >= self.tokens else None
        return all_on(swap or 0, len(options)), ()
