"""A caching policy that heeds what requests say of their KV, around any other policy.

Hints order what is evicted: first what its request said nobody will ask for again, last what was asked to stay, and by
the other policy in between. A tier calls it, with the hints that :mod:`kvpolicy.request_marks` reads and bounds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from heapq import heapify, heappop, heappush, heapreplace

from kvpolicy.caching.base import CachingPolicy, Chain, Key
from kvpolicy.request_marks import ANYBODY, Client, HintLimits, Hints

STALE = 4
"""Entries of a heap per entry in use at which outdated ones are removed."""
REMEMBERED = 4
"""Blocks of sessions' windows that are remembered, by block of the capacity."""
Session = tuple[Client, str]
"""A client and the name that it gave: nobody ends or replaces a session of another client."""
Time = tuple[float, int, int, Key]
"""When a hold ends, minus the block's position, a number that is never the same twice, and the block. Of one window the
last block goes first."""


@dataclass(slots=True)
class HintCounts:
    """Blocks by what became of the hints about them."""

    held: int = 0
    """Held back from eviction, or held back for longer."""
    refused: int = 0
    """Not held back, since as much is held as may be, and nothing that would make room for it."""
    displaced: int = 0
    """Held back no longer, since their client or class asked for others and holds as much as it may."""
    released: int = 0
    """To be evicted first: of a request that is not repeated, or of a session that is over."""


EVENTS = tuple(one.name for one in fields(HintCounts))
"""What may become of the hints about a block."""


@dataclass(slots=True)
class Hold:
    """A block that is held back from eviction."""

    until_s: float
    """Never falls. Its entries in heaps may have an earlier time, see :class:`Held`."""
    client: Client
    session: Session | None
    """What may end it early: the session that alone asked for it. None: nothing, as others asked for it too, or one
    without a session, or a pin, which outlasts the sessions that use it."""
    number: int
    """Of its entries in the heaps of its client and of its class."""
    is_pin: bool
    """Whether it is of a shared prefix."""


@dataclass(slots=True)
class Held:
    """What is held for one client, or for one class."""

    blocks: int = 0
    heap: list[Time] = field(default_factory=list)
    """One entry of each hold, with a time at which it does not end before, among entries of holds that were dropped.
    Times are put right when they come to the top: a prefix that many requests pin is held longer by each of them, block
    by block, and ends once."""


class Holders:
    """The clients, or the classes, for which blocks are held: at most ``each`` for one of them. ``end_of``: when the
    hold of a heap's entry ends; None where it was dropped."""

    def __init__(self, each: int, end_of: Callable[[Time], float | None]) -> None:
        self._each, self._end_of = each, end_of
        self._held: dict[Hashable, Held] = {}

    def __iter__(self) -> Iterator[Hashable]:
        """Those that there are now; some may be removed meanwhile."""
        return iter([*self._held])

    def is_full(self, holder: Hashable) -> bool:
        held = self._held.get(holder)
        return (0 if held is None else held.blocks) >= self._each

    def first(self, holder: Hashable) -> Time | None:
        """The hold that ends first; None where there is none."""
        held = self._held.get(holder)
        heap = [] if held is None else held.heap
        while heap:
            entry = heap[0]
            until_s = self._end_of(entry)
            if until_s == entry[0]:
                return entry
            if until_s is None:
                heappop(heap)
            else:
                heapreplace(heap, (until_s, *entry[1:]))
        return None

    def add(self, holder: Hashable, entry: Time) -> None:
        """One block more is held for it."""
        held = self._held.get(holder)
        if held is None:
            held = self._held[holder] = Held()
        held.blocks += 1
        heappush(held.heap, entry)
        if len(held.heap) > STALE * max(held.blocks, 16):
            held.heap = [one for one in held.heap if self._end_of(one) is not None]
            heapify(held.heap)

    def clear(self) -> None:
        """Nothing is held any more."""
        self._held.clear()

    def remove(self, holder: Hashable) -> None:
        """One block less is held for it."""
        held = self._held[holder]
        held.blocks -= 1
        if not held.blocks:
            del self._held[holder]


