"""KV blocks of the device: a count where no two requests can share one, vLLM's own bookkeeping where they can.

With prefix caching every full block has a content. Contents that others may have too (those with prefix ids: prompts,
and answers that a session's next turn repeats) are known by a key from the start. All others belong to one request,
which alone can find them again, and only after it was preempted: they are entered into the cache then, at no cost
before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from hashlib import blake2b
from typing import Protocol

from kvpolicy.simulator.builtin.live_request import Held, Live
from kvpolicy.workload import Request

ID_BYTES = 16
PRIVATE_BITS = 24
"""Room for the index of a block in its request within a private key."""


class Pool(Protocol):
    """``free``: blocks that can be had, cached ones that nobody holds among them."""

    free: int

    def hits(self, live: Live) -> Sequence[Held]:
        """Cached blocks that hold its leading tokens, at most up to the last but one. Changes nothing."""
        ...

    def idle(self, hits: Sequence[Held]) -> int:
        """How many of them nobody holds: taking them makes fewer free."""
        ...

    def adopt(self, live: Live, hits: Sequence[Held]) -> None:
        """Hold them; the request holds nothing yet."""
        ...

    def grow(self, live: Live, count: int) -> None:
        """Hold ``count`` more. The caller has seen that they are free."""
        ...

    def cache(self, live: Live, tokens: int) -> None:
        """Its first ``tokens`` tokens are computed and known: full blocks of them can be found."""
        ...

    def release(self, live: Live, again: bool) -> None:
        """Hold nothing any more. ``again``: whether the request will come back and look for its own."""
        ...

    def shared(self, live: Live, count: int) -> int:
        """Of its first ``count`` blocks, those that others hold too."""
        ...


class CountedPool:
    """Without prefix caching blocks are all alike."""

    def __init__(self, blocks: int) -> None:
        self.free = blocks

    def hits(self, live: Live) -> Sequence[Held]:
        return ()

    def idle(self, hits: Sequence[Held]) -> int:
        return 0

    def adopt(self, live: Live, hits: Sequence[Held]) -> None:
        """There are none."""

    def grow(self, live: Live, count: int) -> None:
        live.held += count
        self.free -= count

    def cache(self, live: Live, tokens: int) -> None:
        """Nothing is cached."""

    def release(self, live: Live, again: bool) -> None:
        self.free += live.held
        live.held = 0

    def shared(self, live: Live, count: int) -> int:
        return 0


class CachingPool:
    """Reference counts, contents, and the queue of free blocks: least recently used first, tails before heads,
    blocks without content before all others.

    Blocks that nobody can look for are alike: the queue holds runs of them as numbers, and only the others one by one.
    """

    def __init__(self, blocks: int, block_size: int) -> None:
        self.free = blocks
        self._size = block_size
        self._blocks = blocks
        self._found: dict[int, list[Held]] = {}
        """Blocks by content, in the order in which they got it."""
        # An entry is good while its block names the place: taking one out of the middle leaves a stale entry.
        self._queue: deque[int | tuple[int, Held]] = deque([blocks])
        self._places = 0

    def hits(self, live: Live) -> Sequence[Held]:
        most = (live.tokens - 1) // self._size
        found = []
        for index in range(most if live.preemptions else min(most, len(live.keys))):
            blocks = self._found.get(self._key(live, index))
            if blocks is None:
                break
            found.append(blocks[0])
        return found

    def idle(self, hits: Sequence[Held]) -> int:
        return sum(not block.holders for block in hits)

    def adopt(self, live: Live, hits: Sequence[Held]) -> None:
        for block in hits:
            if not block.holders:
                block.place = 0
                self.free -= 1
            block.holders += 1
        live.known = list(hits)
        live.held = live.cached = len(hits)

    def grow(self, live: Live, count: int) -> None:
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
                self._evict(entry[1])
                count -= 1
            queue.popleft()

    def cache(self, live: Live, tokens: int) -> None:
        full = tokens // self._size
        if full <= live.cached:
            return
        for index in range(live.cached, min(full, len(live.keys))):
            live.known.append(self._enter(live.keys[index]))
        live.cached = full

    def release(self, live: Live, again: bool) -> None:
        if again:
            live.known += [self._enter(self._key(live, index)) for index in range(len(live.known), live.cached)]
        self._put_first(live.held - live.cached)
        self._put_last(live.cached - len(live.known))
        for block in reversed(live.known):
            block.holders -= 1
            if not block.holders:
                self._places += 1
                block.place = self._places
                self._queue.append((self._places, block))
                self.free += 1
        live.known, live.held, live.cached = [], 0, 0
        if len(self._queue) > 2 * self._blocks + 1024:
            self._queue = deque(entry for entry in self._queue if isinstance(entry, int) or entry[1].place == entry[0])

    def shared(self, live: Live, count: int) -> int:
        return sum(block.holders > 1 for block in live.known[:count])

    @property
    def references(self) -> int:
        """To blocks that somebody may look for."""
        return sum(block.holders for blocks in self._found.values() for block in blocks)

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

    def _enter(self, key: int) -> Held:
        block = Held(key)
        self._found.setdefault(key, []).append(block)
        return block

    def _evict(self, block: Held) -> None:
        blocks = self._found[block.key]
        if len(blocks) == 1:
            del self._found[block.key]
        else:
            blocks.remove(block)

    def _key(self, live: Live, index: int) -> int:
        if index < len(live.keys):
            return live.keys[index]
        return ((live.number << PRIVATE_BITS) | index) * 2 + 1


def pool_for(blocks: int, block_size: int, prefix_caching: bool) -> Pool:
    return CachingPool(blocks, block_size) if prefix_caching else CountedPool(blocks)


def shared_keys(request: Request, block_size: int) -> tuple[int, ...]:
    """Keys of the leading full blocks whose tokens the request's prefix ids determine, generated ones too; even, not 0.

    A block's key follows from the key before it and the ids of its own tokens, so that equal keys mean equal tokens
    from the start.
    """
    size = request.prefix_block_tokens
    known = min(request.total_tokens, len(request.prefix) * size)
    ids = b"".join([one.to_bytes(ID_BYTES, "little", signed=True) for one in request.prefix])
    keys: list[int] = []
    so_far, entered = size.to_bytes(8, "little"), 0
    for end in range(block_size, known + 1, block_size):
        upto = -(-end // size) * ID_BYTES
        so_far = blake2b(so_far + ids[entered:upto], digest_size=8).digest()
        entered = upto
        keys.append((int.from_bytes(so_far, "little") | 1) << 1)
    return tuple(keys)
