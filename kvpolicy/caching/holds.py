"""Which blocks hints hold back from eviction, for whom and until when, within what each may hold; and what a policy
hears of that where others hold blocks, too."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from heapq import heapify, heappop, heappush, heapreplace

from kvpolicy.caching.base import CachingPolicy, Key
from kvpolicy.request_marks import Client

STALE = 4
"""Entries of a heap per entry in use at which outdated ones are removed."""
Session = tuple[Client, str]
"""A client and the name that it gave: nobody ends or replaces a session of another client."""
Time = tuple[float, int, int, Key]
"""When a hold ends, minus the block's position, a number that is never the same twice, and the block. Of one window the
last block goes first."""


@dataclass(slots=True)
class HintCounts:
    """Blocks by what became of the hints about them."""

    held: int = 0
    """Held back from eviction, or held back for longer: as a rule when a request ends, and what was there of its
    prompt when it comes, too."""
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


class HeldAtAll:
    """Blocks that are held for one reason or several, as hints hold them and copies of requests need them. ``policy``:
    is told which ones, once each."""

    def __init__(self, policy: CachingPolicy) -> None:
        self._policy = policy
        self._reasons: dict[Key, int] = {}

    def began(self, key: Key) -> None:
        """There is one reason more."""
        reasons = self._reasons[key] = self._reasons.get(key, 0) + 1
        if reasons == 1:
            self._policy.hold_began(key)

    def ended(self, key: Key) -> None:
        """There is one reason less."""
        if self._reasons[key] > 1:
            self._reasons[key] -= 1
        else:
            del self._reasons[key]
            self._policy.hold_ended(key)


class Holds:
    """Blocks held back from eviction, each until a time and for a client: ``most`` in all, ``of_class`` for the clients
    of a class together, and ``of_client`` for each of these. ``at_all``: hears which ones."""

    def __init__(self, most: int, of_class: int, of_client: int, counts: HintCounts, at_all: HeldAtAll) -> None:
        self._most, self._counts, self._at_all = most, counts, at_all
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

    def add(
        self,
        keys: Sequence[Key],
        until_s: float,
        client: Client,
        session: Session | None,
        pins: int,
        there: Container[Key] | None = None,
    ) -> None:
        """Hold these blocks, the leading ones of a window of this session, until then, the first ``pins`` of them as
        pins. A hold is only ever extended, and that of several lasts until the last of their times. ``there``: where it
        is given, none of the others begins to be held.

        Where the client has no room left, its holds that end first are dropped, and where its class has none, or all
        together, those of the class; never those of the same window. What exceeds the room even so is not held.
        """
        own: frozenset[Key] | None = None
        for position, key in enumerate(keys):
            hold, is_pin = self._of.get(key), position < pins
            if hold is None and there is not None and key not in there:
                continue
            asker = None if is_pin else session
            if hold is not None and hold.session is not None and hold.session is not asker:
                if hold.session == asker:
                    session = hold.session  # the same object from here on: no further block compares it
                else:
                    hold.session = None
            if hold is None:
                own = own or frozenset(keys)
                if not self._has_room(client, until_s, own):
                    self._counts.refused += sum(
                        one not in self._of and (there is None or one in there) for one in keys[position:]
                    )
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
        self._at_all.began(key)
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
        self._at_all.ended(key)
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
            self._at_all.ended(key)
