"""Blocks of the device: which of them lose their content, as a step takes them from others, which a step may write to,
and whether a content is there.

Imports no vLLM: everything is read from the scheduler object.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import compress
from operator import attrgetter, ne
from typing import Any

from kvpolicy.host_store import HostStore

KEY, HASH = attrgetter("key"), attrgetter("block_hash")
"""Of what is watched, and of vLLM's blocks of the device."""


def given_away(output: Any, unlisted: Iterable[int], pool: HostStore, blocks: Any) -> Iterator[int]:
    """Blocks that a step takes and whose watched content the prefix cache has dropped.

    ``output``: what vLLM schedules; ``unlisted``: blocks that the step takes and its output does not list; ``blocks``:
    those of the device. A block may have been taken and given back by an earlier step, unwritten: it still has its
    content then. A hit takes blocks and leaves them their content.
    """
    taken = [unlisted, *(request.block_ids[0] for request in output.scheduled_new_reqs)]
    taken += [groups[0] for groups in output.scheduled_cached_reqs.new_block_ids if groups]
    watched = pool.watched
    for block_ids in taken:
        # A prompt may have many blocks that others use, too: they are compared without a line run for each.
        known = [*filter(watched.__contains__, block_ids)]
        keys = [*map(KEY, map(watched.__getitem__, known))]
        held = map(HASH, map(blocks.__getitem__, known))
        for block_id, key in compress(zip(known, keys, strict=True), map(ne, keys, held)):
            if key is not None:
                yield block_id


def is_found(block_hash: Any, scheduler: Any) -> bool:
    """Whether the prefix cache, of one KV cache group, has a block with this hash, in use or not."""
    return scheduler.kv_cache_manager.block_pool.get_cached_block(block_hash, [0]) is not None


def uncomputed(request: Any, scheduler: Any) -> list[int]:
    """Ids of the request's blocks in which nothing is computed yet."""
    blocks = scheduler.kv_cache_manager.get_blocks(request.request_id).blocks[0]
    computed_blocks = -(-request.num_computed_tokens // scheduler.block_size)
    return [block.block_id for block in blocks[computed_blocks:]]


def written_by_step(scheduler: Any, block_ids: Iterable[int]) -> set[int]:
    """Those of the blocks that the step being scheduled may write to. Where the engine clears new blocks, it may do so
    before the worker can order copies of earlier steps: there every block counts as written to at once."""
    if scheduler.needs_kv_cache_zeroing:
        return set(block_ids)
    blocks = scheduler.kv_cache_manager.block_pool.blocks
    return {block_id for block_id in block_ids if blocks[block_id].ref_cnt > 0}
