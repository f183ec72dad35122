"""KV blocks of the device: a mere count without prefix caching, vLLM's bookkeeping with it.

With prefix caching every full block has a content. Content that other requests may share (that with prefix ids:
prompts, and answers that a session's next turn repeats) has a key from the start. All other content belongs to one
request, which can look for it only after a preemption. Such blocks get their key when the request is preempted, which
saves the work for all requests that never are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple, Protocol

from kvpolicy.simulator.builtin.live_request import KeyedBlock, LiveRequest, Status
from kvpolicy.workload import Request

ID_BYTES = 16
PRIVATE_BITS = 24
"""Bits of a private key that hold the index of the block in its request."""


Contents = list[tuple[int | None, KeyedBlock | None]]
"""Key of each block of a request, in order, and the block itself; both None for one without a key."""


class Eviction(NamedTuple):
    """A block whose content was given away."""

    block: KeyedBlock
    taker: LiveRequest
    """Who took it."""
    is_new: bool
    """Whether that request was about to run for the first time."""


def in_step_order(evicted: Iterable[Eviction]) -> list[KeyedBlock]:
    """The blocks in the order in which a server learns of them from a scheduled step: first those that the step's
    output does not list, of requests that are being loaded or were preempted after all, then those of new requests."""

    def place(one: Eviction) -> int:
        return 2 - one.is_new if one.taker.status is Status.RUNNING else 0

    return [one.block for one in sorted(evicted, key=place)]


GivenBack = Callable[[LiveRequest], None]


class Pool(Protocol):
    """``free``: blocks that can be allocated, among them cached blocks that no request holds. ``evicted``: blocks whose
    content was given away, and who took them; the caller empties it. ``given_back``: where it is set, it is called with
    every request that is about to give up its blocks, the cached ones of which have keys then: by :meth:`release` with
    those that end, by :meth:`give_back` with those that are preempted."""

    free: int
    evicted: list[Eviction]
    given_back: GivenBack | None

    def hits(self, live: LiveRequest) -> Sequence[KeyedBlock]:
        """Cached blocks that hold the request's leading tokens, up to the last token but one. Changes nothing."""
        ...

    def idle(self, hits: Sequence[KeyedBlock]) -> int:
        """Number of these blocks that no request holds; adopting them lowers ``free``."""
        ...

    def adopt(self, live: LiveRequest, hits: Sequence[KeyedBlock]) -> None:
        """Let the request, which holds no block yet, hold these blocks."""
        ...

    def grow(self, live: LiveRequest, count: int) -> None:
        """Let the request hold ``count`` more blocks. The caller has checked that they are free."""
        ...

    def cache(self, live: LiveRequest, tokens: int) -> None:
        """Enter the full blocks of the first ``tokens`` tokens, which are computed and known, into the cache."""
        ...

    def release(self, live: LiveRequest, preempted: bool) -> None:
        """Give up all blocks of the request. ``preempted``: it will be back and look for them."""
        ...

    def withdraw(self, live: LiveRequest) -> None:
        """Take out of the cache what the step that now preempts the request was to compute."""
        ...

    def give_back(self, live: LiveRequest) -> None:
        """Tell ``given_back`` of a request that is about to be preempted, before that is decided, as a server does."""
        ...

    def shared(self, live: LiveRequest, count: int) -> int:
        """Number of its first ``count`` blocks that other requests hold too."""
        ...

    def contents(self, live: LiveRequest, count: int) -> Contents:
        """What its first ``count`` blocks hold, for a request that is about to be preempted."""
        ...

    def keys(self, live: LiveRequest, count: int) -> list[int]:
        """Keys of its first ``count`` blocks, which are full; none without prefix caching."""
        ...

    def unevicting(self, count: int, keep: Callable[[KeyedBlock], bool]) -> int:
        """How many blocks, up to ``count``, can be allocated before one that satisfies ``keep`` is evicted."""
        ...


