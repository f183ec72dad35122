"""Caching policies that keep what was used once apart from what was used again, for any kind of block."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence

from kvpolicy.caching.base import Chain, Key
from kvpolicy.caching.eviction_queue import ByQueues

Keys = OrderedDict[Key, None]


class Arc(ByQueues):
    """Adaptive replacement cache (Megiddo and Modha, FAST 2003).

    Two lists by last use, of blocks used once and of those used again. Blocks that are asked for soon after they were
    given up move the share that each list gets.

    The paper handles one page at a time, which takes its place at once. Here a prompt's blocks move the share when it
    is asked for, before any of them is stored; and where nobody says what room is made for, a tie of the first list and
    its share goes as for a block that was not remembered.
    """

    name = "arc"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, queues=2)
        self._once, self._again = self._queues
        self._gone_once: Keys = OrderedDict()
        self._gone_again: Keys = OrderedDict()
        self._share = 0.0
        """Blocks that the first list should have."""
        self._returning: set[Key] = set()
        """Of the blocks that are gone, those that were asked for since: the share was moved for them, and is not moved
        again before they are stored, which a block that the device still has is not."""

    def __contains__(self, key: Key) -> bool:
        return key in self._once or key in self._again

    def asked(self, chain: Chain, hits: int) -> None:
        for key in reversed(chain):  # of one prompt the last block is given up first
            if key in self:
                self._once.remove(key)
                self._again.put(key)
            elif key in self._returning:
                pass
            elif key in self._gone_once:
                self._returning.add(key)
                step = max(1.0, len(self._gone_again) / len(self._gone_once))
                self._share = min(float(self.capacity), self._share + step)
            elif key in self._gone_again:
                self._returning.add(key)
                step = max(1.0, len(self._gone_once) / len(self._gone_again))
                self._share = max(0.0, self._share - step)

    def stored(self, chain: Chain, missing: Sequence[int]) -> None:
        for position in reversed(missing):
            key = chain[position]
            known = key in self._gone_once or key in self._gone_again
            self._gone_once.pop(key, None)
            self._gone_again.pop(key, None)
            self._returning.discard(key)
            (self._again if known else self._once).put(key)
        self._trim()

    def evict(self, count: int, protected: Container[Key]) -> list[Key]:
        return self._evict([False] * count, protected)

    def make_room(self, count: int, protected: Container[Key], newcomers: Sequence[Key]) -> list[Key]:
        missed = [key in self._gone_again for key in self._replacing(count, newcomers)]
        return self._evict(missed + [False] * (count - len(missed)), protected)

    def _evict(self, missed: Sequence[bool], protected: Container[Key]) -> list[Key]:
        """Give up one block for each of these: whether it is for one that was used again and given up."""
        evicted: list[Key] = []
        while len(evicted) < len(missed):
            once, again = self._once.first(protected), self._again.first(protected)
            over = len(self._once) - self._share
            from_once = again is None or (once is not None and (over > 0 or (over == 0 and missed[len(evicted)])))
            key = once if from_once else again
            if key is None:
                break
            (self._gone_once if from_once else self._gone_again)[key] = None
            self.lost(key)
            evicted.append(key)
        self._take_back()
        self._trim()
        return evicted

    def _trim(self) -> None:
        """Remember as many blocks that are gone as the paper does."""
        while self._gone_once and len(self._once) + len(self._gone_once) > self.capacity:
            self._returning.discard(self._gone_once.popitem(last=False)[0])
        while self._gone_again and len(self) + len(self._gone_once) + len(self._gone_again) > 2 * self.capacity:
            self._returning.discard(self._gone_again.popitem(last=False)[0])


class S3Fifo(ByQueues):
    """S3-FIFO (Yang, Zhang, Qiu, Yue and Vigfusson, SOSP 2023).

    A small queue takes what is new, a tenth of the capacity. Its oldest block moves to the main queue where it was used
    more than once meanwhile, and is given up otherwise. In the main queue a used block goes round again, as often as it
    was used, at most three times. A block that is stored again soon after it left the small queue goes to the main one:
    as many of those are remembered as the main queue is to have.

    The paper evicts from the small queue while that has a tenth of the capacity or more, whatever the main queue has;
    here also where that has none to give up, as all its blocks are protected.
    """

    name = "s3fifo"
    MAX_USES = 3

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, queues=2)
        self._small, self._main = self._queues
        self._uses: dict[Key, int] = {}
        self._gone: Keys = OrderedDict()

    def __contains__(self, key: Key) -> bool:
        return key in self._uses

    def asked(self, chain: Chain, hits: int) -> None:
        for key in chain:
            if key in self._uses:
                self._uses[key] = min(self.MAX_USES, self._uses[key] + 1)

    def stored(self, chain: Chain, missing: Sequence[int]) -> None:
        for position in reversed(missing):
            key = chain[position]
            self._uses[key] = 0
            if key in self._gone:
                del self._gone[key]
                self._main.put(key)
            else:
                self._small.put(key)

    def evict(self, count: int, protected: Container[Key]) -> list[Key]:
        evicted: list[Key] = []
        while len(evicted) < count:
            small, main = self._small.first(protected), self._main.first(protected)
            from_small = main is None or (small is not None and 10 * len(self._small) >= self.capacity)
            key = small if from_small else main
            if key is None:
                break
            if not self._goes_round(key, from_small):
                if from_small:
                    self._gone[key] = None
                self.lost(key)
                evicted.append(key)
        self._take_back()
        while 10 * len(self._gone) > 9 * self.capacity:
            self._gone.popitem(last=False)
        return evicted

    def _goes_round(self, key: Key, from_small: bool) -> bool:
        """Put a block that was used in its queue at the end of the main one; False where it was not."""
        uses = self._uses[key]
        if uses <= from_small:
            return False
        self._uses[key] = 0 if from_small else uses - 1
        self._small.remove(key)
        self._main.put(key)
        return True

    def lost(self, key: Key) -> None:
        super().lost(key)
        self._uses.pop(key, None)
