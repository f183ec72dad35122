"""A caching policy that heeds what requests say of their KV, around any other policy.

Hints order what is evicted: first what its request said nobody will ask for again, last what was asked to stay
(:mod:`kvpolicy.caching.holds`), and by the other policy in between. A tier calls it, with the hints that
:mod:`kvpolicy.request_marks` reads and bounds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from dataclasses import dataclass

from kvpolicy.caching.base import CachingPolicy, Chain, Key
from kvpolicy.caching.eviction_queue import Queue
from kvpolicy.caching.holds import HeldAtAll, HintCounts, Holds, Session
from kvpolicy.request_marks import ANYBODY, Client, HintLimits, Hints

REMEMBERED = 4
"""Blocks of sessions' windows that are remembered, by block of the capacity."""


@dataclass(frozen=True, slots=True)
class Latest:
    """The request of a session that came last, and its window; an empty one once the session is over."""

    request: Hashable
    chain: Chain

    @property
    def size(self) -> int:
        """What it counts for, in blocks: a session without a window takes room, too."""
        return len(self.chain) or 1


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
        self._needed: set[Key] = set()
        """Blocks that the owner has said are held, as copies of requests need them; the others are held by hints."""
        self._at_all = HeldAtAll(inner)
        self._holds = self._no_holds()
        """None of its blocks is in ``_first`` or ``_unwanted``."""
        self._first = Queue(self._needed)
        """Blocks there to be evicted first, in this order."""
        self._unwanted: OrderedDict[Key, None] = OrderedDict()
        """Blocks that are to be evicted first if they are stored at all."""
        self._parent: dict[Key, Key | None] = {}
        """The block before each one that is there."""
        self._children: dict[Key, int] = {}
        """Number of blocks there that continue a block."""
        self._sessions: OrderedDict[Session, Latest] = OrderedDict()
        """Each session's latest request."""
        self._session_blocks = 0

    def _no_holds(self) -> Holds:
        limits = self.limits
        of_client = limits.class_share if limits.client_share is None else limits.client_share
        shares = limits.share, limits.class_share, of_client
        most, of_class, of_client = (int(share * self.capacity) for share in shares)
        return Holds(most, of_class, of_client, self.counts, self._at_all)

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

    def hinted(
        self,
        chain: Chain,
        hints: Hints,
        client: Client = ANYBODY,
        request: Hashable = None,
        over: bool = False,
        there: Container[Key] | None = None,
    ) -> None:
        """A request whose window is ``chain`` came with these hints, granted to this client.

        ``request``: what tells it from the others of its session. ``over``: whether it has ended, and its window has
        the answer. What it says of the end of its session holds from then on: up to then it needs the window itself.
        One that ends when its session has gone on without it, or is over, asks for nothing but what it pins. The window
        of one that ended before its prompt was computed is what there is of it: its session keeps no more than that.
        ``there``: where it is given, no other block begins to be held; for a request that comes, what the tier has, as
        the rest may never be computed and should take nobody's room.
        """
        self._holds.expire(self._clock())
        pinned = min(self._pinned(hints), len(chain))
        session = None if hints.session is None else (client, hints.session)
        is_last, is_over = hints.ended, hints.ended and over
        now: frozenset[Key] = frozenset()
        if session is not None and self._is_past(session, request, over):
            is_last, is_over, now = True, False, frozenset(self._sessions[session].chain)
            self._release([key for key in self._private(chain, pinned) if key not in now], session)
        elif session is not None:
            self._follow(session, Latest(request, () if is_over else tuple(chain)))
        if hints.once:
            self._release([key for key in chain[pinned:] if key not in self and key not in now], None)
        elif is_over:
            self._release(self._private(chain, pinned), session)
        self._keep(chain, hints, client, session, is_last, there)

    def goes_on(self, chain: Chain, hints: Hints, client: Client, request: Hashable, there: Container[Key]) -> None:
        """The request of :meth:`hinted` has lost its blocks and will come back, as after a preemption. What is there of
        its window by now is held, as what was there when it came."""
        self._holds.expire(self._clock())
        session = None if hints.session is None else (client, hints.session)
        is_past = session is not None and self._is_past(session, request, over=True)
        self._keep(chain, hints, client, session, hints.ended or is_past, there)

    def _keep(
        self,
        chain: Chain,
        hints: Hints,
        client: Client,
        session: Session | None,
        is_last: bool,
        there: Container[Key] | None,
    ) -> None:
        """Hold what the hints ask to keep of a window: of one that nobody continues, what it pins."""
        pinned, now_s = min(self._pinned(hints), len(chain)), self._clock()
        kept = chain[:pinned] if hints.once or is_last or hints.keep_s is None else chain
        until_s = now_s + (self.limits.keep_s if hints.keep_s is None else min(hints.keep_s, self.limits.keep_s))
        self._want(kept)
        if kept and until_s > now_s:
            self._holds.add(kept, until_s, client, session, pinned, there)

    def _is_past(self, session: Session, request: Hashable, over: bool) -> bool:
        """Whether the request ends after another one of its session has come. Nobody knows of a session that was
        forgotten."""
        latest = self._sessions.get(session)
        return over and latest is not None and latest.request != request

    def forget_hints(self) -> None:
        """Nobody will ask for a block again that hints have named so far, as after a change of weights: none is held
        back any more, and no session is known. The inner policy goes on."""
        self._holds.clear()
        self._unwanted.clear()
        self._sessions.clear()
        self._session_blocks = 0

    def _want(self, keys: Sequence[Key]) -> None:
        """Evict these blocks first no longer."""
        if self._first:
            for key in self._first.keys() & keys:
                self._first.remove(key)
        if self._unwanted:
            for key in self._unwanted.keys() & keys:
                del self._unwanted[key]

    def _release(self, keys: Sequence[Key], session: Session | None) -> None:
        """Evict these blocks of a window first, its last one before all others, down to one that is pinned or that not
        this session alone asked to keep: that one is of no use without those before it."""
        for key in reversed(keys):
            if not self._holds.end(key, session):
                break
            if key in self._first or key in self._unwanted:
                continue
            if key in self:
                self._first.put(key)
            else:
                self._unwanted[key] = None
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

    def _follow(self, session: Session, latest: Latest) -> None:
        """Remember the session's latest request. Release what the window before has beyond it."""
        before, now = self._forget(session), frozenset(latest.chain)
        if not now.issuperset(before):
            self._release([key for key in self._private(before, 0) if key not in now], session)
        self._sessions[session] = latest
        self._session_blocks += latest.size
        while self._session_blocks > REMEMBERED * self.capacity and len(self._sessions) > 1:
            self._forget(next(iter(self._sessions)))

    def _forget(self, session: Session) -> Chain:
        """The session's window, which is not remembered any more."""
        latest = self._sessions.pop(session, None)
        if latest is None:
            return ()
        self._session_blocks -= latest.size
        return latest.chain

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
                self._first.put(key)
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
        while len(evicted) < count and (key := self._first.first(protected)) is not None:
            self._first.remove(key)
            self.inner.lost(key)
            evicted.append(key)
        self._first.take_back()
        if len(evicted) < count:
            evicted += others(count - len(evicted), Either(protected, self._holds))
        for key in evicted:
            self._gone(key)
        return evicted

    def hold_began(self, key: Key) -> None:
        self._needed.add(key)
        self._at_all.began(key)

    def hold_ended(self, key: Key) -> None:
        self._needed.discard(key)
        self._first.freed(key)
        self._at_all.ended(key)

    def lost(self, key: Key) -> None:
        """A block is gone, or one that hints may hold back will not come."""
        if key in self:
            self.inner.lost(key)
        self._gone(key)

    def _gone(self, key: Key) -> None:
        self._holds.drop(key)
        self._first.remove(key)
        parent = self._parent.pop(key, None)
        if parent is not None:
            self._children[parent] -= 1
            if not self._children[parent]:
                del self._children[parent]


class Either:
    """What is in one of two."""

    def __init__(self, one: Container[Key], other: Container[Key]) -> None:
        self._one, self._other = one, other

    def __contains__(self, key: object) -> bool:
        return key in self._one or key in self._other
