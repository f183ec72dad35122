"""Requests whose KV was computed before the last reset of the prefix cache, at least in part, as by former weights.

Imports no vLLM: everything is read from the scheduler object.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

logger = logging.getLogger(f"vllm.{__name__}")


class StaleRequests:
    """One per engine core. What these requests hold is not what its hashes stand for: nothing of it may come to host
    memory, where others would find it.

    vLLM refuses a reset while blocks are in use, and goes on finding on the device what was computed before. Whoever
    is given such blocks is stale, too. With several block tables some of these may be missed, and come back with their
    own KV of before: nobody else finds it, as no prompts are kept there.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        """Their ids: nearly always none. A preemption enters this file where there are any."""
        self._hashes: dict[int, Any] = {}
        """By device block that others may find, the hash of its stale content. A block that is filled anew has another
        object for a hash, which may well be equal."""
        self._fresh: dict[str, int] = {}
        """Of requests that were given such blocks, how many of their own before these are not stale."""

    def __contains__(self, request: Any) -> bool:
        return request.request_id in self.names

    def reset_begins(self, scheduler: Any) -> None:
        """Whatever was computed so far is stale."""
        self.names = {name for name, request in scheduler.requests.items() if request.num_computed_tokens}
        self._fresh.clear()

    def reset_ends(self, scheduler: Any) -> None:
        """What the device's prefix cache still has is stale: nothing, unless vLLM has refused."""
        self._hashes.clear()
        self._may_be_found(_hashed(scheduler.kv_cache_manager.block_pool.blocks))
        if self._hashes:
            logger.warning(
                "kvpolicy: vLLM has not reset its prefix cache, as blocks are in use: it goes on finding %d blocks, of "
                "which nothing is stored, and whoever holds one is recomputed where it is preempted (counted as "
                "fallback 'stale'); reset it again", len(self._hashes)
            )  # fmt: skip

    def admitted(self, request: Any, scheduler: Any) -> None:
        """The request has blocks again. One that held none goes on in what the device had, or begins anew."""
        if request.num_computed_tokens or not (self.names or self._hashes):
            return
        self._is_fresh(request)
        given = list(_blocks_of(request.request_id, scheduler))
        if any(block.ref_cnt > 1 for block in given):
            # Any of theirs may be found, behind a block of others that is equal to the one before it, too.
            for name in self.names:
                self._may_be_found(self._blocks_of(name, scheduler))
        for number, block in enumerate(given):
            if self._hashes.get(block.block_id) is block.block_hash:
                self.names.add(request.request_id)
                self._fresh[request.request_id] = number
                return

    def loses_blocks(self, request: Any, scheduler: Any) -> None:
        """The request is about to lose its blocks, which the device keeps as long as it can."""
        if request in self:
            self._may_be_found(self._blocks_of(request.request_id, scheduler))

    def ended(self, request: Any, scheduler: Any) -> None:
        """The request is about to lose its blocks, for good."""
        self.loses_blocks(request, scheduler)
        self._is_fresh(request)

    def _is_fresh(self, request: Any) -> None:
        self.names.discard(request.request_id)
        self._fresh.pop(request.request_id, None)

    def _blocks_of(self, name: str, scheduler: Any) -> Iterator[Any]:
        """Stale blocks of a stale request that others may find."""
        return islice(_blocks_of(name, scheduler), self._fresh.get(name, 0), None)

    def _may_be_found(self, blocks: Iterable[Any]) -> None:
        self._hashes.update((block.block_id, block.block_hash) for block in blocks)


def _blocks_of(request_id: str, scheduler: Any) -> Iterator[Any]:
    """Those of its blocks that others may find."""
    return _hashed(chain.from_iterable(scheduler.kv_cache_manager.get_blocks(request_id).blocks))


def _hashed(blocks: Iterable[Any]) -> Iterator[Any]:
    return (block for block in blocks if block.block_hash is not None)
