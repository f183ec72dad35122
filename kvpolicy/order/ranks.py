"""The ranks of all unfinished requests, asked for again only where one may have changed."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from math import ceil, inf, nan
from typing import Generic, TypeVar

from kvpolicy.order.base import Order, Progress, Rank, View, levels

R = TypeVar("R", bound=Hashable)
Key = tuple[tuple[float, ...], float, int]
Looks = Callable[[R, tuple[float, ...], int], Progress]
"""Gives the progress of a request with this rank that had so many output tokens when it was last admitted."""

Event = tuple[float, int, R, int]
"""Step or time, a number that decides between equals, the request, and the version of its entry."""
MAX_VOID = 16
"""Void events beside as many events as there are requests, before they are removed."""
FIRST: tuple[float, ...] = (-inf,)
"""Rank of a request that has waited for too long."""


@dataclass(slots=True)
class Entry:
    """What is known of one request."""

    key: Key
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


class Ranks(Generic[R]):
    """Ranks by event. One per engine core.

    A rank says until how many output tokens and until when it holds, which a calendar foresees: a step in which nothing
    is due costs one comparison. Promotion of requests that wait for too long, and the end of each quantum, are in the
    same calendar. ``tokens_per_step``: most output tokens that a request gets in one step.
    """

    def __init__(self, order: Order, look: Looks[R], tokens_per_step: int = 1) -> None:
        self.order = order
        self.state = order.initial_state()
        self._look = look
        self._per_step = tokens_per_step
        self._entries: dict[R, Entry] = {}
        self._by_step: list[Event[R]] = []
        self._by_time: list[Event[R]] = []
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._entries)

    def key(self, request: R) -> Key:
        """Sorts requests in the order of service: by rank, then arrival."""
        return self._entries[request].key

    def progress(self, request: R) -> Progress:
        entry = self._entries[request]
        progress = self._look(request, entry.key[0], entry.admitted_at_tokens)
        return progress if entry.cools_until_s == -inf else replace(progress, cools_until_s=entry.cools_until_s)

    def admitted_s(self, request: R) -> float:
        """When the request was last admitted; NaN before the first time."""
        return self._entries[request].admitted_s

    # ---- what happens to requests ----

    def arrived(self, request: R, step: int, view: View) -> None:
        progress = self._look(request, (), 0)
        entry = Entry(((), progress.arrival_s, progress.number), progress.output_tokens, view.now_s)
        self._entries[request] = entry
        self._ask(request, entry, step, view)

    def admitted(self, request: R, step: int, view: View) -> None:
        """The request runs from this step on."""
        entry = self._entries[request]
        entry.waits_since_s = None
        entry.admitted_s = view.now_s
        progress = self.progress(request)
        entry.admitted_at_tokens = progress.output_tokens
        if self.order.cool_down_s and progress.preemptions:
            entry.cools_until_s = view.now_s + self.order.cool_down_s
        self._ask(request, entry, step, view)

    def preempted(self, request: R, step: int, view: View) -> None:
        entry = self._entries[request]
        entry.waits_since_s, entry.cools_until_s = view.now_s, -inf
        self._ask(request, entry, step, view)

    def removed(self, request: R, by_itself: bool) -> None:
        """The request has ended. ``by_itself``: not by a client or a fault, so that its length tells something."""
        if by_itself:
            self.state = self.order.finished(self.state, self.progress(request))
        del self._entries[request]
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

    def due(self, step: int, view: View) -> list[R] | None:
        """Ask anew for what is due. Return the requests whose keys changed; None where nothing was due.

        What is due without a change is the end of a quantum.
        """
        asked = False
        changed = []
        for request in list(self._taken(step, view.now_s)):
            asked = True
            if self._ask(request, self._entries[request], step, view):
                changed.append(request)
        return changed if asked else None

    def _taken(self, step: int, now_s: float) -> Iterator[R]:
        heaps: tuple[tuple[list[Event[R]], float], ...] = (self._by_step, step), (self._by_time, now_s)
        for heap, now in heaps:
            while heap and heap[0][0] <= now:
                _, _, request, version = heapq.heappop(heap)
                if self._is_valid(request, version):
                    yield request

    def _next(self, heap: list[Event[R]]) -> float:
        while heap and not self._is_valid(heap[0][2], heap[0][3]):
            heapq.heappop(heap)
        return heap[0][0] if heap else inf

    def _add(self, heap: list[Event[R]], at: float, request: R) -> None:
        heapq.heappush(heap, (at, next(self._numbers), request, self._entries[request].version))
        self._clear(heap)

    def _clear(self, heap: list[Event[R]]) -> None:
        """Remove void events once they are in the majority: they may lie far ahead, and hold requests that ended."""
        if len(heap) > 2 * len(self._entries) + MAX_VOID:
            heap[:] = [event for event in heap if self._is_valid(event[2], event[3])]
            heapq.heapify(heap)

    def _is_valid(self, request: R, version: int) -> bool:
        entry = self._entries.get(request)
        return entry is not None and entry.version == version

    # ---- one rank ----

    def _ask(self, request: R, entry: Entry, step: int, view: View) -> bool:
        """Set the request's rank and its events; return whether its key changed."""
        entry.version += 1
        progress = self._look(request, entry.key[0], entry.admitted_at_tokens)
        rank = self._rank(progress, entry, view)
        before, entry.key = entry.key, (rank.value, *entry.key[1:])
        if entry.waits_since_s is None:
            quantum_ends = entry.admitted_at_tokens + self.order.quantum_tokens
            tokens = min(rank.until_tokens, quantum_ends if quantum_ends > progress.output_tokens else inf)
            if tokens < inf:
                ahead = max(1.0, tokens - progress.output_tokens)
                self._add(self._by_step, step + ceil(ahead / self._per_step), request)
        until_s = min(rank.until_s, entry.cools_until_s) if entry.cools_until_s > view.now_s else rank.until_s
        if until_s < inf:
            self._add(self._by_time, until_s, request)
        return entry.key != before

    def _rank(self, progress: Progress, entry: Entry, view: View) -> Rank:
        promote_s, quantum = self.order.promote_s, self.order.quantum_tokens
        if entry.promoted and progress.served_tokens >= max(1, quantum):
            entry.promoted = False
        since = entry.waits_since_s
        if since is not None and view.now_s >= since + promote_s:
            entry.promoted = True
        if entry.promoted:
            return Rank(FIRST, entry.admitted_at_tokens + max(1, quantum) if since is None else inf)
        rank = self.order.rank(progress, view)
        if self.order.rank_ratio > 1.0:
            rank = rank._replace(value=levels(rank.value, self.order.rank_ratio))
        return rank if since is None else rank._replace(until_s=min(rank.until_s, since + promote_s))
