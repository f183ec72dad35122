"""Who arrives when: requests as their source has them, those of a session after the one before and a think time."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvpolicy.workload import Request, Source


class Arrival(NamedTuple):
    """Ordered by time, then by place in the source."""

    at_s: float
    number: int
    request: Request


class Arrivals:
    """Reads the source no further than time has come; ``refuse`` raises for a request that cannot be served."""

    def __init__(self, source: Source, refuse: Callable[[int, Request], None]) -> None:
        self._source: Iterator[tuple[int, Request]] = enumerate(source)
        self._refuse = refuse
        self._due: list[Arrival] = []
        self._latest: dict[str, int] = {}
        """Of each session the last request that was read."""
        self._ended_s: dict[str, float] = {}
        """Of each session when that one finished, where it has."""
        self._followers: dict[int, tuple[int, Request]] = {}
        """By the request that they wait for."""
        self._next = next(self._source, None)

    def until(self, now_s: float) -> list[Arrival]:
        """All that have arrived by now and were not told yet."""
        found = []
        while (at_s := self.next_s()) is not None and at_s <= now_s:
            found.append(heapq.heappop(self._due))
        return found

    def next_s(self) -> float | None:
        """When the next one arrives; None where nobody does unless somebody finishes before."""
        while self._next is not None and (not self._due or self._next[1].arrival_s <= self._due[0].at_s):
            self._read()
        return self._due[0].at_s if self._due else None

    def finished(self, number: int, request: Request, now_s: float) -> None:
        """The next one of its session may come, a think time later."""
        if request.session and self._latest[request.session] == number:
            self._ended_s[request.session] = now_s
        follower = self._followers.pop(number, None)
        if follower is not None:
            self._follow(*follower, now_s)

    def _read(self) -> None:
        assert self._next is not None
        number, request = self._next
        self._next = next(self._source, None)
        self._refuse(number, request)
        if not request.session:
            self._come(request.arrival_s, number, request)
            return
        before = self._latest.get(request.session)
        ended_s = self._ended_s.pop(request.session, None)
        self._latest[request.session] = number
        if request.think_s is None or before is None:
            self._come(request.arrival_s, number, request)
        elif ended_s is None:
            self._followers[before] = number, request
        else:
            self._follow(number, request, ended_s)

    def _follow(self, number: int, request: Request, ended_s: float) -> None:
        assert request.think_s is not None
        self._come(max(request.arrival_s, ended_s + request.think_s), number, request)

    def _come(self, at_s: float, number: int, request: Request) -> None:
        heapq.heappush(self._due, Arrival(at_s, number, request))
