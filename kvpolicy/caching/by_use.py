"""Caching policies that go by the times and the number of uses alone."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Container, Sequence

from kvpolicy.caching.base import Chain, Key, Part
from kvpolicy.caching.eviction_queue import ByQueues, Rank

Use = Rank
"""Blocks with the least one are given up first."""


class ByLastUse(ByQueues):
    """Gives up the block with the least :meth:`use`, as of the last prompt that it was in; among equals the one that
    was stored or asked for first, whatever the keys are."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, queues=1)
        self._prompts = 0
        (self._blocks,) = self._queues

    def __contains__(self, key: Key) -> bool:
        return key in self._blocks

    @abstractmethod
    def use(self, before: Use | None, prompt: int, position: int) -> Use:
        """What a block is given up by. ``before``: None for one that was not there; ``prompt``: number of the prompt,
        rising."""

    def asked(self, chain: Chain, hits: int) -> None:
        self._prompts += 1
        for position, key in enumerate(chain):
            before = self._blocks.rank(key)
            if before is not None:
                self._blocks.put(key, self.use(before, self._prompts, position))

    def stored(self, chain: Chain, missing: Sequence[int]) -> None:
        first = chain.first if isinstance(chain, Part) else 0
        for position in missing:
            self._blocks.put(chain[position], self.use(None, self._prompts, first + position))

    def evict(self, count: int, protected: Container[Key]) -> list[Key]:
        evicted: list[Key] = []
        while len(evicted) < count and (key := self._blocks.first(protected)) is not None:
            self._blocks.remove(key)
            evicted.append(key)
        self._take_back()
        return evicted


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
