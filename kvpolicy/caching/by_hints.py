"""A caching policy that heeds what requests say of their KV, around any other policy.

Hints order what is evicted: first what its request said nobody will ask for again, last what was asked to stay, and by
the other policy in between. A tier calls it, with the hints that :mod:`kvpolicy.request_marks` reads and bounds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, fields
from heapq import heapify, heappop, heappush

from kvpolicy.caching.base import CachingPolicy, Chain, Key
from kvpolicy.request_marks import DEFAULT_CLASS, HintLimits, Hints

STALE = 4
"""Entries of a heap per entry in use at which outdated ones are removed."""
REMEMBERED = 4
"""Blocks of sessions' windows that are remembered, by block of the capacity."""
Time = tuple[float, int, int, Key]
"""When a hold ends, minus the block's position, a number that is never the same twice, and the block. Of one window the
last block goes first."""


@dataclass(slots=True)
class HintCounts:
    """Blocks by what became of the hints about them."""

    held: int = 0
    """Held back from eviction, or held back for longer."""
    refused: int = 0
    """Not held back, since all classes together hold as much as they may."""
    displaced: int = 0
    """Held back no longer, since their class asked for others and holds as much as it may."""
    released: int = 0
    """To be evicted first: of a request that is not repeated, or of a session that is over."""


EVENTS = tuple(field.name for field in fields(HintCounts))
"""What may become of the hints about a block."""


@dataclass(frozen=True, slots=True)
class Hold:
    """A block that is held back from eviction."""

    until_s: float
    class_name: str
    number: int
    """Of its entry in the class's heap."""
    is_pin: bool
    """Whether it is of a shared prefix, which outlasts the sessions that use it."""


class Holds:
    """Blocks held back from eviction, each until a time and for a class: ``most`` in all, ``each`` of a class."""

    def __init__(self, most: int, each: int, counts: HintCounts) -> None:
        self._most, self._each, self._counts = most, each, counts
        self._of: dict[Key, Hold] = {}
        self._held_by: dict[str, int] = {}
        self._heaps: dict[str, list[Time]] = {}
        """Of each class, the hold that ends first on top."""
        self._number = 0

    def __contains__(self, key: object) -> bool:
        return key in self._of

    def __len__(self) -> int:
        return len(self._of)

    def of_class(self, name: str) -> int:
        return self._held_by.get(name, 0)

    def is_pinned(self, key: Key) -> bool:
        hold = self._of.get(key)
        return hold is not None and hold.is_pin

    def add(self, keys: Sequence[Key], until_s: float, name: str, pins: int) -> None:
        """Hold these blocks, the leading ones of a window, until then, the first ``pins`` of them as pins. A hold is
        only ever extended.

        Where the class has no room left, its holds that end first are dropped, never those of the same window; what
        exceeds the room of the class or of all classes is not held.
        """
        own = frozenset(keys)
        for position, key in enumerate(keys):
            before, is_pin = self._of.get(key), position < pins
            if before is not None and before.until_s >= until_s and before.is_pin >= is_pin:
                continue
            if before is None and not self._has_room(name, until_s, own):
                self._counts.refused += len(keys) - position
                return
            if before is None:
                self._set(key, position, until_s, name, is_pin)
            else:  # it still counts for the class that held it before: the place is taken already
                self._set(key, position, max(until_s, before.until_s), before.class_name, is_pin or before.is_pin)

    def _has_room(self, name: str, until_s: float, own: Container[Key]) -> bool:
        if self.of_class(name) < self._each and len(self._of) < self._most:
            return True
        heap = self._valid_heap(name)
        if not heap or heap[0][0] > until_s or heap[0][3] in own:
            return False
        self.drop(heap[0][3])
        self._counts.displaced += 1
        return True

    def _set(self, key: Key, position: int, until_s: float, name: str, is_pin: bool) -> None:
        if key not in self._of:
            self._held_by[name] = self.of_class(name) + 1
        self._number += 1
        self._of[key] = Hold(until_s, name, self._number, is_pin)
        heap = self._heaps.setdefault(name, [])
        heappush(heap, (until_s, -position, self._number, key))
        if len(heap) > STALE * max(self._held_by[name], 16):
            heap[:] = [entry for entry in heap if self._is_valid(entry)]
            heapify(heap)
        self._counts.held += 1

    def _is_valid(self, entry: Time) -> bool:
        found = self._of.get(entry[3])
        return found is not None and found.number == entry[2]

    def _valid_heap(self, name: str) -> list[Time]:
        """The class's heap, with a hold on top that is not outdated."""
        heap = self._heaps.get(name, [])
        while heap and not self._is_valid(heap[0]):
            heappop(heap)
        return heap

    def drop(self, key: Key) -> None:
        """Hold a block no longer."""
        found = self._of.pop(key, None)
        if found is None:
            return
        name = found.class_name
        self._held_by[name] -= 1
        if not self._held_by[name]:
            del self._held_by[name], self._heaps[name]

    def expire(self, now_s: float) -> None:
        """Drop the holds whose time is over."""
        for name in list(self._heaps):
            while (heap := self._valid_heap(name)) and heap[0][0] <= now_s:
                self.drop(heap[0][3])


