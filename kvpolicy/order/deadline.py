"""An order by deadlines: whose reader runs dry first is served first."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil, inf

from kvpolicy.order.base import Order, Progress, Rank, View

LOST = inf
"""Level of a request that is too late."""


@dataclass(frozen=True, repr=False)
class Deadline(Order):
    """Whose reader runs dry first: least slack first.

    slack = arrival + ttft + output tokens x tpot - now; a request that brings times of its own goes by these. rank =
    its level: -1 for up to ``late_s`` of lateness, 0 up to ``step_s`` of slack, then levels that end at twice the
    slack each, and one for all from ``bound_s`` on. Whoever is later than ``late_s`` is lost: it goes after all
    others, with rank inf, until it is not late any more. Served first, those that missed their deadlines in an overload
    would make all others miss theirs. After Andes (Liu et al., 2024, arXiv:2404.16283), by slack instead of the
    gradient of a quality of experience. Ranks move with time, so it displaces more often than an order by length.

    With ``ahead_s`` a running request that has got its first token, and whose slack is larger than that, sits steps
    out, keeping its blocks, as long as another one that runs is late but not lost.
    """

    name: str
    ttft_s: float = 1.0
    tpot_s: float = 0.1
    bound_s: float = 20.0
    quantum_tokens: int = 64
    promote_s: float = inf
    cool_down_s: float = 0.0
    step_s: float = 1.0
    ahead_s: float = inf
    late_s: float = 0.2
    displaces_by_rank = True

    @property
    def holds(self) -> bool:
        return type(self).hold is not Deadline.hold or self.ahead_s < inf

    def rank(self, request: Progress, view: View) -> Rank:
        slack_s, tpot_s = self._slack_s(request, view), self._tpot_s(request)
        edges_s = _edges_s(self.late_s, self.step_s, self.bound_s)
        if self._is_lost(request, slack_s):
            return Rank((LOST,), _tokens_until(-slack_s, request, tpot_s))
        level = bisect_right(edges_s, slack_s)
        until_s = view.now_s + max(slack_s - edges_s[level - 1], 0.001)
        if level == len(edges_s):
            return Rank((level - 2,), until_s=until_s)
        # Where time takes away what tokens add, the request would be asked for with every token.
        width_s = edges_s[level] - edges_s[level - 1]
        until_tokens = _tokens_until(max(edges_s[level] - slack_s, width_s / 4), request, tpot_s)
        return Rank((level - 2,), until_tokens, until_s)

    def hold(self, running: Sequence[Progress], view: View) -> Sequence[Progress]:
        slacks_s = [self._slack_s(request, view) for request in running]
        by_slack = list(zip(running, slacks_s, strict=True))
        if not any(slack_s < 0.0 and not self._is_lost(request, slack_s) for request, slack_s in by_slack):
            return ()
        return [request for request, slack_s in by_slack if request.output_tokens and slack_s > self.ahead_s]

    def _is_lost(self, request: Progress, slack_s: float) -> bool:
        """One that was lost stays so while it is late: with slack around ``-late_s`` it would go first and last by
        turns. Where orders are layered its rank has other parts besides."""
        return slack_s < (0.0 if LOST in request.rank else -self.late_s)

    def _slack_s(self, request: Progress, view: View) -> float:
        ttft_s = self.ttft_s if request.ttft_s is None else request.ttft_s
        return request.arrival_s + ttft_s + request.output_tokens * self._tpot_s(request) - view.now_s

    def _tpot_s(self, request: Progress) -> float:
        return self.tpot_s if request.tpot_s is None else request.tpot_s


def _tokens_until(rise_s: float, request: Progress, tpot_s: float) -> float:
    """Output tokens at which the slack has risen by so much, if no time passes; inf for never."""
    tokens = rise_s / tpot_s if tpot_s > 0 else inf
    return request.output_tokens + max(1, ceil(tokens)) if tokens < inf else inf


@cache
def _edges_s(late_s: float, step_s: float, bound_s: float) -> tuple[float, ...]:
    """Slacks at which the levels of :class:`Deadline` begin, from that of the late ones on."""
    edges_s = [-late_s, 0.0, step_s]
    while edges_s[-1] * 2 < bound_s:
        edges_s.append(edges_s[-1] * 2)
    return (*edges_s, bound_s) if edges_s[-1] < bound_s else tuple(edges_s)
