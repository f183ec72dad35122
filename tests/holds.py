"""Orders that go by what no order that ships does: steps sat out, and ranks that are measures."""

from __future__ import annotations

from collections.abc import Sequence

from kvpolicy.order import Order, Progress, Rank, View


class Holds(Order):
    """By priority; while a prompt of priority 0 is computed, all others sit out, and every seventh token somebody does
    for no reason. Now and then it would hold everybody."""

    name = "holds"
    displaces_by_rank = True
    quantum_tokens = 2
    max_held_steps = 3

    def rank(self, request: Progress, view: View) -> Rank:
        return Rank((request.priority,))

    def hold(self, running: Sequence[Progress], view: View) -> Sequence[Progress]:
        if any(not one.priority and not one.output_tokens for one in running):
            return [one for one in running if one.priority or one.output_tokens % 2]
        return [one for one in running if (one.output_tokens + one.number) % 7 == 0]


class Measured(Order):
    """By a measure that moves with every token, rounded to levels."""

    name = "measured"
    displaces_by_rank = True
    quantum_tokens = 3
    rank_ratio = 1.5

    def rank(self, request: Progress, view: View) -> Rank:
        return Rank((request.prompt_tokens * 0.37 + request.output_tokens * 1.7,), request.output_tokens + 1)