class Holds:
    """Blocks held back from eviction, each until a time and for a client: ``most`` in all, ``of_class`` for the clients
    of a class together, and ``of_client`` for each of these. ``policy``: is told which ones."""

    def __init__(self, most: int, of_class: int, of_client: int, counts: HintCounts, policy: CachingPolicy) -> None:
        self._most, self._counts, self._policy = most, counts, policy
        self._of: dict[Key, Hold] = {}
        self.classes = Holders(of_class, self._end_of)
        self.clients = Holders(of_client, self._end_of) if of_client < of_class else None
        """None where their class bounds them as much."""
        self._number = 0

    def __contains__(self, key: object) -> bool:
        return key in self._of

    def __len__(self) -> int:
        return len(self._of)

    def is_pinned(self, key: Key) -> bool:
        hold = self._of.get(key)
        return hold is not None and hold.is_pin

    def add(self, keys: Sequence[Key], until_s: float, client: Client, session: Session | None, pins: int) -> None:
        """Hold these blocks, the leading ones of a window of this session, until then, the first ``pins`` of them as
        pins. A hold is only ever extended, and that of several lasts until the last of their times.

        Where the client has no room left, its holds that end first are dropped, and where its class has none, or all
        together, those of the class; never those of the same window. What exceeds the room even so is not held.
        """
        own: frozenset[Key] | None = None
        for position, key in enumerate(keys):
            hold, is_pin = self._of.get(key), position < pins
            asker = None if is_pin else session
            if hold is not None and hold.session is not None and hold.session is not asker:
                if hold.session == asker:
                    session = hold.session  # the same object from here on: no further block compares it
                else:
                    hold.session = None
            if hold is None:
                own = own or frozenset(keys)
                if not self._has_room(client, until_s, own):
                    self._counts.refused += len(keys) - position
                    return
                self._add(key, position, until_s, client, asker, is_pin)
            elif hold.until_s >= until_s and hold.is_pin >= is_pin:
                continue
            else:  # it still counts for the client that held it before: the place is taken already
                hold.until_s, hold.is_pin = max(until_s, hold.until_s), is_pin or hold.is_pin
            self._counts.held += 1

    def _has_room(self, client: Client, until_s: float, own: Container[Key]) -> bool:
        if self.clients is not None and self.clients.is_full(client):
            first = self.clients.first(client)
        elif self.classes.is_full(client.class_name) or len(self._of) >= self._most:
            first = self.classes.first(client.class_name)
        else:
            return True
        if first is None or first[0] > until_s or first[3] in own:
            return False
        self.drop(first[3])
        self._counts.displaced += 1
        return True

    def _add(
        self, key: Key, position: int, until_s: float, client: Client, session: Session | None, is_pin: bool
    ) -> None:
        self._number += 1
        self._of[key] = Hold(until_s, client, session, self._number, is_pin)
        self._policy.hold_began(key)
        entry = until_s, -position, self._number, key
        self.classes.add(client.class_name, entry)
        if self.clients is not None:
            self.clients.add(client, entry)

    def _end_of(self, entry: Time) -> float | None:
        hold = self._of.get(entry[3])
        return None if hold is None or hold.number != entry[2] else hold.until_s

    def end(self, key: Key, session: Session | None) -> bool:
        """Hold a block no longer where this session alone asked for it. False where it is held all the same."""
        hold = self._of.get(key)
        if hold is not None and (hold.session is None or hold.session != session):
            return False
        self.drop(key)
        return True

    def drop(self, key: Key) -> None:
        """Hold a block no longer."""
        found = self._of.pop(key, None)
        if found is None:
            return
        self._policy.hold_ended(key)
        self.classes.remove(found.client.class_name)
        if self.clients is not None:
            self.clients.remove(found.client)

    def expire(self, now_s: float) -> None:
        """Drop the holds whose time is over. Goes by classes: there are few of them, and clients may be many."""
        for name in self.classes:
            while (first := self.classes.first(name)) is not None and first[0] <= now_s:
                self.drop(first[3])

    def clear(self) -> None:
        """Drop all holds."""
        held, self._of = self._of, {}
        self.classes.clear()
        if self.clients is not None:
            self.clients.clear()
        for key in held:
            self._policy.hold_ended(key)


