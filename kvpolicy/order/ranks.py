"""The ranks of all unfinished requests, asked for again only where one may have changed."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from itertools import count
from math import ceil, inf, nan
from typing import Any, Generic, TypeVar

from kvpolicy.order.base import Order, Progress, Rank, View, checked_rank, group_of, levels

R = TypeVar("R", bound=Hashable)
Key = tuple[tuple[float, ...], float, int]
Looks = Callable[[R, tuple[float, ...], int], Progress]
"""Gives the progress of a request with this rank that had so many output tokens when it was last admitted."""

Event = tuple[float, int, R, int]
"""Step or time, a number that decides between equals, the request, and the version of its entry."""
MAX_VOID = 16
"""Void events beside as many events as there are requests, before they are removed."""
MAX_SHARED = 4096
"""Ranks that are remembered for requests of equal groups."""
FIRST: tuple[float, ...] = (-inf,)
"""Rank of a request that has waited for too long."""


@dataclass(slots=True)
class Entry:
    """What is known of one request."""

    admitted_at_tokens: int = 0
    """Output tokens that it had when it was last admitted."""
    waits_since_s: float | None = None
    """None while it runs. Loading is part of the waiting."""
    promoted: bool = False
    cools_until_s: float = -inf
    """Until then it may not be displaced."""
    version: int = 0
    """Counts what makes its events in the calendar void."""
    admitted_s: float = nan
    """When it was last admitted."""
    group: Hashable = None
    """See :meth:`kvpolicy.order.Order.rank_group`."""
    may_lose: bool = False
    """Whether, when it was last asked for, it ran and had its quantum and its cool-down behind it."""


class Ranks(Generic[R]):
    """Ranks by event. One per engine core.

    A rank says until how many output tokens and until when it holds, which a calendar foresees: a step in which nothing
    is due costs one comparison. Promotion of requests that wait for too long, and the end of each quantum, are in the
    same calendar, and requests of equal groups and output tokens share one rank: the order is asked once for them.

    ``tokens_per_step``: most output tokens that a request gets in one step. ``output_tokens``: those of a request, as
    in its progress, for less; without it ``look`` is asked.
    """

    def __init__(
        self, order: Order, look: Looks[R], tokens_per_step: int = 1, output_tokens: Callable[[R], int] | None = None
    ) -> None:
        self.order = order
        self.state = order.initial_state()
        self._look = look
        self._output_tokens = output_tokens or (lambda request: look(request, (), 0).output_tokens)
        self._per_step = tokens_per_step
        self._quantum = order.quantum_tokens
        self._groups = order.groups_ranks
        self._entries: dict[R, Entry] = {}
        self._keys: dict[R, Key] = {}
        self.key: Callable[[R], Key] = self._keys.__getitem__
        """Sorts requests in the order of service: by rank, then arrival."""
        self._shared: dict[tuple[Hashable, int], Rank] = {}
        """By group and output tokens, under ``_shared_state``: ranks that only a number of tokens ends."""
        self._shared_state: Any = self.state
        self._by_step: list[Event[R]] = []
        self._by_time: list[Event[R]] = []
        self._numbers = count()
        self.matters = True
        """Whether what was due last may change what a look for room finds; see :meth:`due`."""

    def __len__(self) -> int:
        return len(self._entries)

    def progress(self, request: R) -> Progress:
        entry = self._entries[request]
        progress = self._look(request, self._keys[request][0], entry.admitted_at_tokens)
        return progress if entry.cools_until_s == -inf else replace(progress, cools_until_s=entry.cools_until_s)

    def admitted_s(self, request: R) -> float:
        """When the request was last admitted; NaN before the first time."""
        return self._entries[request].admitted_s

    # ---- what happens to requests ----

    def arrived(self, request: R, step: int, view: View) -> None:
        progress = self._look(request, (), 0)
        self._entries[request] = entry = Entry(progress.output_tokens, view.now_s)
        self._keys[request] = (), progress.arrival_s, progress.number
        self._happened(request, entry, step, view)

    def admitted(self, request: R, step: int, view: View) -> None:
        """The request runs from this step on."""
        entry = self._entries[request]
        entry.waits_since_s = None
        entry.admitted_s = view.now_s
        progress = self.progress(request)
        entry.admitted_at_tokens = progress.output_tokens
        if self.order.cool_down_s and progress.preemptions:
            entry.cools_until_s = view.now_s + self.order.cool_down_s
        self._happened(request, entry, step, view)

    def preempted(self, request: R, step: int, view: View) -> None:
        entry = self._entries[request]
        entry.waits_since_s, entry.cools_until_s = view.now_s, -inf
        self._happened(request, entry, step, view)

    def next_turn(self, request: R, step: int, view: View) -> None:
        """A session that ran waits again, with further input: it is ranked as one that arrived anew."""
        progress, entry = self._look(request, (), 0), self._entries[request]
        entry.admitted_at_tokens, entry.promoted = progress.output_tokens, False
        self._keys[request] = (), progress.arrival_s, progress.number
        self.preempted(request, step, view)

    def removed(self, request: R, by_itself: bool) -> None:
        """The request has ended. ``by_itself``: not by a client or a fault, so that its length tells something."""
        if by_itself:
            self.state = self.order.finished(self.state, self.progress(request))
        del self._entries[request], self._keys[request]
        self._clear(self._by_step)
        self._clear(self._by_time)

    # ---- the calendar ----

    @property
    def events(self) -> int:
        """Events in the calendar, void ones included: at most four for each request, and a few more."""
        return len(self._by_step) + len(self._by_time)

    @property
    def next_step(self) -> float:
        """The next step at which a running request's rank may change, or its quantum end; inf for none."""
        return self._next(self._by_step)

    @property
    def next_s(self) -> float:
        """The next time at which a rank may change; inf for none."""
        return self._next(self._by_time)

    def due(self, step: int, view: View, stopped_at: tuple[float, ...] | None = None) -> list[R] | None:
        """Ask anew for what is due. Return the requests whose keys changed; None where nothing was due.

        What is due without a change is the end of a quantum.

        ``stopped_at``: rank of the waiting request that could not be let in when room was last looked for. A change
        :attr:`matters` where a running request has become one that it may displace, or where a waiting one goes, or
        went, before it or beside it. Without that rank every change does.
        """
        taken: list[tuple[R, Entry]] = []
        self._take(self._by_step, step, taken)
        self._take(self._by_time, view.now_s, taken)
        if not taken:
            return None
        if stopped_at is None:
            self.matters = True
            return [request for request, entry in taken if self._ask(request, entry, step, view)]
        self.matters, changed = False, []
        for request, entry in taken:
            before, might_lose = self._keys[request][0], entry.may_lose
            if self._ask(request, entry, step, view):
                changed.append(request)
            now = self._keys[request][0]
            if entry.waits_since_s is None:
                self.matters |= entry.may_lose and now > stopped_at and not (might_lose and before > stopped_at)
            else:
                self.matters |= now != before and min(now, before) <= stopped_at
        return changed

    def _take(self, heap: list[Event[R]], now: float, taken: list[tuple[R, Entry]]) -> None:
        """Move what is due from the calendar to ``taken``."""
        entries = self._entries
        while heap and heap[0][0] <= now:
            _, _, request, version = heapq.heappop(heap)
            entry = entries.get(request)
            if entry is not None and entry.version == version:
                taken.append((request, entry))

    def _next(self, heap: list[Event[R]]) -> float:
        while heap and not self._is_valid(heap[0][2], heap[0][3]):
            heapq.heappop(heap)
        return heap[0][0] if heap else inf

    def _clear(self, heap: list[Event[R]]) -> None:
        """Remove void events once they are in the majority: they may lie far ahead, and hold requests that ended."""
        if len(heap) > 2 * len(self._entries) + MAX_VOID:
            heap[:] = [event for event in heap if self._is_valid(event[2], event[3])]
            heapq.heapify(heap)

    def _is_valid(self, request: R, version: int) -> bool:
        entry = self._entries.get(request)
        return entry is not None and entry.version == version

    # ---- one rank ----

    def _happened(self, request: R, entry: Entry, step: int, view: View) -> None:
        """The request was queued or admitted, where its group may change: as a session it may begin a further turn."""
        if self._groups:
            entry.group = group_of(self.order, self.progress(request))
        self._ask(request, entry, step, view)

    def _ask(self, request: R, entry: Entry, step: int, view: View) -> bool:
        """Set the request's rank and its events; return whether its key changed."""
        entry.version += 1
        tokens = self._output_tokens(request)
        if entry.promoted or entry.waits_since_s is not None:
            value, until_tokens, until_s = self._rank_with_promotion(request, entry, tokens, view)
        else:
            value, until_tokens, until_s = self._rank(request, entry, tokens, view)
        entry.may_lose = False
        if entry.waits_since_s is None:
            quantum_ends = entry.admitted_at_tokens + self._quantum
            entry.may_lose = tokens >= quantum_ends and view.now_s >= entry.cools_until_s
            if tokens < quantum_ends < until_tokens:
                until_tokens = quantum_ends
            if until_tokens < inf:
                ahead = until_tokens - tokens
                steps = ceil(ahead / self._per_step) if ahead > 1 else 1
                self._add(self._by_step, step + steps, request, entry)
        if view.now_s < entry.cools_until_s < until_s:
            until_s = entry.cools_until_s
        if until_s < inf:
            self._add(self._by_time, until_s, request, entry)
        before = self._keys[request]
        if value == before[0]:
            return False
        self._keys[request] = value, before[1], before[2]
        return True

    def _add(self, heap: list[Event[R]], at: float, request: R, entry: Entry) -> None:
        heapq.heappush(heap, (at, next(self._numbers), request, entry.version))
        if len(heap) > 2 * len(self._entries) + MAX_VOID:
            self._clear(heap)

    def _rank(self, request: R, entry: Entry, tokens: int, view: View) -> Rank:
        """The order's own rank of the request."""
        if view.state is not self._shared_state:
            self._shared.clear()
            self._shared_state = view.state
        shared = (entry.group, tokens)
        known = self._shared.get(shared)
        if known is not None:
            return known
        progress = self._look(request, self._keys[request][0], entry.admitted_at_tokens)
        rank = checked_rank(self.order, self.order.rank(progress, view))
        if self.order.rank_ratio > 1.0:
            rank = rank._replace(value=levels(rank.value, self.order.rank_ratio))
        # One without an end is not asked for again. The rank that a request keeps after an error is such a one.
        if entry.group is not None and rank.until_tokens < inf and rank.until_s == inf:
            if len(self._shared) >= MAX_SHARED:
                self._shared.clear()
            self._shared[shared] = rank
        return rank

    def _rank_with_promotion(self, request: R, entry: Entry, tokens: int, view: View) -> Rank:
        promote_s, quantum = self.order.promote_s, max(1, self._quantum)
        since = entry.waits_since_s
        if entry.promoted and tokens - entry.admitted_at_tokens >= quantum:
            entry.promoted = False
        if since is not None and view.now_s >= since + promote_s:
            entry.promoted = True
        if entry.promoted:
            return Rank(FIRST, entry.admitted_at_tokens + quantum if since is None else inf)
        rank = self._rank(request, entry, tokens, view)
        return rank if since is None else rank._replace(until_s=min(rank.until_s, since + promote_s))
