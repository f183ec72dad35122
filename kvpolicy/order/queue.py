"""Requests in the order of their keys, which may change while they wait."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator
from itertools import count
from typing import Any, Generic, TypeVar

R = TypeVar("R", bound=Hashable)


class OrderedQueue(Generic[R]):
    """A priority queue that looks keys up. Each operation takes O(log n), on average; iteration sorts."""

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
        return iter(sorted(self._keys, key=self._keys.__getitem__))

    def append(self, request: R) -> None:
        """Add a request, or take note of its new key."""
        key = self._keys[request] = self._key(request)
        heapq.heappush(self._heap, (key, next(self._numbers), request))

    def first(self) -> R:
        heap = self._heap
        while True:
            key, _, request = heap[0]
            if self._keys.get(request) == key:
                return request
            heapq.heappop(heap)

    def pop(self) -> R:
        request = self.first()
        del self._keys[request]
        heapq.heappop(self._heap)
        return request

    def remove(self, request: R) -> None:
        del self._keys[request]
