"""The order that docs/requests.md shows."""

from __future__ import annotations

from kvpolicy.order import Order, Progress, Rank, View


class ChatsFirst(Order):
    """Those whose window will be asked for again go before those that come once."""

    name = "chats-first"
    displaces_by_rank = True

    def rank(self, request: Progress, view: View) -> Rank:
        return Rank((0 if request.hints.keep_s else 2 if request.hints.once else 1,))
