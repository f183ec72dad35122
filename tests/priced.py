"""A policy that predicts costs without a model of a machine: so much per token recomputed, and per block copied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvpolicy.events import Cost, Option, Preemption
from kvpolicy.policy import PricedPolicy
from kvpolicy.policy.base import NoState, certain_choice


@dataclass(frozen=True)
class Priced(PricedPolicy[NoState]):
    """The cheaper option by its own prices."""

    name: str = "priced"
    token_s: float = 1e-4
    block_s: float = 5e-4
    fixed_s: float = 0.0
    """Of a recompute, however few its tokens."""

    def costs(self, situation: Preemption, options: Sequence[Option], state: NoState) -> tuple[Cost, ...]:
        lost = situation.computed_tokens - situation.cached_tokens
        recompute_s = self.fixed_s + max(0.0, lost) * self.token_s
        swap_s = 2 * situation.save_blocks * self.block_s
        by_kind = {
            "recompute": Cost(recompute_s, 0.0, 0.0, recompute_s, 0.0, recompute_s, recompute_s),
            "swap": Cost(swap_s, swap_s / 2, swap_s / 2, 0.0, 0.0, swap_s, swap_s),
        }
        return tuple(by_kind[option.kind] for option in options)

    def by_costs(
        self, situation: Preemption, options: Sequence[Option], costs: Sequence[Cost], state: NoState
    ) -> tuple[float, ...]:
        cheapest = min(range(len(costs)), key=lambda index: costs[index].engine_s)
        return certain_choice(cheapest, len(options))


def dear() -> Priced:
    """The same, at a hundred thousand times the price."""
    return Priced("dear", 10.0, 50.0)


def short_first() -> Priced:
    """The same, where a copy saves the more per block the shorter it is."""
    return Priced("short first", 1e-4, 5e-5, 0.05)
