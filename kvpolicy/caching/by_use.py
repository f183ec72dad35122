"""Caching policies that go by the times and the number of uses alone."""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Container, Sequence

from kvpolicy.caching.base import Chain, Key, Part
from kvpolicy.caching.eviction_queue import ByQueues, Rank

Use = Rank
"""Blocks with the least one are given up first."""
REMEMBERED = 4
"""Blocks that are not there and whose last use is remembered, by block of the capacity."""


class ByLastUse(ByQueues):
    """Gives up the block with the least :meth:`use`, as of the last prompt that it was in; among equals the one that
    was stored or asked for first, whatever the keys are.

    A block is stored long after it was used, as when the device loses it: it has the use that is remembered, and what
    was generated that of its prompt. It is never more recent than the block that it continues, where that is there, so
    that of a prompt the last block goes first whenever its blocks were stored.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, queues=1)
        self._prompts = 0
        (self._blocks,) = self._queues
        self._last: dict[Key, int] = {}
        """The prompt that used a block last that is there."""
        self._absent: OrderedDict[Key, int] = OrderedDict()
        """The prompt that used a block last that is not there; what was noted first is forgotten first."""

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
                self._last[key] = self._prompts
                self._blocks.put(key, self.use(before, self._prompts, position))
            else:
                self._note(key, self._prompts)
        self._trim(len(chain))

    def extended(self, chain: Chain, asked: int) -> None:
        prompt = self._last_use(chain[asked - 1]) if asked else None
        for key in chain[asked:]:
            if key not in self:
                self._note(key, self._prompts if prompt is None else prompt)
        self._trim(len(chain))

    def stored(self, chain: Chain, missing: Sequence[int]) -> None:
        first = chain.first if isinstance(chain, Part) else 0
        for position in missing:
            key, parent = chain[position], chain[position - 1] if position else None
            continued = None if parent is None else self._last_use(parent)
            prompt = self._absent.pop(key, self._prompts if continued is None else continued)
            if parent in self and continued is not None:
                prompt = min(prompt, continued)
            self._last[key] = prompt
            self._blocks.put(key, self.use(None, prompt, first + position))

    def _last_use(self, key: Key) -> int | None:
        """The prompt that used a block last; None where that is not known."""
        return self._last.get(key, self._absent.get(key))

    def _note(self, key: Key, prompt: int) -> None:
        self._absent[key] = prompt
        self._absent.move_to_end(key)

    def _trim(self, more: int = 0) -> None:
        """Remember no more than is to be, and ``more``: those that were noted last."""
        while len(self._absent) > REMEMBERED * self.capacity + more:
            self._absent.popitem(last=False)

    def lost(self, key: Key) -> None:
        last = self._last.pop(key, None)
        if last is not None:
            self._note(key, last)
        super().lost(key)
        self._trim()

    def evict(self, count: int, protected: Container[Key]) -> list[Key]:
        evicted: list[Key] = []
        while len(evicted) < count and (key := self._blocks.first(protected)) is not None:
            self.lost(key)
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
