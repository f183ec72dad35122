"""Requests whose KV was computed before the last reset of the prefix cache, at least in part, as by former weights.

Imports no vLLM: everything is read from the scheduler object.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from itertools import chain
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

    def __contains__(self, request: Any) -> bool:
        return request.request_id in self.names

    def reset_begins(self, scheduler: Any) -> None:
        """Whatever was computed so far is stale."""
        self.names = {name for name, request in scheduler.requests.items() if request.num_computed_tokens}

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
        self.names.discard(request.request_id)
        for name in self.names:  # any of theirs may be found behind a block of others that is equal to the one before
            self._may_be_found(_blocks_of(name, scheduler))
        given = _blocks_of(request.request_id, scheduler)
        if any(self._hashes.get(block.block_id) is block.block_hash for block in given):
            self.names.add(request.request_id)

    def loses_blocks(self, request: Any, scheduler: Any) -> None:
        """The request is about to lose its blocks, which the device keeps as long as it can."""
        if request in self:
            self._may_be_found(_blocks_of(request.request_id, scheduler))

    def ended(self, request: Any, scheduler: Any) -> None:
        """The request is about to lose its blocks, for good."""
        self.loses_blocks(request, scheduler)
        self.names.discard(request.request_id)

    def _may_be_found(self, blocks: Iterable[Any]) -> None:
        self._hashes.update((block.block_id, block.block_hash) for block in blocks)


def _blocks_of(request_id: str, scheduler: Any) -> Iterator[Any]:
    """Those of its blocks that others may find."""
    return _hashed(chain.from_iterable(scheduler.kv_cache_manager.get_blocks(request_id).blocks))


def _hashed(blocks: Iterable[Any]) -> Iterator[Any]:
    return (block for block in blocks if block.block_hash is not None)
