"""Waiting requests, in the order in which they are to be admitted."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from typing import Protocol

from kvpolicy.simulator.base import Scheduling
from kvpolicy.simulator.builtin.live import Live


class Queue(Protocol):
    """What vLLM's ``RequestQueue`` does, as far as it is needed."""

    def __len__(self) -> int: ...

    def append(self, live: Live) -> None: ...

    def first(self) -> Live: ...

    def pop(self) -> Live: ...

    def put_back(self, lives: Iterable[Live]) -> None:
        """To the front, in their order; by rank where ranks decide."""
        ...

    def remove(self, live: Live) -> None: ...


class Fifo:
    """First come, first served."""

    def __init__(self) -> None:
        self._lives: deque[Live] = deque()

    def __len__(self) -> int:
        return len(self._lives)

    def append(self, live: Live) -> None:
        self._lives.append(live)

    def first(self) -> Live:
        return self._lives[0]

    def pop(self) -> Live:
        return self._lives.popleft()

    def put_back(self, lives: Iterable[Live]) -> None:
        self._lives.extendleft(reversed(list(lives)))

    def remove(self, live: Live) -> None:
        self._lives.remove(live)


class Ranked:
    """By priority, then arrival, then number."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, float, int], Live]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def append(self, live: Live) -> None:
        heapq.heappush(self._heap, (live.order, live))

    def first(self) -> Live:
        return self._heap[0][1]

    def pop(self) -> Live:
        return heapq.heappop(self._heap)[1]

    def put_back(self, lives: Iterable[Live]) -> None:
        for live in lives:
            self.append(live)

    def remove(self, live: Live) -> None:
        self._heap.remove((live.order, live))
        heapq.heapify(self._heap)


def queue_for(scheduling: Scheduling) -> Queue:
    return Fifo() if scheduling == "fcfs" else Ranked()
