"""Queues of blocks in the order in which they are given up, for caching policies that go by uses: one or more each."""

from __future__ import annotations

from collections.abc import Container, KeysView
from heapq import heapify, heappop, heappush

from kvpolicy.caching.base import CachingPolicy, Key

Rank = tuple[int, ...]
STALE = 4
"""Entries of a heap per block at which outdated ones are removed."""


class Queue:
    """Blocks by rank, the lowest first, and among equals the one that was put there first, whatever the keys are.

    ``held``: blocks that are held back, in this queue or not, which its owner changes. They keep their places, but
    leave the heap when they come to its top: else whoever looks for the first block would pass over all of them, every
    time.
    """

    def __init__(self, held: Container[Key]) -> None:
        self._held = held
        self._place: dict[Key, tuple[Rank, int]] = {}
        """Of each block its rank and a number that rises."""
        self._count = 0
        self._heap: list[tuple[Rank, int, Key]] = []
        """An entry of each block, of some twice, among outdated ones."""
        self._aside: set[Key] = set()
        """Blocks that have none, as they were held when they came to the top."""
        self._passed_over: list[tuple[Rank, int, Key]] = []

    def __contains__(self, key: object) -> bool:
        return key in self._place

    def __len__(self) -> int:
        return len(self._place)

    def keys(self) -> KeysView[Key]:
        return self._place.keys()

    def rank(self, key: Key) -> Rank | None:
        """None for a block that is not there."""
        place = self._place.get(key)
        return None if place is None else place[0]

    def put(self, key: Key, rank: Rank = ()) -> None:
        """Put a block at the place of this rank, wherever it was before."""
        self._count += 1
        self._place[key] = rank, self._count
        self._aside.discard(key)
        self._push((rank, self._count, key))

    def remove(self, key: Key) -> None:
        self._place.pop(key, None)
        self._aside.discard(key)

    def first(self, protected: Container[Key]) -> Key | None:
        """The first block that is neither held nor protected; None where there is none. Protected ones before it are
        passed over until :meth:`take_back`."""
        while self._heap:
            entry = self._heap[0]
            key = entry[2]
            place = self._place.get(key)
            if place is None or place[1] != entry[1]:
                heappop(self._heap)
            elif key in self._held:
                heappop(self._heap)
                self._aside.add(key)
            elif key in protected:
                self._passed_over.append(heappop(self._heap))
            else:
                return key
        return None

    def take_back(self) -> None:
        """Those that were passed over are looked at again."""
        for entry in self._passed_over:
            heappush(self._heap, entry)
        self._passed_over.clear()

    def freed(self, key: Key) -> None:
        """A block is held no longer. Without effect for one that is not in this queue."""
        if key in self._aside:
            self._aside.remove(key)
            self._push((*self._place[key], key))

    def _push(self, entry: tuple[Rank, int, Key]) -> None:
        heappush(self._heap, entry)
        if len(self._heap) > STALE * max(len(self._place), 16):
            self._heap = [(*place, key) for key, place in self._place.items()]
            heapify(self._heap)
            self._aside.clear()


class ByQueues(CachingPolicy):
    """A policy that gives up the first block of one of its queues, of which there are so many."""

    def __init__(self, capacity: int, queues: int) -> None:
        super().__init__(capacity)
        self._held: set[Key] = set()
        self._queues = tuple(Queue(self._held) for _ in range(queues))

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def hold_began(self, key: Key) -> None:
        self._held.add(key)

    def hold_ended(self, key: Key) -> None:
        self._held.discard(key)
        for queue in self._queues:
            queue.freed(key)

    def lost(self, key: Key) -> None:
        for queue in self._queues:
            queue.remove(key)

    def _take_back(self) -> None:
        for queue in self._queues:
            queue.take_back()
