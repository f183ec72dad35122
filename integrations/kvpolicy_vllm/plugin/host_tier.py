"""Host memory as a tier of prompts, in the scheduler's process: what the cache of prompts stores there and loads."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict

from kvpolicy.request_marks import Client, Hints
from kvpolicy.tiers import Chain, Finished, Key, Usage
from kvpolicy_vllm.plugin.host_copies import Copy, CopyBook, Settled


class HostTier:
    """The contents that copies of preempted requests and the cache have in host memory; see
    :class:`kvpolicy.tiers.Tier`. A job is a request by its id, and memory a block of the device by its number.

    ``copies``: moves the blocks, of all ranks alike. ``block_tokens``: tokens of a block.
    """

    def __init__(self, copies: CopyBook, block_tokens: Callable[[], int]) -> None:
        self._copies, self._pool, self._block_tokens = copies, copies.pool, block_tokens
        self._loads: dict[Copy, tuple[Key, ...]] = {}
        """Keys of what is being loaded, by the copy that needs it."""
        self._finished: list[Finished[str]] = []

    def lookup(self, chain: Chain) -> int:
        return self._pool.lookup(chain)

    def asked(self, chain: Chain) -> None:
        self._pool.asked(chain)

    def hinted(self, chain: Chain, hints: Hints, client: Client, request: Hashable = None, over: bool = False) -> None:
        self._pool.hinted(chain, hints, client, request, over)

    def store(self, job: str, chain: Chain, blocks: Mapping[int, int]) -> list[int]:
        """Watch these blocks on the device, which the request ``job`` gives back, by indices in their order. What the
        device is about to lose of them is saved before, where that is worth it and the caching policy makes room, and
        is there from then on. So their memory need not stay as it is, and no end is reported."""
        return self._pool.watch(chain, blocks)

    def load(self, job: str, blocks: Sequence[tuple[Key, int]]) -> None:
        """The request ``job`` has these blocks of the device, and waits until all ranks have loaded all of them, or
        have failed. Where it has gone meanwhile, no end is reported."""
        if not blocks:
            self._finished.append(Finished(job, "load", (), {}))
            return
        keys = tuple(key for key, _ in blocks)
        into = tuple(block_id for _, block_id in blocks)
        copy = self._copies.load_contents(job, keys, into, len(blocks) * self._block_tokens())
        self._loads[copy] = keys

    def settled(self, settled: Settled) -> None:
        """All ranks have finished a job of the cache."""
        if settled.direction != "load":
            return
        keys = self._loads.pop(settled.copy, None)
        if keys is None or settled.copy.orphan:  # its request is gone or has lost its blocks
            return
        failed = {} if settled.ok else dict.fromkeys(keys, "load_failed")
        self._finished.append(Finished(settled.copy.request_id, "load", () if failed else keys, failed))

    def finished(self) -> list[Finished[str]]:
        finished, self._finished = self._finished, []
        return finished

    def drop(self, keys: Iterable[Key]) -> None:
        """See :meth:`kvpolicy.host_store.HostStore.drop`. It is of the protocol; a server drops what a failed copy has
        spoiled by its block, as a newer content may have the same key
        (:meth:`kvpolicy.host_store.HostStore.spoiled`)."""
        self._pool.drop(keys)

    def usage(self) -> Usage:
        """``used_bytes`` and ``queued_blocks``: with those of preempted requests. O(blocks). It is of the protocol; a
        server's gauges count slots without going over contents."""
        pool, size = self._pool, self._copies.block_bytes
        return Usage(
            blocks=pool.contents,
            used_bytes=(pool.used + pool.cached) * size,
            capacity_bytes=pool.total * size,
            queued_blocks=self._copies.queued_bytes("save") // size,
            counts=asdict(pool.counts),
        )