class CountedPool:
    """Blocks without prefix caching: interchangeable, so a count suffices."""

    def __init__(self, blocks: int) -> None:
        self.free = blocks
        self.evicted: list[Eviction] = []
        self.given_back: GivenBack | None = None

    def hits(self, live: LiveRequest) -> Sequence[KeyedBlock]:
        return ()

    def idle(self, hits: Sequence[KeyedBlock]) -> int:
        return 0

    def adopt(self, live: LiveRequest, hits: Sequence[KeyedBlock]) -> None:
        """Nothing to do: there are no hits."""

    def grow(self, live: LiveRequest, count: int) -> None:
        live.held += count
        self.free -= count

    def cache(self, live: LiveRequest, tokens: int) -> None:
        """Nothing to do."""

    def release(self, live: LiveRequest, preempted: bool) -> None:
        self.free += live.held
        live.held = 0

    def withdraw(self, live: LiveRequest) -> None:
        """Nothing to do."""

    def give_back(self, live: LiveRequest) -> None:
        """Nothing to do."""

    def shared(self, live: LiveRequest, count: int) -> int:
        return 0

    def contents(self, live: LiveRequest, count: int) -> Contents:
        return [(None, None)] * count

    def keys(self, live: LiveRequest, count: int) -> list[int]:
        return []

    def unevicting(self, count: int, keep: Callable[[KeyedBlock], bool]) -> int:
        return count