class Hinted(CachingPolicy):
    """Evicts by another policy, save for what hints say.

    Its owner calls :meth:`hinted` after ``asked`` and before ``evict`` and ``stored``, and once more for the whole
    window when a request has ended; :meth:`wanted` says how much is worth storing. A block that is held back is not
    evicted before its time is over, so that :meth:`evict` may give up fewer blocks than it is asked for where the
    ``protected`` ones are many besides. The other policy knows of no hint, and may rather keep what is there than take
    a newcomer that is :meth:`held` back: the owner has room made for that by :meth:`evict`, and for the others by
    :meth:`make_room`. Memory is bounded by the capacity.

    ``clock``: seconds, never falling. ``block_tokens``: tokens of a block, by which pins are rounded down.
    """

    name = "hinted"

    def __init__(
        self, inner: CachingPolicy, clock: Callable[[], float], block_tokens: int, limits: HintLimits = HintLimits()
    ) -> None:
        super().__init__(inner.capacity)
        self.inner = inner
        self.counts = HintCounts()
        self.limits = limits
        self._clock, self._block_tokens = clock, block_tokens
        self._holds = self._no_holds()
        self._first: OrderedDict[Key, None] = OrderedDict()
        """Blocks there to be evicted first, in this order."""
        self._unwanted: OrderedDict[Key, None] = OrderedDict()
        """Blocks that are to be evicted first if they are stored at all."""
        self._parent: dict[Key, Key | None] = {}
        """The block before each one that is there."""
        self._children: dict[Key, int] = {}
        """Number of blocks there that continue a block."""
        self._sessions: OrderedDict[tuple[str, str], Chain] = OrderedDict()
        """Each session's latest window, by class and name."""
        self._session_blocks = 0

    def _no_holds(self) -> Holds:
        share, of_class = (int(part * self.capacity) for part in (self.limits.share, self.limits.class_share))
        return Holds(share, of_class, self.counts)

    def __contains__(self, key: Key) -> bool:
        return key in self.inner

    def __len__(self) -> int:
        return len(self.inner)

    @property
    def held_blocks(self) -> int:
        """Number of blocks that are held back from eviction now."""
        self._holds.expire(self._clock())
        return len(self._holds)

    def held(self, keys: Iterable[Key]) -> frozenset[Key]:
        """Those of these blocks that are held back from eviction, whether they are there or about to be stored."""
        self._holds.expire(self._clock())
        return frozenset(key for key in keys if key in self._holds)

    def is_needed(self, key: Key) -> bool:
        """Whether it is pinned, or a block that is there continues it and is of no use without it."""
        self._holds.expire(self._clock())
        return key in self._children or self._holds.is_pinned(key)

    def wanted(self, chain: Chain, hints: Hints) -> int:
        """Number of leading blocks that are worth storing. Of a request that nobody repeats or continues, those that it
        pins."""
        return min(self._pinned(hints), len(chain)) if hints.once or hints.ended else len(chain)

    def _pinned(self, hints: Hints) -> int:
        return hints.pin_tokens // self._block_tokens

    def hinted(self, chain: Chain, hints: Hints, class_name: str = DEFAULT_CLASS) -> None:
        """A request whose window is ``chain`` came with these hints, granted to this class."""
        now_s = self._clock()
        self._holds.expire(now_s)
        pinned = min(self._pinned(hints), len(chain))
        if hints.session is not None:
            self._follow((class_name, hints.session), chain, hints.ended)
        if hints.once:
            self._release([key for key in chain[pinned:] if key not in self])
        elif hints.ended:
            self._release(self._private(chain, pinned))
        until_s = now_s + (self.limits.keep_s if hints.keep_s is None else min(hints.keep_s, self.limits.keep_s))
        only_pins = hints.once or hints.ended or hints.keep_s is None
        self._hold(chain[:pinned] if only_pins else chain, until_s, class_name, pinned)

    def forget_hints(self) -> None:
        """Nobody will ask for a block again that hints have named so far, as after a change of weights: none is held
        back any more, and no session is known. The inner policy goes on."""
        self._holds = self._no_holds()
        self._unwanted.clear()
        self._sessions.clear()
        self._session_blocks = 0

    def _hold(self, keys: Sequence[Key], until_s: float, class_name: str, pins: int) -> None:
        self._want(keys)
        if keys and until_s > self._clock():
            self._holds.add(keys, until_s, class_name, pins)

    def _want(self, keys: Sequence[Key]) -> None:
        """Evict these blocks first no longer."""
        for marked in (self._first, self._unwanted):
            if marked:
                for key in keys:
                    marked.pop(key, None)

    def _release(self, keys: Sequence[Key]) -> None:
        """Evict these blocks of a window first, its last one before all others. Pinned ones stay."""
        for key in reversed(keys):
            if self._holds.is_pinned(key):
                continue
            self._holds.drop(key)
            marked = self._first if key in self else self._unwanted
            if key not in marked:
                marked[key] = None
                self.counts.released += 1
        while len(self._unwanted) > self.capacity:
            self._unwanted.popitem(last=False)

    def _private(self, chain: Chain, pinned: int) -> list[Key]:
        """The blocks at the end of a window that no other window there continues."""
        at = len(chain)
        while at > pinned:
            own = at < len(chain) and chain[at] in self._parent
            if self._children.get(chain[at - 1], 0) > own:
                break
            at -= 1
        return list(chain[at:])

    def _follow(self, session: tuple[str, str], chain: Chain, ended: bool) -> None:
        """Remember the session's window. Release what the window before has beyond it, or all of it at the end."""
        before = self._sessions.pop(session, ())
        self._session_blocks -= len(before)
        now = frozenset(() if ended else chain)
        if not now.issuperset(before):
            self._release([key for key in self._private(before, 0) if key not in now and key in self])
        if ended or not chain:
            return
        self._sessions[session] = tuple(chain)
        self._session_blocks += len(chain)
        while self._session_blocks > REMEMBERED * self.capacity:
            _, oldest = self._sessions.popitem(last=False)
            self._session_blocks -= len(oldest)

    def asked(self, chain: Chain, hits: int) -> None:
        self._want(chain)
        self.inner.asked(chain, hits)

    def extended(self, chain: Chain, asked: int) -> None:
        self.inner.extended(chain, asked)

    def stored(self, chain: Chain, missing: Sequence[int]) -> None:
        for position in reversed(missing):
            key = chain[position]
            if key in self._unwanted:
                del self._unwanted[key]
                self._first[key] = None
            parent = self._parent[key] = chain[position - 1] if position else None
            if parent is not None:
                self._children[parent] = self._children.get(parent, 0) + 1
        self.inner.stored(chain, missing)

    def evict(self, count: int, protected: Container[Key]) -> list[Key]:
        return self._evict(count, protected, self.inner.evict)

    def make_room(self, count: int, protected: Container[Key], newcomers: Sequence[Key]) -> list[Key]:
        return self._evict(count, protected, lambda left, kept: self.inner.make_room(left, kept, newcomers))

    def _evict(
        self, count: int, protected: Container[Key], others: Callable[[int, Container[Key]], list[Key]]
    ) -> list[Key]:
        """Evict what goes first, and then what the other policy gives up of what is not held back."""
        self._holds.expire(self._clock())
        evicted: list[Key] = []
        for key in self._first:
            if len(evicted) >= count:
                break
            if key not in protected:
                evicted.append(key)
        for key in evicted:
            self.inner.lost(key)
        if len(evicted) < count:
            evicted += others(count - len(evicted), _Either(protected, self._holds))
        for key in evicted:
            self._gone(key)
        return evicted

    def lost(self, key: Key) -> None:
        self.inner.lost(key)
        self._gone(key)

    def _gone(self, key: Key) -> None:
        self._holds.drop(key)
        self._first.pop(key, None)
        parent = self._parent.pop(key, None)
        if parent is not None:
            self._children[parent] -= 1
            if not self._children[parent]:
                del self._children[parent]


class _Either:
    """What is in one of two."""

    def __init__(self, one: Container[Key], other: Container[Key]) -> None:
        self._one, self._other = one, other

    def __contains__(self, key: object) -> bool:
        return key in self._one or key in self._other
