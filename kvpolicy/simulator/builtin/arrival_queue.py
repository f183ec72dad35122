"""Arrival times: requests in the order of their source, those of a session a think time after their predecessor."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from kvpolicy.errors import InputError
from kvpolicy.workload import Request, Source


class ArrivalQueue:
    """Reads the source only as far as time has advanced, and keeps one entry per session.

    ``refuse`` raises an error for a request that cannot be served.
    """

    def __init__(self, source: Source, refuse: Callable[[int, Request], None]) -> None:
        self._source: Iterator[tuple[int, Request]] = enumerate(source)
        self._refuse = refuse
        self._due: list[tuple[float, int, Request]] = []
        self._latest: dict[str, tuple[int, float | None]] = {}
        """By session: number of the last request read, and when it finished."""
        self._followers: dict[int, tuple[int, Request]] = {}
        """Requests that wait for a predecessor, by its number."""
        self._read_s = 0.0
        self._next = next(self._source, None)
        self.next_s: float | None = None
        """When the next request arrives; None where that depends on another request finishing, or none is left."""
        self._update_next()

    def until(self, now_s: float) -> list[tuple[float, int, Request]]:
        """(time, number, request) of the arrivals up to now that were not returned before, in order."""
        arrived = []
        while self.next_s is not None and self.next_s <= now_s:
            arrived.append(heapq.heappop(self._due))
            self._update_next()
        return arrived

    def finished(self, number: int, request: Request, now_s: float) -> None:
        """Note that a request finished: the next one of its session arrives a think time later."""
        if self._latest[request.session][0] == number:
            self._latest[request.session] = number, now_s
        follower = self._followers.pop(number, None)
        if follower is not None:
            self._push_follower(*follower, now_s)
            self._update_next()

    def _update_next(self) -> None:
        while self._next is not None and (not self._due or self._next[1].arrival_s <= self._due[0][0]):
            self._read()
        self.next_s = self._due[0][0] if self._due else None

    def _read(self) -> None:
        assert self._next is not None
        number, request = self._next
        self._next = next(self._source, None)
        if request.arrival_s < self._read_s:
            raise InputError(
                f"request {number} arrives at {request.arrival_s} s, the one before it at {self._read_s} s: "
                "a source should give its requests in the order of arrival_s"
            )
        self._read_s = request.arrival_s
        self._refuse(number, request)
        predecessor, ended_s = self._latest.get(request.session, (None, None)) if request.session else (None, None)
        if request.session:
            self._latest[request.session] = number, None
        if request.think_s is None or predecessor is None:
            heapq.heappush(self._due, (request.arrival_s, number, request))
        elif ended_s is None:
            self._followers[predecessor] = number, request
        else:
            self._push_follower(number, request, ended_s)

    def _push_follower(self, number: int, request: Request, ended_s: float) -> None:
        assert request.think_s is not None
        heapq.heappush(self._due, (max(request.arrival_s, ended_s + request.think_s), number, request))