class Hinted(CachingPolicy):
    """Evicts by another policy, save for what hints say.

    Its owner calls :meth:`hinted` after ``asked`` and before ``evict`` and ``stored``, and once more for the whole
    window when a request has ended; :meth:`wanted` says how much is worth storing. A block that is held back is not
    evicted before its time is over, so that :meth:`evict` may give up fewer blocks than it is asked for where the
    ``protected`` ones are many besides. The other policy is told what is held, and of no other hint, and may rather
    keep what is there than take a newcomer that is :meth:`held` back: the owner has room made for that by
    :meth:`evict`, and for the others by :meth:`make_room`. Memory is bounded by the capacity.

    A block that several asked to keep is held until the last of their times is over, whichever of them ends before:
    who asked is not remembered beyond the first session.

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
        """None of its blocks is in ``_first`` or ``_unwanted``."""
        self._first: OrderedDict[Key, None] = OrderedDict()
        """Blocks there to be evicted first, in this order."""
        self._unwanted: OrderedDict[Key, None] = OrderedDict()
        """Blocks that are to be evicted first if they are stored at all."""
        self._parent: dict[Key, Key | None] = {}
        """The block before each one that is there."""
        self._children: dict[Key, int] = {}
        """Number of blocks there that continue a block."""
        self._sessions: OrderedDict[Session, Chain] = OrderedDict()
        """Each session's latest window."""
        self._session_blocks = 0

    def _no_holds(self) -> Holds:
        limits = self.limits
        of_client = limits.class_share if limits.client_share is None else limits.client_share
        shares = limits.share, limits.class_share, of_client
        most, of_class, of_client = (int(share * self.capacity) for share in shares)
        return Holds(most, of_class, of_client, self.counts, self.inner)

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

    def is_needed(self, key: Key, pins: bool = True) -> bool:
        """Whether a block that is there continues it and is of no use without it, or with ``pins``, it is pinned."""
        self._holds.expire(self._clock())
        return key in self._children or (pins and self._holds.is_pinned(key))

    def wanted(self, chain: Chain, hints: Hints) -> int:
        """Number of leading blocks that are worth storing. Of a request that nobody repeats or continues, those that it
        pins."""
        return min(self._pinned(hints), len(chain)) if hints.once or hints.ended else len(chain)

    def _pinned(self, hints: Hints) -> int:
        return hints.pin_tokens // self._block_tokens

    def hinted(self, chain: Chain, hints: Hints, client: Client = ANYBODY) -> None:
        """A request whose window is ``chain`` came with these hints, granted to this client."""
        now_s = self._clock()
        self._holds.expire(now_s)
        pinned = min(self._pinned(hints), len(chain))
        session = None if hints.session is None else (client, hints.session)
        if session is not None:
            self._follow(session, chain, hints.ended)
        if hints.once:
            self._release([key for key in chain[pinned:] if key not in self], None)
        elif hints.ended:
            self._release(self._private(chain, pinned), session)
        until_s = now_s + (self.limits.keep_s if hints.keep_s is None else min(hints.keep_s, self.limits.keep_s))
        only_pins = hints.once or hints.ended or hints.keep_s is None
        self._hold(chain[:pinned] if only_pins else chain, until_s, client, session, pinned)

    def forget_hints(self) -> None:
        """Nobody will ask for a block again that hints have named so far, as after a change of weights: none is held
        back any more, and no session is known. The inner policy goes on."""
        self._holds.clear()
        self._unwanted.clear()
        self._sessions.clear()
        self._session_blocks = 0

    def _hold(self, keys: Sequence[Key], until_s: float, client: Client, session: Session | None, pins: int) -> None:
        self._want(keys)
        if keys and until_s > self._clock():
            self._holds.add(keys, until_s, client, session, pins)

    def _want(self, keys: Sequence[Key]) -> None:
        """Evict these blocks first no longer."""
        for marked in (self._first, self._unwanted):
            if marked and not marked.keys().isdisjoint(keys):
                for key in keys:
                    marked.pop(key, None)

    def _release(self, keys: Sequence[Key], session: Session | None) -> None:
        """Evict these blocks of a window first, its last one before all others, down to one that is pinned or that not
        this session alone asked to keep: that one is of no use without those before it."""
        for key in reversed(keys):
            if not self._holds.end(key, session):
                break
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

    def _follow(self, session: Session, chain: Chain, ended: bool) -> None:
        """Remember the session's window. Release what the window before has beyond it, or all of it at the end."""
        before = self._sessions.pop(session, ())
        self._session_blocks -= len(before)
        now = frozenset(() if ended else chain)
        if not now.issuperset(before):
            self._release([key for key in self._private(before, 0) if key not in now and key in self], session)
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
