"""Caching policies that keep what was used once apart from what was used again, for any kind of block."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Container, Sequence

from kvpolicy.caching.base import CachingPolicy, Chain, Key

Keys = OrderedDict[Key, None]
STALE = 4
"""Entries of queues, by block of the capacity, at which those of blocks that were lost are removed."""


class Arc(CachingPolicy):
    """Adaptive replacement cache (Megiddo and Modha, FAST 2003).

    Two lists by last use, of blocks used once and of those used again. Blocks that are asked for soon after they were
    given up move the share that each list gets.
    """

    name = "arc"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._once: Keys = OrderedDict()
        self._again: Keys = OrderedDict()
        self._gone_once: Keys = OrderedDict()
        self._gone_again: Keys = OrderedDict()
        self._share = 0.0
        """Blocks that the first list should have."""

    def __contains__(self, key: Key) -> bool:
        return key in self._once or key in self._again

    def __len__(self) -> int:
        return len(self._once) + len(self._again)

    def asked(self, chain: Chain, hits: int) -> None:
        for key in reversed(chain):  # of one prompt the last block is given up first
            if key in self:
                self._once.pop(key, None)
                self._again[key] = None
                self._again.move_to_end(key)
            elif key in self._gone_once:
                step = max(1.0, len(self._gone_again) / len(self._gone_once))
                self._share = min(float(self.capacity), self._share + step)
            elif key in self._gone_again:
                step = max(1.0, len(self._gone_once) / len(self._gone_again))
                self._share = max(0.0, self._share - step)

    def stored(self, chain: Chain, missing: Sequence[int]) -> None:
        for position in reversed(missing):
            key = chain[position]
            known = key in self._gone_once or key in self._gone_again
            self._gone_once.pop(key, None)
            self._gone_again.pop(key, None)
            (self._again if known else self._once)[key] = None

    def evict(self, count: int, protected: Container[Key]) -> list[Key]:
        evicted: list[Key] = []
        passed_over: tuple[Keys, Keys] = (OrderedDict(), OrderedDict())
        lists = (self._once, self._again)
        while len(evicted) < count:
            for held, aside in zip(lists, passed_over, strict=True):
                while held and next(iter(held)) in protected:
                    aside[held.popitem(last=False)[0]] = None
            if not (self._once or self._again):
                break
            from_once = not self._again or (bool(self._once) and len(self._once) + len(passed_over[0]) > self._share)
            key, _ = (self._once if from_once else self._again).popitem(last=False)
            (self._gone_once if from_once else self._gone_again)[key] = None
            evicted.append(key)
        for held, aside in zip(lists, passed_over, strict=True):
            for key in reversed(aside):
                held[key] = None
                held.move_to_end(key, last=False)
        self._trim()
        return evicted

    def lost(self, key: Key) -> None:
        self._once.pop(key, None)
        self._again.pop(key, None)

    def _trim(self) -> None:
        """Remember as many blocks that are gone as the paper does."""
        while self._gone_once and len(self._once) + len(self._gone_once) > self.capacity:
            self._gone_once.popitem(last=False)
        while self._gone_again and len(self) + len(self._gone_once) + len(self._gone_again) > 2 * self.capacity:
            self._gone_again.popitem(last=False)


class S3Fifo(CachingPolicy):
    """S3-FIFO (Yang, Zhang, Qiu, Yue and Vigfusson, SOSP 2023).

    A small queue takes what is new, a tenth of the capacity. Its oldest block moves to the main queue where it was used
    more than once meanwhile, and is given up otherwise. In the main queue a used block goes round again, as often as it
    was used, at most three times. A block that is asked for soon after it left the small queue goes to the main one.
    """

    name = "s3fifo"
    MAX_USES = 3

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._small: deque[Key] = deque()
        self._main: deque[Key] = deque()
        self._uses: dict[Key, int] = {}
        self._in_main: set[Key] = set()
        self._gone: Keys = OrderedDict()

    def __contains__(self, key: Key) -> bool:
        return key in self._uses

    def __len__(self) -> int:
        return len(self._uses)

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
                self._in_main.add(key)
                self._main.append(key)
            else:
                self._small.append(key)
        if len(self._small) + len(self._main) > STALE * max(self.capacity, 16):
            self._small = self._in_order(self._small, main=False)
            self._main = self._in_order(self._main, main=True)

    def _in_order(self, queue: deque[Key], main: bool) -> deque[Key]:
        """The blocks of a queue that are in it, each where it was put last."""
        there = dict.fromkeys(key for key in reversed(queue) if key in self._uses and (key in self._in_main) == main)
        return deque(reversed(there))

    def evict(self, count: int, protected: Container[Key]) -> list[Key]:
        evicted: list[Key] = []
        passed_over: tuple[list[Key], list[Key]] = ([], [])
        while len(evicted) < count and (self._small or self._main):
            small = len(self) - len(self._in_main)
            from_small = bool(self._small) and (small > self.capacity // 10 or not self._main)
            key = (self._small if from_small else self._main).popleft()
            if key not in self._uses or (key in self._in_main) == from_small:
                continue  # lost since
            if key in protected:
                passed_over[not from_small].append(key)
            elif not self._goes_round(key, from_small):
                if from_small:
                    self._gone[key] = None
                self.lost(key)
                evicted.append(key)
        self._small.extendleft(reversed(passed_over[0]))
        self._main.extendleft(reversed(passed_over[1]))
        while len(self._gone) > self.capacity:
            self._gone.popitem(last=False)
        return evicted

    def _goes_round(self, key: Key, from_small: bool) -> bool:
        """Put a block that was used in its queue at the end of the main one; False where it was not."""
        uses = self._uses[key]
        if uses <= from_small:
            return False
        self._uses[key] = 0 if from_small else uses - 1
        self._in_main.add(key)
        self._main.append(key)
        return True

    def lost(self, key: Key) -> None:
        self._uses.pop(key, None)
        self._in_main.discard(key)
