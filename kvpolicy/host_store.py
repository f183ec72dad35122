"""Host memory for preempted requests: blocks by content, each content once, saved only when the device loses it.

With prefix caching the full blocks of a preempted request stay on the device until other requests take them. A copy of
a request therefore begins as a list of blocks most of which are still there. Those without a key (a partial last block,
and every block without prefix caching) are saved at once. The others are watched: a block is saved when its place on
the device is given away, and one that survives until the request is back is never copied.

Pure bookkeeping, the same for the plugin and for the built-in simulator: it moves nothing and knows no time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, eq=False)
class HostBlock:
    """The content of one KV block that at least one copy needs."""

    key: Hashable | None
    """The engine's hash of the block's tokens and of all before them, with what else decides the content: adapter,
    cache salt. None for a content that no other request can have."""
    place: Any
    """Where it was on the device when it was first needed, a block id or a simulator's block; it is there while it is
    watched."""
    holders: list[Any]
    """Copies that need it, of a class made from :class:`HostCopy`, oldest first."""
    slot: int | None = None
    """Its place in host memory; None while only the device has it."""
    saved_by: int = 0
    """Number of the save that brings it to its slot; 0 before one is made."""

    @property
    def owner(self) -> Any:
        """The copy that its save is accounted to."""
        return self.holders[0]


@dataclass(slots=True, eq=False)
class HostCopy:
    """What a preempted request needs to come back without a recompute."""

    tokens: int
    """Tokens whose KV the blocks hold."""
    number: int = 0
    """Rises in the order in which an engine makes copies."""
    blocks: list[HostBlock] = field(default_factory=list)
    loading: bool = False
    """Whether a load is reading its slots: they cannot be given up."""


def by_owner(blocks: Iterable[HostBlock]) -> list[tuple[Any, list[HostBlock]]]:
    """Copies in the order of their numbers, each with those of the blocks whose save is accounted to it. Blocks that no
    copy needs any more are left out."""
    needed: dict[Any, list[HostBlock]] = {}
    for block in blocks:
        if block.holders:
            needed.setdefault(block.owner, []).append(block)
    return sorted(needed.items(), key=lambda item: item[0].number)


class HostStore:
    """Slots of host memory, one KV block each, and the contents that are kept for copies.

    Where slots are short, the copy of the shortest request is given up first. Among copies that is the cheapest one to
    recompute per byte: a token costs the more the more tokens precede it. ``given_up`` collects such copies until the
    caller takes them; they hold nothing any more.
    """

    def __init__(self, slots: int) -> None:
        self.total = self.free = slots
        self.given_up: list[Any] = []
        # Freed slots are reused last, so that stale data stays intact as long as possible.
        self._unused = deque(range(slots))
        self._copies: dict[HostCopy, None] = {}
        self._by_key: dict[Hashable, HostBlock] = {}
        self.watched: dict[Hashable, HostBlock] = {}
        """By place, blocks that have to be saved before their place on the device is given away."""

    @property
    def used(self) -> int:
        return self.total - self.free

    def obtainable(self, tokens: int, wanted: float, keys: Iterable[Hashable | None] = ()) -> int:
        """Slots that a copy of a request of ``tokens`` computed tokens can have: those that are free and, where these
        are fewer than ``wanted``, those that only copies of shorter requests use.

        ``keys``: of the copy's own contents. A slot that holds one of them is in use once the copy is made, whatever is
        given up.
        """
        if self.free >= wanted:
            return self.free
        own = set(keys)
        return self.free + sum(
            block.slot is not None
            and (block.key is None or block.key not in own)
            and all(holder.tokens < tokens and not holder.loading for holder in block.holders)
            for block in {block: None for copy in self._copies if copy.tokens < tokens for block in copy.blocks}
        )

    def stored(self, keys: Iterable[Hashable | None]) -> int:
        """How many contents with these keys have a slot."""
        found = map(self._by_key.get, keys)
        return sum(block is not None and block.slot is not None for block in found)

    def add(self, copy: HostCopy, contents: Iterable[tuple[Hashable | None, Hashable]]) -> list[HostBlock]:
        """Keep the contents for a new copy; return the blocks that must be saved now, with slots.

        ``contents``: key and place of each block, in order. The caller has checked with :meth:`obtainable` that those
        without a key can have slots.
        """
        self._copies[copy] = None
        now = []
        for key, place in contents:
            block = None if key is None else self._by_key.get(key)
            if block is None:
                block = HostBlock(key, place, [copy])
                if key is None:
                    now.append(block)
                else:
                    self._by_key[key] = block
                    self._watch(block)
            else:
                block.holders.append(copy)
            copy.blocks.append(block)
        return [block for block in now if block.holders and self._give_slot(block)]

    def lost(self, places: Iterable[Hashable]) -> list[HostBlock]:
        """The device gives these places away: return the blocks that must be saved before, with slots."""
        watched = self.watched
        if not watched:
            return []
        gone = [watched.pop(place) for place in places if place in watched]
        return [block for block in gone if block.holders and self._give_slot(block)]

    def begin_load(self, copy: HostCopy, wanted: Sequence[int]) -> list[HostBlock]:
        """The copy's blocks with these indices are about to be loaded; its others are no longer needed.

        Return those that only the device has, which must be saved before, with slots. One that can have none, because
        loads use them all, keeps the slot None: it cannot be loaded, and as nobody watches it any more, no later copy
        may find it.
        """
        loaded = set(wanted)
        for index, block in enumerate(copy.blocks):
            if index not in loaded:
                self._leave(block, copy)
        copy.blocks = [copy.blocks[index] for index in wanted]
        copy.loading = True
        there = [block for block in copy.blocks if block.slot is None]
        for block in there:
            self._unwatch(block)
        saved = [block for block in there if self._give_slot(block)]
        for block in there:
            if block.slot is None:
                self._forget_key(block)
        return saved

    def key_at(self, place: Hashable) -> Hashable | None:
        """Key of the content that is watched at that place; None where none is."""
        block = self.watched.get(place)
        return None if block is None else block.key

    def release(self, copy: HostCopy) -> None:
        """The copy is no longer needed. Contents that no other copy needs are dropped. Without effect on a copy that
        was released or given up before."""
        if copy in self._copies:
            del self._copies[copy]
            for block in copy.blocks:
                self._leave(block, copy)

    def forget_keys(self) -> None:
        """The keys stand for other contents from now on, as after a change of weights: nothing is found by them."""
        for block in self._by_key.values():
            block.key = None
        self._by_key.clear()
        self.watched.clear()

    def _watch(self, block: HostBlock) -> None:
        earlier = self.watched.get(block.place)
        if earlier is not None:  # it was given away unnoticed, and its content is gone
            for holder in list(earlier.holders):
                self.release(holder)
                self.given_up.append(holder)
        self.watched[block.place] = block

    def _unwatch(self, block: HostBlock) -> None:
        if self.watched.get(block.place) is block:  # another content may be watched there by now
            del self.watched[block.place]

    def _forget_key(self, block: HostBlock) -> None:
        if block.key is not None:
            del self._by_key[block.key]
            block.key = None

    def _leave(self, block: HostBlock, copy: HostCopy) -> None:
        block.holders.remove(copy)
        if block.holders:
            return
        if block.key is not None:
            self._forget_key(block)
            self._unwatch(block)
        if block.slot is not None:
            self._unused.append(block.slot)
            self.free += 1

    def _give_slot(self, block: HostBlock) -> bool:
        """Give the block a slot, for which copies may be given up; False where the block is not needed any more, or
        loads use all slots."""
        while not self.free:
            if not self._give_up(block):
                return False
            if not block.holders:
                return False
        self.free -= 1
        block.slot = self._unused.popleft()
        return True

    def _give_up(self, block: HostBlock) -> bool:
        """Give up the copy of the shortest request that uses slots or needs the block; False where there is none."""
        copies = [
            copy
            for copy in self._copies
            if not copy.loading and (copy in block.holders or any(one.slot is not None for one in copy.blocks))
        ]
        if not copies:
            return False
        shortest = min(copies, key=lambda copy: copy.tokens)
        self.release(shortest)
        self.given_up.append(shortest)
        return True
