"""Whether displacing somebody is worth what it costs: a rule that any order can have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from kvpolicy.order.base import Progress, View
from kvpolicy.order.ranks import FIRST
from kvpolicy.order.seen_lengths import Lengths
from kvpolicy.order.wrapper import Wrapper


@dataclass(frozen=True, slots=True)
class Seen:
    """State of :class:`WithWorth`: that of the other order, and the lengths seen so far."""

    base: Any
    lengths: Lengths


@dataclass(frozen=True, repr=False)
class WithWorth(Wrapper):
    """Another order, which displaces only where that saves more waiting than it costs.

    gain = seconds per token x (the most tokens that a victim has left - those that each victim waits for): where nobody
    is displaced, the newcomer waits until the longest victim has ended; otherwise each of them waits until the newcomer
    has ended, or has got as far as the victim. cost = the victims' predicted engine seconds x unfinished requests, as
    they delay all. Both are seconds of waiting, summed over requests; tokens left are predicted from the lengths seen
    so far. Every request counts alike, so it is no rule for a class that is to go first at any price.

    Where no policy predicts costs, and for a request that has waited for too long, the other order decides alone.
    """

    def worth(self, waiting: Progress, victims: Sequence[Progress], view: View) -> bool:
        if not super().worth(waiting, victims, view):
            return False
        cost_s, token_s = _cost_s(victims, view), _seconds_per_token(victims, view)
        if cost_s is None or token_s is None or waiting.rank == FIRST:
            return True
        left = [_left(victim, view.state.lengths) for victim in victims]
        own = _left(waiting, view.state.lengths)
        ahead = (victim.output_tokens - waiting.output_tokens for victim in victims)
        delays = (min(own, max(self.quantum_tokens, tokens)) for tokens in ahead)
        return token_s * (max(left) - sum(delays)) > cost_s

    def initial_state(self) -> Seen:
        return Seen(self.base.initial_state(), Lengths())

    def finished(self, state: Seen, request: Progress) -> Seen:
        return Seen(self.base.finished(state.base, request), state.lengths.seen(request.output_tokens))

    def of_base(self, view: View) -> View:
        return replace(view, state=view.state.base)


def _left(request: Progress, lengths: Lengths) -> float:
    """Tokens that the request is expected to get yet."""
    return lengths.remaining(request.output_tokens, request.max_output_tokens)


def _cost_s(victims: Sequence[Progress], view: View) -> float | None:
    """Waiting that displacing the victims costs all unfinished requests together; None where a price is not known."""
    prices_s = [None if view.price is None else view.price(victim) for victim in victims]
    if None in prices_s:
        return None
    return view.unfinished * sum(price_s for price_s in prices_s if price_s is not None)


def _seconds_per_token(victims: Sequence[Progress], view: View) -> float | None:
    """Mean over the victims, since each was admitted; None where none of them has got a token since."""
    if view.served_s is None:
        return None
    known = [view.served_s(victim) / victim.served_tokens for victim in victims if victim.served_tokens > 0]
    return fmean(known) if known else None
