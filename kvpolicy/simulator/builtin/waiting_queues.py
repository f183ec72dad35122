"""vLLM's queues of waiting requests: first come, first served, and by priority.

The scheduler makes them where vLLM's own order serves; see :mod:`kvpolicy.simulator.builtin.ordering` for the others.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from typing import Protocol

from kvpolicy.simulator.base import Scheduling
from kvpolicy.simulator.builtin.live_request import LiveRequest


class Queue(Protocol):
    """The part of vLLM's ``RequestQueue`` that the scheduler needs."""

    def __len__(self) -> int: ...

    def append(self, live: LiveRequest) -> None: ...

    def first(self) -> LiveRequest: ...

    def pop(self) -> LiveRequest: ...

    def put_back(self, lives: Iterable[LiveRequest]) -> None:
        """Return requests to the front in their order, or to their rank in a ranked queue."""
        ...

    def remove(self, live: LiveRequest) -> None: ...


class Fifo:
    """First come, first served."""

    def __init__(self) -> None:
        self._lives: deque[LiveRequest] = deque()

    def __len__(self) -> int:
        return len(self._lives)

    def append(self, live: LiveRequest) -> None:
        self._lives.append(live)

    def first(self) -> LiveRequest:
        return self._lives[0]

    def pop(self) -> LiveRequest:
        return self._lives.popleft()

    def put_back(self, lives: Iterable[LiveRequest]) -> None:
        self._lives.extendleft(reversed(list(lives)))

    def remove(self, live: LiveRequest) -> None:
        self._lives.remove(live)


class Ranked:
    """By priority, then arrival, then number."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, float, int], LiveRequest]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def append(self, live: LiveRequest) -> None:
        heapq.heappush(self._heap, (live.order, live))

    def first(self) -> LiveRequest:
        return self._heap[0][1]

    def pop(self) -> LiveRequest:
        return heapq.heappop(self._heap)[1]

    def put_back(self, lives: Iterable[LiveRequest]) -> None:
        for live in lives:
            self.append(live)

    def remove(self, live: LiveRequest) -> None:
        self._heap.remove((live.order, live))
        heapq.heapify(self._heap)


def queue_for(scheduling: Scheduling) -> Queue:
    return Fifo() if scheduling == "fcfs" else Ranked()