class CachingPool:
    """Reference counts, contents, and the queue of free blocks: least recently used first, tails before heads,
    blocks without content before all others.

    Blocks without a key are interchangeable: the queue holds a run of them as one number, and keyed blocks one by one.
    """

    def __init__(self, blocks: int, block_size: int) -> None:
        self.free = blocks
        self.evicted: list[Eviction] = []
        self._size = block_size
        self._blocks = blocks
        self._first: dict[int, KeyedBlock] = {}
        """The block of each content key that was entered first: the one that requests find."""
        self._later: dict[int, list[KeyedBlock]] = {}
        """Further blocks of the same key, in the order in which they were entered; few, unlike keys."""
        # An entry is valid while its block has that place. Adopting a block from the middle leaves a stale entry.
        self._queue: deque[int | tuple[int, KeyedBlock]] = deque([blocks])
        self._places = 0
        self.given_back: GivenBack | None = None

    def hits(self, live: LiveRequest) -> Sequence[KeyedBlock]:
        max_blocks = (live.tokens - 1) // self._size
        hits = []
        for index in range(max_blocks if live.preemptions else min(max_blocks, len(live.keys))):
            block = self._first.get(self._key(live, index))
            if block is None:
                break
            hits.append(block)
        return hits

    def idle(self, hits: Sequence[KeyedBlock]) -> int:
        return sum(not block.holders for block in hits)

    def adopt(self, live: LiveRequest, hits: Sequence[KeyedBlock]) -> None:
        for block in hits:
            if not block.holders:
                block.place = 0
                self.free -= 1
            block.holders += 1
        live.keyed_blocks = list(hits)
        live.held = live.cached = len(hits)

    def grow(self, live: LiveRequest, count: int) -> None:
        self.free -= count
        live.held += count
        queue = self._queue
        while count:
            entry = queue[0]
            if isinstance(entry, int):
                if entry > count:
                    queue[0] = entry - count
                    return
                count -= entry
            elif entry[1].place == entry[0]:
                self.evicted.append(Eviction(entry[1], live, live.status is Status.WAITING))
                self._forget(entry[1])
                count -= 1
            queue.popleft()

    def cache(self, live: LiveRequest, tokens: int) -> None:
        full = tokens // self._size
        if full <= live.cached:
            return
        for index in range(live.cached, min(full, len(live.keys))):
            live.keyed_blocks.append(self._keyed_block(live.keys[index]))
        live.cached = full

    def release(self, live: LiveRequest, preempted: bool) -> None:
        if preempted or self.given_back is not None:
            self._give_keys(live)
        if self.given_back is not None and not preempted:
            self.given_back(live)
        self._put_first(live.held - live.cached)
        self._put_last(live.cached - len(live.keyed_blocks))
        for block in reversed(live.keyed_blocks):
            block.holders -= 1
            if not block.holders:
                self._places += 1
                block.place = self._places
                self._queue.append((self._places, block))
                self.free += 1
        live.keyed_blocks, live.held, live.cached = [], 0, 0
        if len(self._queue) > 2 * self._blocks + 1024:
            self._queue = deque(entry for entry in self._queue if isinstance(entry, int) or entry[1].place == entry[0])

    def withdraw(self, live: LiveRequest) -> None:
        full = live.computed // self._size
        if live.cached <= full:
            return
        for block in live.keyed_blocks[full:]:
            self._forget(block)
        del live.keyed_blocks[full:]
        live.cached = full

    def give_back(self, live: LiveRequest) -> None:
        if self.given_back is not None:
            self._give_keys(live)
            self.given_back(live)

    def shared(self, live: LiveRequest, count: int) -> int:
        return sum(block.holders > 1 for block in live.keyed_blocks[:count])

    def contents(self, live: LiveRequest, count: int) -> Contents:
        self._give_keys(live)
        # A block has its key when the step that fills it is scheduled, which may preempt the request after all.
        full = live.computed // self._size
        keyed: Contents = [(block.key, block) for block in live.keyed_blocks[: min(full, count)]]
        return keyed + [(None, None)] * (count - len(keyed))

    def keys(self, live: LiveRequest, count: int) -> list[int]:
        return [self._key(live, index) for index in range(count)]

    def unevicting(self, count: int, keep: Callable[[KeyedBlock], bool]) -> int:
        blocks = 0
        for entry in self._queue:
            if blocks >= count:
                return count
            if isinstance(entry, int):
                blocks += entry
            elif entry[1].place == entry[0]:
                if keep(entry[1]):
                    return blocks
                blocks += 1
        return min(blocks, count)

    @property
    def references(self) -> int:
        """Holders of keyed blocks, all together."""
        return sum(block.holders for blocks in (self._first.values(), *self._later.values()) for block in blocks)

    def _give_keys(self, live: LiveRequest) -> None:
        """Give keys to those cached blocks of a request that have none, since it will look for them."""
        live.keyed_blocks += [
            self._keyed_block(self._key(live, index)) for index in range(len(live.keyed_blocks), live.cached)
        ]

    def _put_first(self, count: int) -> None:
        self.free += count
        first = self._queue[0] if self._queue else None
        if isinstance(first, int):
            self._queue[0] = first + count
        elif count:
            self._queue.appendleft(count)

    def _put_last(self, count: int) -> None:
        self.free += count
        last = self._queue[-1] if self._queue else None
        if isinstance(last, int):
            self._queue[-1] = last + count
        elif count:
            self._queue.append(count)

    def _keyed_block(self, key: int) -> KeyedBlock:
        block = KeyedBlock(key)
        if self._first.setdefault(key, block) is not block:
            self._later.setdefault(key, []).append(block)
        return block

    def _forget(self, block: KeyedBlock) -> None:
        key = block.key
        later = self._later.get(key)
        if later is None:
            del self._first[key]
            return
        if self._first[key] is block:
            self._first[key] = later.pop(0)
        else:
            later.remove(block)
        if not later:
            del self._later[key]

    def _key(self, live: LiveRequest, index: int) -> int:
        if index < len(live.keys):
            return live.keys[index]
        return ((live.number << PRIVATE_BITS) | index) * 2 + 1


def pool_for(blocks: int, block_size: int, prefix_caching: bool) -> Pool:
    return CachingPool(blocks, block_size) if prefix_caching else CountedPool(blocks)


def shared_keys(request: Request, block_size: int) -> tuple[int, ...]:
    """Keys of the leading full blocks whose tokens, generated ones included, the prefix ids determine; even and not 0.

    A block's key follows from the key before it and the ids of its own tokens, so that equal keys mean equal tokens
    from the start.
    """
    size = request.prefix_block_tokens
    known_tokens = min(request.total_tokens, len(request.prefix) * size)
    ids = b"".join([prefix_id.to_bytes(ID_BYTES, "little", signed=True) for prefix_id in request.prefix])
    keys: list[int] = []
    digest, hashed_bytes = size.to_bytes(8, "little"), 0
    for end in range(block_size, known_tokens + 1, block_size):
        end_byte = -(-end // size) * ID_BYTES
        digest = blake2b(digest + ids[hashed_bytes:end_byte], digest_size=8).digest()
        hashed_bytes = end_byte
        keys.append((int.from_bytes(digest, "little") | 1) << 1)
    return tuple(keys)
