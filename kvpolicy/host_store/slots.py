"""Slots of host memory: which contents are in them, and which are watched on the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from typing import Any

from kvpolicy.caching.base import CachingPolicy, Chain
from kvpolicy.caching.by_hints import Either, Hinted
from kvpolicy.caching.tree import Tree
from kvpolicy.host_store.cache_admission import CacheAdmission, Placed
from kvpolicy.host_store.contents import CacheCounts, Copies, HostBlock, HostCopy, Protected, rank_of
from kvpolicy.request_marks import Client, Hints


class HostStore:
    """Slots of host memory, one KV block each, and the contents that are in them or watched for them.

    Copies come first. Where slots are short, cached contents leave theirs, and then the copy that saves the least per
    slot is given up, by what was predicted when it was made; without predictions that of the shortest request.
    ``given_up`` collects such copies until the caller takes them; they hold nothing any more.

    ``cache``: chooses what is cached, for as many blocks as there are slots; without one nothing is. It knows every
    content with a key that has a slot, and hears which ones copies need, watched ones too: these are protected.
    """

    def __init__(self, slots: int, cache: CachingPolicy | None = None) -> None:
        self.total = self.free = slots
        """Slots in all, and those that no copy needs: unused ones, and those of cached contents."""
        self.given_up: list[Any] = []
        self.cache = cache
        self.counts = CacheCounts()
        self.below: Container[Hashable] = ()
        """Contents of a tier below, which may come here for a request that waits."""
        self.admission = CacheAdmission()
        """What is saved for the cache, and what stays for it."""
        # Freed slots are reused last, so that stale data stays intact as long as possible.
        self._unused = deque(range(slots))
        self._copies = Copies()
        self._by_key: dict[Hashable, HostBlock] = {}
        self._tree = Tree()
        self.watched: dict[Hashable, HostBlock] = {}
        """By place, blocks that have to be saved before their place on the device is given away."""

    @property
    def used(self) -> int:
        """Slots that copies need."""
        return self.total - self.free

    @property
    def cached(self) -> int:
        """Slots of cached contents."""
        return self.free - len(self._unused)

    @property
    def contents(self) -> int:
        """Contents that :meth:`lookup` finds, of copies and cached ones. O(contents)."""
        return sum(block.slot is not None for block in self._by_key.values())

    def obtainable(
        self,
        tokens: int,
        wanted: float,
        keys: Iterable[Hashable | None] = (),
        gain_per_block: Callable[[], float | None] = lambda: None,
    ) -> int:
        """Slots that a copy of a request of ``tokens`` computed tokens can have: those that no copy needs and, where
        these are fewer than ``wanted``, those that only copies of a lower rank use.

        ``keys``: of the copy's own contents. A slot that holds one of them is in use once the copy is made, whatever is
        given up. ``gain_per_block``: predicts that of the copy; only called where slots are short.
        """
        if self.cache is None and self.free >= wanted:
            return self.free
        own = set(keys)
        free = self.free - sum(block is not None and block.cached for block in map(self._by_key.get, own))
        if free >= wanted:
            return free
        return free + self._copies.slots_below(rank_of(tokens, gain_per_block()), own)

    def stored(self, keys: Iterable[Hashable | None]) -> int:
        """How many contents with these keys have a slot."""
        found = map(self._by_key.get, keys)
        return sum(block is not None and block.slot is not None for block in found)

    def __contains__(self, key: object) -> bool:
        """Whether there is a content with this key, in a slot or watched on the device."""
        return key in self._by_key

    def has_elsewhere(self, key: Hashable, place: Hashable) -> bool:
        """Whether there is a content with this key that is not the one watched at that place."""
        block = self._by_key.get(key)
        return block is not None and self.watched.get(place) is not block

    def lookup(self, keys: Iterable[Hashable]) -> int:
        """How many of these contents have a slot, up to the first one that has none."""
        count = 0
        for key in keys:
            block = self._by_key.get(key)
            if block is None or block.slot is None:
                break
            count += 1
        return count

    # ---- for the cache ----

    def asked(self, chain: Chain) -> None:
        """A new request has this prompt: the keys of its full blocks. Without effect where nothing is cached."""
        if self.cache is not None and chain:
            self.cache.asked(chain, self.lookup(chain))

    def hinted(self, chain: Chain, hints: Hints, client: Client, request: Hashable = None, over: bool = False) -> None:
        """A request with this window, keys of full blocks, came with hints, granted to this client, or is ``over``; see
        :meth:`kvpolicy.caching.Hinted.hinted`. Without effect where the caching policy heeds none."""
        if isinstance(self.cache, Hinted) and hints:
            self.cache.hinted(chain, hints, client, request, over, None if over else Either(self, self.below))

    def goes_on(self, chain: Chain, hints: Hints, client: Client, request: Hashable) -> None:
        """The request has lost its blocks, which are watched by now, and will come back; see
        :meth:`kvpolicy.caching.Hinted.goes_on`."""
        if isinstance(self.cache, Hinted) and hints:
            self.cache.goes_on(chain, hints, client, request, Either(self, self.below))

    def wanted(self, chain: Chain, hints: Hints) -> int:
        """Number of leading blocks of a window that are worth storing by these hints."""
        return self.cache.wanted(chain, hints) if isinstance(self.cache, Hinted) else len(chain)

    def extended(self, chain: Chain, asked: int) -> None:
        """A request whose prompt had the first ``asked`` blocks of this chain has generated the others. Without effect
        where nothing is cached."""
        if self.cache is not None and asked < len(chain):
            self.cache.extended(chain, asked)

    def watch(self, chain: Chain, places: Mapping[int, Hashable]) -> list[int]:
        """A request gives blocks back: the device may lose them from now on. Without effect where nothing is cached.

        ``chain``: keys of its leading full blocks; ``places``: of those that are on the device, by index, in their
        order. Return the indices of the blocks that have no slot and were not watched.
        """
        if self.cache is None or not places:
            return []
        by_key, watched, known = self._by_key, self.watched, 0
        for index, place in places.items():
            block = watched.get(place)
            if block is None or block.key != chain[index] or block.place != place or block.node is None:
                break
            known += 1  # one of a beginning that others share, which is watched there already
        rest, taken = [*places.items()][known:], []
        first = rest[0][0] if rest else len(chain)
        nodes = self._tree.nodes(chain, first)
        for index, place in rest:
            node = nodes[index - first]
            block = by_key.get(node.key)
            if block is None:
                block = by_key[node.key] = HostBlock(node.key, place, [], node=node)
            elif block.node is None:
                block.node = node
                if block.slot is not None:
                    self._tell_stored(block)
            if watched.get(block.place) is not block:
                block.place = place
                self._watch(block)
                if block.slot is None:
                    taken.append(index)
        return taken

    def hold(self, copy: HostCopy, keys: Iterable[Hashable]) -> None:
        """Let a new copy need contents that :meth:`lookup` has found, in order. They are not evicted while it does.
        One that is not there is a block without a slot, which cannot be loaded."""
        self._copies.add(copy)
        for key in keys:
            block = self._by_key.get(key)
            if block is None or block.slot is None:
                block = HostBlock(None, None, [copy])
            else:
                self._join(block, copy)
            copy.blocks.append(block)

    def bring(self, copy: HostCopy, count: int, before: Container[Hashable] = ()) -> list[HostBlock]:
        """Slots, at most so many and as the caching policy gives up, for contents that come from elsewhere than the
        device. A new copy keeps them; nothing is found there before :meth:`brought`.

        ``before``: keys of the contents that these continue, which are not evicted for them.
        """
        self._copies.add(copy)
        self._make_room(count, before)
        for _ in range(min(count, len(self._unused))):
            self.free -= 1
            copy.blocks.append(HostBlock(None, None, [copy], self._unused.popleft()))
        return [*copy.blocks]

    def brought(self, chain: Chain, positions: Iterable[int], blocks: Iterable[HostBlock]) -> None:
        """The contents of a chain at these positions have come to the slots of these blocks: they are found there from
        now on, unless they have slots already."""
        nodes = self._tree.nodes(chain)
        for position, block in zip(positions, blocks, strict=True):
            node = nodes[position]
            known = self._by_key.get(node.key)
            if known is None:
                block.key, block.node = node.key, node
                self._by_key[node.key] = block
                self._hold_began(block)
                self._tell_stored(block)
            elif known.slot is None:  # only the device has it; what needs or watches it has the slot now
                known.slot, block.slot, known.node = block.slot, None, known.node or node
                self.free += not known.holders
                self._tell_stored(known)

    def spoiled(self, block: HostBlock) -> None:
        """A save of the block, or a load, has failed: nothing is found by its key any more. Copies that need it are the
        caller's matter."""
        if block.key is not None:
            self.counts.spoiled += 1
            self.drop((block.key,))

    def drop(self, keys: Iterable[Hashable]) -> None:
        """Nothing is found by these keys any more, nor cached, nor watched for the cache. What copies need stays
        theirs; where only the device has it, it will be found once it is saved."""
        for block in filter(None, map(self._by_key.get, keys)):
            if block.holders and block.slot is None:
                continue
            was_cached = block.cached
            self._unwatch(block)
            self._forget_key(block)
            if was_cached:
                self._free_slot(block)

    # ---- for copies ----

    def add(self, copy: HostCopy, contents: Iterable[tuple[Hashable | None, Hashable]]) -> list[HostBlock]:
        """Keep the contents for a new copy; return the blocks that must be saved now, with slots.

        ``contents``: key and place of each block, in order. The caller has checked with :meth:`obtainable` that those
        without a key can have slots.
        """
        self._copies.add(copy)
        now = []
        for key, place in contents:
            block = None if key is None else self._by_key.get(key)
            if block is None:
                block = HostBlock(key, place, [])
                if key is None:
                    now.append(block)
                else:
                    self._by_key[key] = block
                    self._watch(block)
            self._join(block, copy)
            copy.blocks.append(block)
        now = [block for block in now if block.holders]
        self._make_room(len(now), ())  # at once, as far as the policy has any to give up
        return [block for block in now if block.holders and self._give_slot(block)]

    def lost(self, places: Iterable[Hashable]) -> list[HostBlock]:
        """The device gives these places away: return the blocks that must be saved before, with slots."""
        watched = self.watched
        if not watched:
            return []
        gone = [watched.pop(place) for place in places if place in watched]
        if self.cache is None:
            return [block for block in gone if block.holders and self._give_slot(block)]
        gone = [block for block in gone if block.slot is None]
        needed = [block for block in gone if block.holders]
        self._make_room(len(needed))
        saved = [block for block in needed if block.holders and self._give_slot(block)]
        # One that got a slot for a copy that was given up for the next is cached by now.
        return saved + self._cache([block for block in gone if not block.holders and block.slot is None])

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
        there = [block for block in copy.blocks if block.slot is None and block.place is not None]
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
        """The copy is no longer needed. Contents that no other copy needs are cached, or dropped. Without effect on a
        copy that was released or given up before."""
        if self._copies.remove(copy):
            for block in copy.blocks:
                self._leave(block, copy)

    def forget_keys(self) -> None:
        """The keys stand for other contents from now on, as after a change of weights: nothing is found by them."""
        for block in list(self._by_key.values()):
            was_cached = block.cached
            self._forget_key(block)
            if was_cached:
                self._free_slot(block)
        self.watched.clear()
        if isinstance(self.cache, Hinted):
            self.cache.forget_hints()

    # ---- one content ----

    def _watch(self, block: HostBlock) -> None:
        earlier = self.watched.pop(block.place, None)
        self.watched[block.place] = block
        if earlier is None or earlier.slot is not None:
            return
        # It was given away unnoticed, and its content is gone.
        for holder in list(earlier.holders):
            self.release(holder)
            self.given_up.append(holder)
        self._forget_key(earlier)

    def _unwatch(self, block: HostBlock) -> None:
        if self.watched.get(block.place) is block:  # another content may be watched there by now
            del self.watched[block.place]

    def _forget_key(self, block: HostBlock) -> None:
        if block.key is None:
            return
        del self._by_key[block.key]
        self._hold_ended(block)
        # Hints may hold back what has no slot.
        if self.cache is not None and (block.slot is not None or isinstance(self.cache, Hinted)):
            self.cache.lost(block.key)
        block.key = None

    def _join(self, block: HostBlock, copy: HostCopy) -> None:
        if block.cached:
            self.free -= 1
        block.holders.append(copy)
        if len(block.holders) == 1:
            self._hold_began(block)

    def _leave(self, block: HostBlock, copy: HostCopy) -> None:
        if len(block.holders) == 1:
            self._hold_ended(block)
        block.holders.remove(copy)
        if block.holders:
            return
        if block.slot is not None:
            self.free += 1
        if self._stays(block):
            return
        if block.key is not None:
            self._unwatch(block)
            self._forget_key(block)
        if block.slot is not None:
            self._unused.append(block.slot)

    def _stays(self, block: HostBlock) -> bool:
        """Whether a content that no copy needs any more stays, in its slot or watched on the device."""
        if self.cache is None or block.key is None or block.node is None:
            return False
        return self.admission.worth_keeping(block.node.reach) if block.slot is not None else self._is_watched(block)

    def _is_watched(self, block: HostBlock) -> bool:
        return self.watched.get(block.place) is block

    def _free_slot(self, block: HostBlock) -> None:
        """The slot of a content that was cached is unused."""
        assert block.slot is not None
        self._unused.append(block.slot)
        block.slot = None

    # ---- slots ----

    def _give_slot(self, block: HostBlock) -> bool:
        """Give a copy's block a slot, for which cached contents leave theirs and copies may be given up; False where
        the block is not needed any more, or loads use all slots."""
        while not self.free:
            if not (self._give_up(block) and block.holders):
                return False
        self._make_room(1)
        self.free -= 1
        self._take_slot(block)
        return True

    def _take_slot(self, block: HostBlock) -> None:
        block.slot = self._unused.popleft()
        self._tell_stored(block)

    def _tell_stored(self, block: HostBlock) -> None:
        if self.cache is not None and block.key is not None and block.node is not None:
            self.cache.stored(block.node.chain, (block.node.position,))

    def _hold_began(self, block: HostBlock) -> None:
        """A content has its first copy, or a block that copies need its key: the policy would else pass over it."""
        if self.cache is not None and block.key is not None and block.holders:
            self.cache.hold_began(block.key)

    def _hold_ended(self, block: HostBlock) -> None:
        """A content is about to lose its last copy, or a block that copies need its key."""
        if self.cache is not None and block.key is not None and block.holders:
            self.cache.hold_ended(block.key)

    def _cache(self, lost: Sequence[HostBlock]) -> list[HostBlock]:
        """Cache what the device is about to lose and no copy needs; return what must be saved for that."""
        kept = [block for block in lost if block.key is not None]  # of others a copy was given up that needed them
        assert self.cache is not None, "nothing is cached without a policy"
        wanted = self.admission.admitted(kept, self.cache)
        left_out = set(kept).difference(block for _, block in wanted)
        for block in left_out:
            self._forget_key(block)
        self.counts.refused += len(left_out)
        if len(wanted) > len(self._unused):
            wanted = self._with_room(wanted)
        saved = []
        for _, block in wanted:
            if self._unused:
                self._take_slot(block)
                saved.append(block)
                self.counts.stored += 1
            else:
                self._forget_key(block)
                self.counts.refused += 1
        return saved

    def _with_room(self, wanted: list[Placed]) -> list[Placed]:
        """What is to be stored, in the order in which it gets slots, once the policy has made room: first what a hint
        holds back, whatever the policy would rather keep, as it knows of no hint. What it would leave out of the others
        still comes, in place of the lowest that is there, where a tier below takes it."""
        held = self.cache.held(node.key for node, _ in wanted) if isinstance(self.cache, Hinted) else frozenset()
        wanted = self.admission.in_turn(wanted, held)
        # A hit needs what is before a block, too.
        before = {node.parent.key for node, _ in wanted if node.parent}
        self._make_room(len(held), before)
        self._make_room(len(wanted), before, [node.key for node, _ in wanted[len(held) :]])
        room = len(self._unused)
        handed_on, refused = self.admission.handed_on(wanted[room:])
        if handed_on:
            self._make_room(room + len(handed_on), before)
        return wanted[:room] + handed_on + refused

    def _make_room(
        self, slots: int, needed: Container[Hashable] | None = None, newcomers: Sequence[Hashable] = ()
    ) -> None:
        """Let cached contents leave their slots until so many are unused, or nothing is cached.

        ``needed``: keys of contents that are not evicted, even where too few slots become unused; None for a copy.
        ``newcomers``: keys of the contents that the slots are for, where the policy may rather keep what is there.
        """
        count = min(slots - len(self._unused), self.cached)
        if count <= 0:
            return
        assert self.cache is not None, "nothing is cached without a policy"
        protected = Protected(self._by_key, needed or ())
        if newcomers:
            evicted = self.cache.make_room(count, protected, newcomers)
        else:
            evicted = self.cache.evict(count, protected)
        for key in evicted:
            self._evicted(self._by_key[key])
        if needed is not None or len(self._unused) >= slots:
            return
        # The policy has none to give up, as where copies need what continues each of them.
        for block in [block for block in self._by_key.values() if block.cached][: slots - len(self._unused)]:
            self.cache.lost(block.key)
            self._evicted(block)

    def _evicted(self, block: HostBlock) -> None:
        """A cached content leaves host memory; the policy knows."""
        self._free_slot(block)
        self.counts.evicted += 1
        if not self._is_watched(block):
            del self._by_key[block.key]
            block.key = None

    def _give_up(self, block: HostBlock) -> bool:
        """Give up the copy of the lowest rank that uses slots or needs the block; False where there is none."""
        lowest = self._copies.next_given_up(block)
        if lowest is None:
            return False
        self.release(lowest)
        self.given_up.append(lowest)
        return True
