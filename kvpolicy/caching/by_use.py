"""Caching policies that go by the times and the number of uses alone."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Container, Sequence
from heapq import heapify, heappop, heappush

from kvpolicy.caching.base import CachingPolicy, Chain, Key

Use = tuple[int, ...]
"""Blocks with the least one are given up first."""
STALE = 4
"""Entries of the heap per block at which outdated ones are removed."""


class ByLastUse(CachingPolicy):
    """Gives up the block with the least :meth:`use`, as of the last prompt that it was in; among equals the one that
    was stored or asked for first, whatever the keys are."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._prompts = 0
        self._count = 0
        self._use: dict[Key, tuple[Use, int]] = {}
        """Of each block there its use, and the number of the heap's entry for that."""
        self._heap: list[tuple[Use, int, Key]] = []

    def __contains__(self, key: Key) -> bool:
        return key in self._use

    def __len__(self) -> int:
        return len(self._use)

    @abstractmethod
    def use(self, before: Use | None, prompt: int, position: int) -> Use:
        """What a block is given up by. ``before``: None for one that was not there; ``prompt``: number of the prompt,
        rising."""

    def asked(self, chain: Chain, hits: int) -> None:
        self._prompts += 1
        for position, key in enumerate(chain):
            if key in self._use:
                self._used(key, self.use(self._use[key][0], self._prompts, position))

    def stored(self, chain: Chain, missing: Sequence[int]) -> None:
        for position in missing:
            self._used(chain[position], self.use(None, self._prompts, position))

    def _used(self, key: Key, use: Use) -> None:
        self._count += 1
        self._use[key] = use, self._count
        if len(self._heap) > STALE * max(self.capacity, 16):
            self._heap = [(use, number, key) for key, (use, number) in self._use.items()]
            heapify(self._heap)
        else:
            heappush(self._heap, (use, self._count, key))

    def evict(self, count: int, protected: Container[Key]) -> list[Key]:
        evicted: list[Key] = []
        passed_over = []
        while len(evicted) < count and self._heap:
            entry = use, number, key = heappop(self._heap)
            if self._use.get(key) != (use, number):
                continue
            if key in protected:
                passed_over.append(entry)
            else:
                del self._use[key]
                evicted.append(key)
        for entry in passed_over:
            heappush(self._heap, entry)
        return evicted

    def lost(self, key: Key) -> None:
        self._use.pop(key, None)


class Lru(ByLastUse):
    """The one whose last use is longest ago; of one prompt the last block first."""

    name = "lru"

    def use(self, before: Use | None, prompt: int, position: int) -> Use:
        return prompt, -position


class Lfu(ByLastUse):
    """The one that the fewest prompts have used since it was stored; among equals as :class:`Lru`."""

    name = "lfu"

    def use(self, before: Use | None, prompt: int, position: int) -> Use:
        return 1 if before is None else before[0] + 1, prompt, -position
