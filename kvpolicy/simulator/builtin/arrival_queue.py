"""Arrival times: requests in the order of their source, those of a session a think time after their predecessor, and
those of a closed loop when it has a free place."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvpolicy.errors import InputError
from kvpolicy.simulator.base import Server
from kvpolicy.workload import ClosedLoop, Request, Source

Due = tuple[float, float, int, Request]
"""When it arrives, when it would have without a closed loop, its number, and the request."""


@dataclass(slots=True)
class Places:
    """Places of one closed loop."""

    free_s: deque[float]
    """Since when each free place is free, in order."""
    waiting: list[Due] = field(default_factory=list)
    """Heap of requests that met no free place."""


class ArrivalQueue:
    """Reads the source only as far as time has advanced, and keeps one entry per session. What waits for another
    request to finish is held in memory.

    ``refuse`` raises an error for a request that cannot be served.
    """

    def __init__(self, source: Source, refuse: Callable[[int, Request], None]) -> None:
        self._source: Iterator[tuple[int, Request]] = enumerate(source)
        self._refuse = refuse
        self._due: list[Due] = []
        self._latest: dict[str, tuple[int, float | None]] = {}
        """By session: number of the last request read, and when it finished."""
        self._followers: dict[int, tuple[int, Request]] = {}
        """Requests that wait for a predecessor, by its number."""
        self._places: dict[ClosedLoop, Places] = {}
        self._read_s = 0.0
        self._next = next(self._source, None)
        self.next_s: float | None = None
        """When the next request arrives; None where that depends on another request finishing, or none is left."""
        self._update_next()

    def until(self, now_s: float) -> list[tuple[float, int, Request]]:
        """(time, number, request) of the arrivals up to now that were not returned before, in order."""
        arrived = []
        while self.next_s is not None and self.next_s <= now_s:
            at_s, _, number, request = heapq.heappop(self._due)
            if request.loop is not None:
                self._places[request.loop].free_s.popleft()
            arrived.append((at_s, number, request))
            self._update_next()
        return arrived

    def finished(self, number: int, request: Request, now_s: float) -> None:
        """Note that a request finished: the next one of its session arrives a think time later, and the place that it
        had in a closed loop is free."""
        if not request.session and request.loop is None:
            return
        if request.session and self._latest[request.session][0] == number:
            self._latest[request.session] = number, now_s
        follower = self._followers.pop(number, None)
        if follower is not None:
            self._push_follower(*follower, now_s)
        if request.loop is not None:
            places = self._places[request.loop]
            places.free_s.append(now_s)
            if places.waiting:
                heapq.heappush(self._due, heapq.heappop(places.waiting))
        self._update_next()

    def _update_next(self) -> None:
        while True:
            while self._next is not None and (not self._due or self._next[1].arrival_s <= self._due[0][0]):
                self._read()
            if not self._due or self._may_arrive():
                break
        self.next_s = self._due[0][0] if self._due else None

    def _may_arrive(self) -> bool:
        """Whether the first of the due requests arrives at its time; if it has to wait, it is moved."""
        at_s, due_s, number, request = self._due[0]
        if request.loop is None:
            return True
        places = self._places[request.loop]
        if not places.free_s:
            heapq.heappush(places.waiting, (due_s, due_s, number, request))
            heapq.heappop(self._due)
            return False
        if places.free_s[0] > at_s:
            heapq.heapreplace(self._due, (places.free_s[0], due_s, number, request))
            return False
        return True

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
        if request.loop is not None and request.loop not in self._places:
            self._places[request.loop] = Places(deque([0.0] * request.loop.concurrency))
        if request.think_s is None or predecessor is None:
            heapq.heappush(self._due, (request.arrival_s, request.arrival_s, number, request))
        elif ended_s is None:
            self._followers[predecessor] = number, request
        else:
            self._push_follower(number, request, ended_s)

    def _push_follower(self, number: int, request: Request, ended_s: float) -> None:
        assert request.think_s is not None
        due_s = max(request.arrival_s, ended_s + request.think_s)
        heapq.heappush(self._due, (due_s, due_s, number, request))


def refuse_unservable(server: Server, number: int, request: Request) -> None:
    """Raise InputError, naming the request, for one that the server could never serve."""
    if request.prompt_tokens < 1 or request.output_tokens < 1:
        raise InputError(f"request {number}: {request}: both lengths should be 1 or more")
    if request.total_tokens > server.max_model_len:
        raise InputError(
            f"request {number} has {request.total_tokens} tokens, prompt and output; max_model_len is "
            f"{server.max_model_len}; should be at least as many (--max-model-len), or the workload limited (?context=)"
        )
    blocks = -(-(request.total_tokens - 1) // server.block_size)
    if blocks > server.device_blocks:
        raise InputError(
            f"request {number} needs {blocks} blocks of {server.block_size} tokens for its "
            f"{request.total_tokens} tokens; device_blocks is {server.device_blocks}"
        )
