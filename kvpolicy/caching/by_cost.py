"""The caching policy that gives up what saves least: the chance that a block is asked for again, times its price."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Sequence
from math import inf
from statistics import fmean

from kvpolicy.caching.base import CachingPolicy, Chain, Key, Part
from kvpolicy.caching.returns import Class, Returns, Visit

SAMPLE = 32
"""Blocks that are compared for each that is given up."""
REMEMBERED = 4
"""Blocks that are gone and remembered, by block of the capacity."""
MAX_CLASS = 4
"""Turns and uses are told apart up to 2 to the power of this, by powers of 2 as the lengths of prompts are."""


class Record:
    """What is known of a block."""

    __slots__ = ("behind", "is_old", "name", "position", "turn", "uses", "visit")

    def __init__(self, position: int) -> None:
        self.position, self.uses, self.turn = position, 0, 0
        self.behind = 0
        """Blocks of the prompt that it was generated behind; 0 for one that a prompt has asked for, or an unknown one.
        """
        self.is_old = False
        """Whether nothing is known of its prompt: it is taken for an old one."""
        self.name: Class = None
        self.visit: Visit


def class_of(turn: int, uses: int, blocks: int) -> Class:
    """Of a block that so many prompts have used, the last of which was of that turn and had so many blocks."""
    return min(MAX_CLASS, turn.bit_length()), min(MAX_CLASS, uses.bit_length()), blocks.bit_length()


def _turn(records: Sequence[Record]) -> int:
    """Of a prompt with these blocks: the last one that was asked for before says whose next turn it is."""
    asked = 0
    for record in records:
        if not record.uses:
            break
        asked += 1
    return records[asked - 1].turn + 1 if asked else 1


def _alike(records: Sequence[Record]) -> list[list[Record]]:
    """Blocks in a row with one history, as those of a shared prefix have, together: what is learned of them, and their
    new class, is the same."""
    runs: list[list[Record]] = []
    uses, visit, name = -1, None, None
    for record in records:
        if record.uses == uses and (not uses or (record.visit is visit and record.name == name)):
            runs[-1].append(record)
        else:
            uses, name, visit = record.uses, record.name, record.visit if record.uses else None
            runs.append([record])
    return runs


class ByCost(CachingPolicy):
    """Gives up the block with the lowest product of :meth:`Returns.rate` and its price.

    Only a block that no other one there continues may go, since a hit is a chain's leading blocks. Of those, ``SAMPLE``
    drawn at random are compared. A block's class is how many turns the conversation has that it is of, as far as one
    prompt continues another where that one ended, how many prompts have used the block, and how long the last one was.

    ``price``: seconds saved by a block that need not be computed, by its position in the prompt. All blocks have the
    same bytes.
    """

    name = "cost"

    def __init__(self, capacity: int, price: Callable[[int], float] = lambda position: 1.0, seed: int = 0) -> None:
        super().__init__(capacity)
        self._price = price
        self._rng = random.Random(seed)
        self._returns = Returns()
        self._there: dict[Key, Record] = {}
        self._gone: OrderedDict[Key, Record] = OrderedDict()
        self._parent: dict[Key, Key | None] = {}
        self._children: dict[Key, int] = {}
        """Number of blocks there that continue a block, which need not be there itself."""
        self._old_behind: dict[Key, Key] = {}
        """By block, the last one there that continues it and is taken for an old one."""
        self._leaves: list[Key] = []
        self._leaf_at: dict[Key, int] = {}
        self._held: set[Key] = set()
        self._free_leaves: set[Key] = set()
        """Leaves that are not held."""

    def __contains__(self, key: Key) -> bool:
        return key in self._there

    def __len__(self) -> int:
        return len(self._there)

    def reprice(self, price: Callable[[int], float]) -> None:
        """Go by these prices from now on."""
        self._price = price

    def asked(self, chain: Chain, hits: int) -> None:
        records = self._records(chain)
        turn = _turn(records)
        if records:
            records[-1].turn = turn
        counts: dict[Class, int] = {}
        for run in _alike(records):
            uses, name = run[0].uses + 1, class_of(turn, run[0].uses + 1, len(chain))
            if run[0].uses:
                self._returns.returned(run[0].visit, run[0].name, len(run))
            counts[name] = counts.get(name, 0) + len(run)
            for record in run:
                record.uses, record.name, record.behind, record.is_old = uses, name, 0, False
        visit = self._returns.visit(counts)
        for record in records:
            record.visit = visit
        self._trim(2 * REMEMBERED * self.capacity + len(chain))

    def extended(self, chain: Chain, asked: int) -> None:
        """What a request has generated is of the turn, and the visit, of its prompt; of the last visit where its prompt
        has no block, or was forgotten."""
        if asked >= len(chain):
            return
        prompt = self._known(chain[asked - 1]) if asked else None
        turn = 1 if prompt is None else prompt.turn
        visit = self._returns.latest if prompt is None else prompt.visit
        for position in range(asked, len(chain)):
            record = self._record(chain[position], position)
            if not record.uses or record.is_old:
                self._generated(record, turn, visit, asked)
        record.turn = turn

    def _generated(self, record: Record, turn: int, visit: Visit, behind: int) -> None:
        """A block was generated in that turn, behind a prompt of so many blocks."""
        if record.is_old:
            self._returns.leave(record.visit, record.name)
        record.uses, record.name, record.visit, record.is_old = 1, class_of(turn, 1, behind), visit, False
        record.behind = behind
        self._returns.join(visit, record.name)

    def _records(self, chain: Chain) -> list[Record]:
        """Of each block, by :meth:`_record`, written out: a prompt may have many blocks. They are forgotten after all
        others."""
        there, gone, records = self._there, self._gone, []
        for position, key in enumerate(chain):
            record = there.get(key)
            if record is None:
                record = gone.get(key)
                if record is None:
                    record = gone[key] = Record(position)
                else:
                    gone.move_to_end(key)
            records.append(record)
        return records

    def _record(self, key: Key, position: int) -> Record:
        found = self._known(key)
        if found is None:
            found = self._gone[key] = Record(position)
        return found

    def _known(self, key: Key) -> Record | None:
        return self._there.get(key) or self._gone.get(key)

    def _place(self, chain: Chain, position: int) -> int:
        """Of a block in its prompt, of which the chain may be a part that begins later and may not say where."""
        if isinstance(chain, Part):
            return chain.first + position
        before = self._known(chain[position - 1]) if position else None
        return position if before is None else before.position + 1

    def _unasked(self, record: Record, chain: Chain, position: int) -> None:
        """A block was stored that no prompt has asked for, or that was forgotten since. It is taken for one that was
        generated behind the block before it, and where nothing is known of that, for an old one, until that is stored,
        too."""
        before = self._known(chain[position - 1]) if position else None
        if before is not None and not before.is_old:
            self._continues(record, before)
            return
        if not record.is_old:
            record.uses, record.name, record.is_old = 1, class_of(1, 1, record.position + 1), True
            record.visit = self._returns.old_visit(record.name)
        if position:
            self._old_behind[chain[position - 1]] = chain[position]

    def _continues(self, record: Record, before: Record) -> None:
        """A block was generated behind that one, which ends its prompt or was generated itself."""
        turn = before.turn or 1
        self._generated(record, turn, before.visit, before.behind or before.position + 1)
        record.turn = turn
        if before.behind:
            before.turn = 0

    def _now_known(self, key: Key) -> None:
        """What continues a block that is known now, and was taken for old ones, continues it."""
        while (behind := self._old_behind.pop(key, None)) is not None:
            record = self._there.get(behind)
            if record is None or not record.is_old:
                return
            self._continues(record, self._there[key])
            key = behind

    def stored(self, chain: Chain, missing: Sequence[int]) -> None:
        for position in missing:
            key = chain[position]
            record = self._gone.pop(key) if key in self._gone else Record(self._place(chain, position))
            self._there[key] = record
            if record.is_old or not record.uses:
                self._unasked(record, chain, position)
            if not record.is_old:
                self._now_known(key)
            parent = self._parent[key] = chain[position - 1] if position else None
            if not self._children.get(key):
                self._add_leaf(key)
            if parent is not None:
                self._children[parent] = self._children.get(parent, 0) + 1
                if parent in self._leaf_at:
                    self._remove_leaf(parent)
        self._trim(REMEMBERED * self.capacity)

    def _trim(self, remembered: int) -> None:
        while len(self._gone) > remembered:
            self._gone.popitem(last=False)

    def evict(self, count: int, protected: Container[Key]) -> list[Key]:
        return self._evict(count, protected, inf)

    def make_room(self, count: int, protected: Container[Key], newcomers: Sequence[Key]) -> list[Key]:
        """See :class:`CachingPolicy`. What is there stays where it is worth more than the newcomers are on average:
        they are of use together."""
        worth = [self._value(record) for key in newcomers if (record := self._known(key)) is not None]
        return self._evict(count, protected, fmean(worth) if worth else inf)

    def _evict(self, count: int, protected: Container[Key], worth: float) -> list[Key]:
        """Give up blocks of at most that value."""
        evicted: list[Key] = []
        while len(evicted) < count:
            value, key = self._lowest(self._drawn(), protected)
            if key is None:
                value, key = self._lowest_leaf(protected)
            if key is None or value > worth:
                break
            self.lost(key)
            evicted.append(key)
        return evicted

    def _drawn(self) -> Iterator[Key]:
        leaves = self._leaves
        if len(leaves) <= SAMPLE:
            return iter(leaves)
        return (leaves[int(self._rng.random() * len(leaves))] for _ in range(SAMPLE))

    def _lowest_leaf(self, protected: Container[Key]) -> tuple[float, Key | None]:
        """Of all leaves, without a look at those that are held; among equals the first one in the list."""
        free = (key for key in self._free_leaves if key not in protected)
        ranked = ((self._value(self._there[key]), self._leaf_at[key], key) for key in free)
        value, _, found = min(ranked, default=(inf, 0, None))
        return value, found

    def _lowest(self, keys: Iterator[Key], protected: Container[Key]) -> tuple[float, Key | None]:
        least, found = inf, None
        for key in keys:
            if key in protected:
                continue
            value = self._value(self._there[key])
            if value < least:
                least, found = value, key
        return least, found

    def _value(self, record: Record) -> float:
        return self._returns.rate(record.visit, record.name) * self._price(record.position)

    def hold_began(self, key: Key) -> None:
        self._held.add(key)
        self._free_leaves.discard(key)

    def hold_ended(self, key: Key) -> None:
        self._held.discard(key)
        if key in self._leaf_at:
            self._free_leaves.add(key)

    def lost(self, key: Key) -> None:
        record = self._there.pop(key, None)
        if record is None:
            return
        self._gone[key] = record
        if key in self._leaf_at:
            self._remove_leaf(key)
        parent = self._parent.pop(key)
        if parent is None:
            return
        if self._old_behind.get(parent) == key:
            del self._old_behind[parent]
        self._children[parent] -= 1
        if not self._children[parent]:
            del self._children[parent]
            if parent in self._there:
                self._add_leaf(parent)

    def _add_leaf(self, key: Key) -> None:
        self._leaf_at[key] = len(self._leaves)
        self._leaves.append(key)
        if key not in self._held:
            self._free_leaves.add(key)

    def _remove_leaf(self, key: Key) -> None:
        self._free_leaves.discard(key)
        at, last = self._leaf_at.pop(key), self._leaves.pop()
        if at < len(self._leaves):
            self._leaves[at] = last
            self._leaf_at[last] = at
