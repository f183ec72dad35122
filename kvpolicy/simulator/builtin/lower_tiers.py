"""The tiers below the device that hold what no preempted request needs, and the reads that requests wait for."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from kvpolicy.caching import CachingPolicy, Foreseen, Hinted
from kvpolicy.caching import spec as caching
from kvpolicy.cost.block_price import read_first
from kvpolicy.request_marks import Client
from kvpolicy.simulator.base import Server
from kvpolicy.simulator.builtin.blocks import Pool
from kvpolicy.simulator.builtin.file_tier import Demoting, FileTier
from kvpolicy.simulator.builtin.host_copies import HostPool
from kvpolicy.simulator.builtin.live_request import LiveRequest


class HintedPool(HostPool):
    """A host pool whose caching policy heeds the hints of requests, as that of the files below it does."""

    def __init__(self, server: Server, cache: Hinted, pool: Pool, files: FileTier | None) -> None:
        super().__init__(server, cache, pool.keys)
        self._server, self._keys, self._files = server, pool.keys, files

    def asked(self, live: LiveRequest) -> None:
        super().asked(live)
        self._heed(live, live.request.prompt_tokens, over=False)

    def given_back(self, live: LiveRequest) -> None:
        request = live.request
        if request.hints and live.outputs == request.output_tokens:
            self._heed(live, live.tokens, over=True)
        keys = self._keys(live, live.cached)
        self._watch(live, keys[: self._store.wanted(keys, request.hints.of_prompt(request.prompt_tokens))])

    def _heed(self, live: LiveRequest, tokens: int, over: bool) -> None:
        """Let the policy know what the request says of its window, which has so many tokens."""
        request = live.request
        if request.hints:
            chain = self._keys(live, tokens // self._server.block_size)
            hints, client = request.hints.of_prompt(request.prompt_tokens), Client(request.class_name)
            self._store.hinted(chain, hints, client, live.number, over)
            if self._files is not None:
                self._files.hinted(chain, hints, client, live.number, over)


MakeCaching = Callable[[int, caching.Price], CachingPolicy]
"""Makes a caching policy for so many blocks, which each save what that says by their index in a prompt."""


def host_pool(
    server: Server,
    price: caching.Price,
    pool: Pool,
    clock: Callable[[], float],
    made: MakeCaching | None = None,
) -> tuple[HostPool, FileTier | None]:
    """Host memory, which learns from ``pool`` what requests give back where it caches that, and the files below it.

    ``price``: of a block by its index in a prompt, by which the caching policy goes. ``made``: makes the caching policy
    of host memory in place of the server's. ``clock``: the virtual time, in seconds.
    """
    cache = server.cache
    if cache is None:
        return HostPool(server), None
    above = caching.load(cache.policy, server.host_blocks, price, allow_python=True)
    if made is not None:
        above = made(server.host_blocks, price)
    if above is None:
        return HostPool(server), None
    foreseen = above if isinstance(above, Foreseen) else None
    files = None
    if cache.file_blocks:
        read = read_first(price, server.block_bytes / cache.file_bytes_per_s)
        below = caching.load(cache.policy, cache.file_blocks, read, allow_python=True)
        assert below is not None
        files = FileTier(cache, server.block_bytes, Hinted(below, clock, server.block_size, cache.hints))
        above = Demoting(above, files)
    copies = HintedPool(server, Hinted(above, clock, server.block_size, cache.hints), pool, files)
    if foreseen is not None:
        copies.on_served = foreseen.served
        copies.store_in_order(foreseen.in_order)
    if files is not None:
        copies.hand_on_where(files.takes)
        copies.in_files = files.has
    pool.given_back = copies.given_back
    return copies, files


class FileReads:
    """Reads that requests wait for before they are admitted, at most one for each."""

    def __init__(self, server: Server, files: FileTier | None, pool: Pool, copies: HostPool) -> None:
        self._block_size, self._files, self._pool, self._copies = server.block_size, files, pool, copies
        self._ends_s: dict[LiveRequest, float] = {}
        self._coming: dict[int, float] = {}
        """When the read of each block that is being read ends."""
        self.worth: Callable[[LiveRequest, int, int, float], bool] = lambda live, total_tokens, local, read_s: True
        """Whether a request of so many tokens, of which so many are on the device and in host memory, reads for so many
        seconds what it has in files."""

    @property
    def next_s(self) -> float | None:
        """When the next read ends."""
        return min(self._ends_s.values(), default=None)

    def begin_at(self, now_s: float) -> bool:
        """Set the time; return whether a read has ended since the last one."""
        if self._files is None:
            return False
        self._files.now_s = now_s
        ended = [live for live, end_s in self._ends_s.items() if end_s <= now_s]
        for live in ended:
            del self._ends_s[live]
            for key in live.staged:
                if self._coming.get(key, inf) <= now_s:
                    del self._coming[key]
        return bool(ended)

    def delays(self, live: LiveRequest) -> bool:
        """Whether a request that could be admitted waits for a read, which begins when this is asked first. What is
        being read for another one is not read again."""
        files = self._files
        if files is None:
            return False
        if live in self._ends_s:
            return True
        if live.asked_files or live.copy is not None or live.computed:
            return False
        live.asked_files = True
        local = len(self._pool.hits(live)) * self._block_size
        keys = self._copies.beyond_host(live, local)
        keys = keys[: files.lookup(keys)]
        if not keys:
            return False
        unread = [key for key in keys if key not in self._coming]
        read_s = files.read_s(len(unread)) if unread else max(map(self._coming.__getitem__, keys)) - files.now_s
        before = local + self._copies.hit_tokens(live, local)
        # Beside going on with what host memory has: that can be loaded without waiting for a file.
        if not self.worth(live, before + len(keys) * self._block_size, before, read_s):
            return False
        if unread:
            self._coming |= dict.fromkeys(unread, files.read(len(unread)))
        live.staged = keys
        self._ends_s[live] = files.now_s + read_s
        return True
