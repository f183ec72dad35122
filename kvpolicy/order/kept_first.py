"""An order by what requests say of their KV, most often the outer one of two: ``hints/mlfq``."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from kvpolicy.code_digest import is_from_library
from kvpolicy.order.base import Order, Progress, Rank, View
from kvpolicy.order.order_parts import parts
from kvpolicy.order.rules import Srpt, by_lengths, by_limit

PREDICTORS = (by_lengths, by_limit)
"""Predictors of lengths that ship: neither goes by hints."""


@dataclass(frozen=True, repr=False)
class KeptFirst(Order):
    """By hints, as granted: chats, whose windows will be asked for again, displace requests that say nothing, and both
    displace what comes once: their blocks are of use afterwards, and somebody waits for the next turn.

    rank = 0 for ``keep_s``, 2 for ``once``, 1 for others. Beside ``once`` or ``ended``, ``keep_s`` is the time of a pin
    and nothing else: one of many texts behind a prefix goes last, whatever it pins. Clients say it themselves: where
    they are not to be believed, an operator grants classes (:class:`~kvpolicy.order.by_class.ByClass`). It gives up the
    time of those displaced.
    """

    name: str
    quantum_tokens: int = 0
    promote_s: float = inf
    cool_down_s: float = 0.0
    displaces_by_rank = True

    def rank(self, request: Progress, view: View) -> Rank:
        return Rank((self.rank_group(request),))

    def rank_group(self, request: Progress) -> int:
        if request.hints.once:
            return 2
        return 0 if request.hints.keep_s and not request.hints.ended else 1


def may_read_hints(order: Order) -> bool:
    """Whether the order, or a part of it, ranks by hints, or runs a user's code, of which nobody knows."""
    return any(
        isinstance(part, KeptFirst)
        or not is_from_library(type(part))
        or (isinstance(part, Srpt) and part.predictor not in PREDICTORS)
        for part in parts(order)
    )
