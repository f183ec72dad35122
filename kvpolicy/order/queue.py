"""Requests in the order of their keys, which may change while they wait."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import count
from typing import Any, Generic, TypeVar

R = TypeVar("R", bound=Hashable)
MAX_VOID = 16
"""Void entries beside as many entries as there are requests, before they are removed."""


class OrderedQueue(Generic[R]):
    """A priority queue that looks keys up. Each operation takes O(log n), on average; keys of requests differ."""

    def __init__(self, key: Callable[[R], Any]) -> None:
        self._key = key
        self._heap: list[tuple[Any, int, R]] = []
        self._keys: dict[R, Any] = {}
        """Valid keys: an entry of the heap with another key is void."""
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, request: object) -> bool:
        return request in self._keys

    def __iter__(self) -> Iterator[R]:
        """Requests in order, those left out that are removed meanwhile. Reading the first few costs no sorting."""
        heap, seen = self._heap.copy(), set[R]()
        while heap:
            key, _, request = heapq.heappop(heap)
            if request not in seen and self._is_valid(request, key):
                seen.add(request)
                yield request

    def append(self, request: R) -> None:
        """Add a request, or take note of its new key."""
        key = self._keys[request] = self._key(request)
        heapq.heappush(self._heap, (key, next(self._numbers), request))
        self._clear()

    def renew(self, changed: Iterable[R]) -> None:
        """Take note of the new keys of those that are in the queue."""
        if self._keys:
            for request in filter(self._keys.__contains__, changed):
                self.append(request)

    def first(self) -> R:
        heap = self._heap
        while True:
            key, _, request = heap[0]
            if self._is_valid(request, key):
                return request
            heapq.heappop(heap)

    def pop(self) -> R:
        request = self.first()
        del self._keys[request]
        heapq.heappop(self._heap)
        self._clear()
        return request

    def remove(self, request: R) -> None:
        del self._keys[request]
        self._clear()

    def _clear(self) -> None:
        """Remove void entries once they are in the majority."""
        if len(self._heap) > 2 * len(self._keys) + MAX_VOID:
            self._heap = [(key, number, request) for key, number, request in self._heap if self._is_valid(request, key)]
            heapq.heapify(self._heap)

    def _is_valid(self, request: R, key: Any) -> bool:
        return bool(self._keys.get(request) == key)
