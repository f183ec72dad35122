"""Belady's rule as a caching policy, for simulations that know the prompts to come: a reference that no server has."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Sequence
from heapq import heappop, heappush
from math import inf

from kvpolicy.caching.base import CachingPolicy, Chain, Key


class Foreseen(CachingPolicy):
    """Gives up, of the blocks that no other one there continues, the one that is asked for last, and stores none that
    is asked for after those, or never.

    It takes a prompt for served when it is asked for: what one that waits needs may be given up.

    ``chains``: all prompts that will be asked for, in about the order in which they will be.
    """

    name = "hindsight"

    def __init__(self, capacity: int, chains: Iterable[Chain]) -> None:
        super().__init__(capacity)
        self._uses: dict[Key, deque[int]] = {}
        """By block, the numbers of the prompts that have still to ask for it."""
        for number, chain in enumerate(chains):
            for key in chain:
                self._uses.setdefault(key, deque()).append(number)
        self._parent: dict[Key, Key | None] = {}
        """Of the blocks that are there."""
        self._children: dict[Key, int] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._pushed = 0

    def __contains__(self, key: Key) -> bool:
        return key in self._parent

    def __len__(self) -> int:
        return len(self._parent)

    def asked(self, chain: Chain, hits: int) -> None:
        for key in chain:
            if self._uses.get(key):
                self._uses[key].popleft()
            if key in self._parent:
                self._offer(key)

    def stored(self, chain: Chain, missing: Sequence[int]) -> None:
        for position in missing:
            key, parent = chain[position], chain[position - 1] if position else None
            self._parent[key] = parent
            if parent is not None:
                self._children[parent] = self._children.get(parent, 0) + 1
            self._offer(key)

    def evict(self, count: int, protected: Container[Key]) -> list[Key]:
        return self._evict([-inf] * count, protected)

    def make_room(self, count: int, protected: Container[Key], newcomers: Sequence[Key]) -> list[Key]:
        return self._evict([self._next(key) for key in newcomers[max(0, len(newcomers) - count) :]], protected)

    def lost(self, key: Key) -> None:
        if key not in self._parent:
            return
        parent = self._parent.pop(key)
        if parent is not None:
            self._children[parent] -= 1
            if not self._children[parent]:
                del self._children[parent]
                if parent in self._parent:
                    self._offer(parent)

    def _next(self, key: Key) -> float:
        uses = self._uses.get(key)
        return uses[0] if uses else inf

    def _offer(self, key: Key) -> None:
        if key not in self._children:
            self._pushed += 1
            heappush(self._heap, (-self._next(key), -self._pushed, key))

    def _evict(self, before: Sequence[float], protected: Container[Key]) -> list[Key]:
        """Give up one block for each of these numbers, as long as it is asked for by a later prompt than that."""
        evicted: list[Key] = []
        passed_over = []
        while len(evicted) < len(before) and self._heap:
            entry = heappop(self._heap)
            later, key = -entry[0], entry[2]
            if key not in self._parent or key in self._children or later != self._next(key):
                continue
            if later <= before[len(evicted)]:
                passed_over.append(entry)
                break
            if key in protected:
                passed_over.append(entry)
                continue
            self.lost(key)
            evicted.append(key)
        for entry in passed_over:
            heappush(self._heap, entry)
        return evicted
