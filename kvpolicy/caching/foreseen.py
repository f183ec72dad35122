"""Belady's rule as a caching policy, for simulations that know the prompts to come: a reference that no server has."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from heapq import heappop, heappush
from math import inf

from kvpolicy.caching.base import CachingPolicy, Chain, Key

Rank = tuple[float, int]
"""Of a block, by which the lowest is given up: minus the prompts until it is asked for, and minus its place. By price
the prompts are over it."""


class Foreseen(CachingPolicy):
    """Gives up, of the blocks that no other one there continues, the one that is asked for last, and stores none that
    is asked for after those, or never.

    Its owner calls :meth:`served` as well, for every prompt that has what it found: until then what the prompt asks for
    is needed, however long it has waited. What is to be stored is passed to :meth:`make_room` as :meth:`in_order` has
    it.

    ``chains``: all prompts that will be asked for, in about the order in which they will be. ``price``: seconds saved
    by a block that need not be computed, by its position in the prompt, where blocks go by the prompts until they are
    asked for over their price.
    """

    name = "hindsight"

    def __init__(self, capacity: int, chains: Iterable[Chain], price: Callable[[int], float] | None = None) -> None:
        super().__init__(capacity)
        self._price = price
        self._uses: dict[Key, deque[int]] = {}
        """By block, the numbers of the prompts that have still to be served with it."""
        self._place: dict[Key, tuple[int, Key | None]] = {}
        """The position of each block, and the one before it."""
        for number, chain in enumerate(chains):
            before: Key | None = None
            for position, key in enumerate(chain):
                self._place[key] = position, before
                self._uses.setdefault(key, deque()).append(number)
                before = key
        self._served = 0
        self._there: set[Key] = set()
        self._children: dict[Key, int] = {}
        self._heap: list[tuple[Rank, int, Key]] = []
        self._entry: dict[Key, int] = {}
        """Number of the entry of a block in the heap that counts."""
        self._pushed = 0

    def __contains__(self, key: Key) -> bool:
        return key in self._there

    def __len__(self) -> int:
        return len(self._there)

    def asked(self, chain: Chain, hits: int) -> None:
        """Nothing: all prompts are known."""

    def served(self, chain: Chain) -> None:
        """A request with this prompt has what it found of it, and needs nothing further of it."""
        self._served += 1
        for key in chain:
            if self._uses.get(key):
                self._uses[key].popleft()
            if key in self._there:
                self._offer(key)

    def stored(self, chain: Chain, missing: Sequence[int]) -> None:
        for position in missing:
            key = chain[position]
            if key not in self._place:
                self._place[key] = position, chain[position - 1] if position else None
            self._there.add(key)
            parent = self._place[key][1]
            if parent is not None:
                self._children[parent] = self._children.get(parent, 0) + 1
            self._offer(key)

    def in_order(self, newcomers: Sequence[Key]) -> list[Key]:
        """These blocks, which come in the order of their positions, those first that are needed most; each behind those
        that it continues, as it is worth no more than they are."""
        worth: dict[Key, float] = {}
        for key in newcomers:
            _, parent = self._place.get(key, (0, None))
            worth[key] = min(self._rank(key)[0], worth.get(parent, inf))
        return sorted(newcomers, key=worth.__getitem__, reverse=True)

    def evict(self, count: int, protected: Container[Key]) -> list[Key]:
        return self._evict([(inf, 0)] * count, protected)

    def make_room(self, count: int, protected: Container[Key], newcomers: Sequence[Key]) -> list[Key]:
        """See :class:`CachingPolicy`. The first one that is needed less than all that is there ends it: all behind it
        are, too."""
        return self._evict([self._rank(key) for key in self._replacing(count, newcomers)], protected)

    def lost(self, key: Key) -> None:
        if key not in self._there:
            return
        self._there.remove(key)
        parent = self._place[key][1]
        if parent is not None:
            self._children[parent] -= 1
            if not self._children[parent]:
                del self._children[parent]
                if parent in self._there:
                    self._offer(parent)

    def _rank(self, key: Key) -> Rank:
        uses, position = self._uses.get(key), self._place.get(key, (0, None))[0]
        if not uses:
            return -inf, -position
        if self._price is None:
            return -uses[0], -position
        price = self._price(position)
        prompts = max(1, uses[0] - self._served)
        return -prompts / price if price > 0 else -inf, -position

    def _offer(self, key: Key) -> None:
        if key not in self._children:
            self._pushed += 1
            self._entry[key] = self._pushed
            heappush(self._heap, (self._rank(key), self._pushed, key))

    def _evict(self, below: Sequence[Rank], protected: Container[Key]) -> list[Key]:
        """Give up one block for each of these ranks, as long as it is lower than that."""
        evicted: list[Key] = []
        passed_over = []
        while len(evicted) < len(below) and self._heap:
            entry = heappop(self._heap)
            rank, number, key = entry
            if key not in self._there or key in self._children or number != self._entry[key]:
                continue
            if (now := self._rank(key)) != rank:  # by price ranks rise with every prompt that is served
                heappush(self._heap, (now, number, key))
                continue
            if key in protected or rank[0] >= below[len(evicted)][0]:
                passed_over.append(entry)
                if rank[0] >= below[len(evicted)][0]:
                    break
                continue
            self.lost(key)
            evicted.append(key)
        for entry in passed_over:
            heappush(self._heap, entry)
        return evicted
