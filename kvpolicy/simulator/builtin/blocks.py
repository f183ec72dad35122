"""KV blocks of the device: a count where no two requests can share one, vLLM's own bookkeeping where they can.

With prefix caching every full block has a content. Contents that others may have too (those of prompts with prefix
ids) are known by a key from the start. All others belong to one request, which alone can find them again, and only
after it was preempted: they are entered into the cache then, at no cost before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from hashlib import blake2b
from typing import Protocol

from kvpolicy.simulator.builtin.live import Live
from kvpolicy.workload import Request

PRIVATE_BITS = 24
"""Room for the index of a block in its request within a private key."""


class Pool(Protocol):
    """``free``: blocks that can be had, cached ones that nobody holds among them."""

    free: int

    def hits(self, live: Live) -> Sequence[int]:
        """Cached blocks that hold its leading tokens, at most up to the last but one. Changes nothing."""
        ...

    def idle(self, hits: Sequence[int]) -> int:
        """How many of them nobody holds: taking them makes fewer free."""
        ...

    def adopt(self, live: Live, hits: Sequence[int]) -> None:
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

    def hits(self, live: Live) -> Sequence[int]:
        return ()

    def idle(self, hits: Sequence[int]) -> int:
        return 0

    def adopt(self, live: Live, hits: Sequence[int]) -> None:
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
    blocks without content before all others."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.free = blocks
        self._size = block_size
        self._blocks = blocks
        self._holders = [0] * blocks
        self._content = [0] * blocks
        """Key of what a block holds; 0 for nothing that anybody could look for."""
        self._found: dict[int, list[int]] = {}
        """Blocks by content, in the order in which they got it."""
        # A block's place in the queue is good while _place names it: taking one out of the middle leaves a stale one.
        self._queue: deque[int] = deque(range(blocks))
        self._place = list(range(blocks))
        self._stamp = 1

    def hits(self, live: Live) -> Sequence[int]:
        most = (live.tokens - 1) // self._size
        found = []
        for index in range(most if live.preemptions else min(most, len(live.keys))):
            blocks = self._found.get(self._key(live, index))
            if blocks is None:
                break
            found.append(blocks[0])
        return found

    def idle(self, hits: Sequence[int]) -> int:
        return sum(self._holders[block] == 0 for block in hits)

    def adopt(self, live: Live, hits: Sequence[int]) -> None:
        for block in hits:
            if not self._holders[block]:
                self._place[block] = -1
                self.free -= 1
            self._holders[block] += 1
        live.blocks = list(hits)
        live.held = live.cached = len(hits)

    def grow(self, live: Live, count: int) -> None:
        self.free -= count
        live.held += count
        queue, place, content, blocks = self._queue, self._place, self._content, self._blocks
        while count:
            at = queue.popleft()
            block = at % blocks
            if place[block] != at:
                continue
            place[block] = -1
            if content[block]:
                self._evict(block)
            self._holders[block] = 1
            live.blocks.append(block)
            count -= 1

    def cache(self, live: Live, tokens: int) -> None:
        full = tokens // self._size
        for index in range(live.cached, min(full, len(live.keys))):
            self._enter(live.blocks[index], live.keys[index])
        live.cached = max(live.cached, full)

    def release(self, live: Live, again: bool) -> None:
        if again:
            for index in range(len(live.keys), live.cached):
                if not self._content[live.blocks[index]]:
                    self._enter(live.blocks[index], self._key(live, index))
        first: list[int] = []
        last: list[int] = []
        for index in range(live.held - 1, -1, -1):
            block = live.blocks[index]
            self._holders[block] -= 1
            if not self._holders[block]:
                (last if index < live.cached else first).append(block)
        self._give_back(first, last)
        live.blocks, live.held, live.cached = [], 0, 0

    def shared(self, live: Live, count: int) -> int:
        return sum(self._holders[block] > 1 for block in live.blocks[:count])

    def _give_back(self, first: list[int], last: list[int]) -> None:
        self.free += len(first) + len(last)
        base = self._stamp * self._blocks
        self._stamp += 1
        self._queue.extendleft(base + block for block in reversed(first))
        self._queue.extend(base + block for block in last)
        for block in first:
            self._place[block] = base + block
        for block in last:
            self._place[block] = base + block
        if len(self._queue) > 2 * self._blocks + 1024:
            self._queue = deque(at for at in self._queue if self._place[at % self._blocks] == at)

    def _enter(self, block: int, key: int) -> None:
        self._content[block] = key
        self._found.setdefault(key, []).append(block)

    def _evict(self, block: int) -> None:
        key = self._content[block]
        self._content[block] = 0
        blocks = self._found[key]
        if len(blocks) == 1:
            del self._found[key]
        else:
            blocks.remove(block)

    def _key(self, live: Live, index: int) -> int:
        if index < len(live.keys):
            return live.keys[index]
        return ((live.number << PRIVATE_BITS) | index) * 2 + 1


def pool_for(blocks: int, block_size: int, prefix_caching: bool) -> Pool:
    return CachingPool(blocks, block_size) if prefix_caching else CountedPool(blocks)


def shared_keys(request: Request, block_size: int) -> tuple[int, ...]:
    """Keys of the leading full blocks whose tokens the request's prefix ids determine; even and not 0.

    A block's key follows from all ids up to its last token, so that equal keys mean equal tokens from the start.
    """
    size = request.prefix_block_tokens
    known = min(request.prompt_tokens, len(request.prefix) * size)
    keys: list[int] = []
    state = blake2b(size.to_bytes(8, "little"), digest_size=8)
    entered = 0
    for end in range(block_size, known + 1, block_size):
        for at in range(entered, -(-end // size)):
            state.update(request.prefix[at].to_bytes(16, "little", signed=True))
        entered = -(-end // size)
        block = state.copy()
        block.update(end.to_bytes(8, "little"))
        keys.append((int.from_bytes(block.digest(), "little") | 1) << 1)
    return tuple(keys)
