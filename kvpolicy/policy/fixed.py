"""Policies that look at nothing: always the same option, or a coin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvpolicy.events import Kind, Option, Preemption
from kvpolicy.policy.base import Assessment, PolicyBase, PolicyState, all_on, first_of


@dataclass(frozen=True)
class Always(PolicyBase):
    """One kind wherever it is feasible, recompute elsewhere."""

    name: str
    kind: Kind

    def assess(self, situation: Preemption, options: Sequence[Option], state: PolicyState) -> Assessment:
        return all_on(first_of(self.kind, options) or 0, len(options)), ()


@dataclass(frozen=True)
class Coin(PolicyBase):
    """Swap with a fixed probability wherever it is feasible."""

    name: str
    p_swap: float

    def assess(self, situation: Preemption, options: Sequence[Option], state: PolicyState) -> Assessment:
        swap = first_of("swap", options)
        if swap is None:
            return all_on(0, len(options)), ()
        shares = [0.0] * len(options)
        shares[0] = 1.0 - self.p_swap
        shares[swap] += self.p_swap
        return tuple(shares), ()
