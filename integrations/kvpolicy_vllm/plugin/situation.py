"""Reads from a live scheduler, before a victim's blocks are freed, its `Preemption` and the contents that it loses; and
what could be loaded back.

Imports no vLLM: everything is read from the scheduler object.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

from kvpolicy.events import Cause, Preemption
from kvpolicy.features import lacking_blocks, short_blocks
from kvpolicy.host_store import HostStore
from kvpolicy.survival import Survival
from kvpolicy_vllm.plugin.block_tables import BlockTables
from kvpolicy_vllm.plugin.host_copies import CopyBook


class RunningView:
    """Sums over all running requests for the preemptions of one step, computed once. O(running requests) to make.

    ``first``: the step's first victim. Victims have already been removed from ``scheduler.running``. ``tables``: None
    where one block table holds every token's block.
    """

    def __init__(self, scheduler: Any, first: Any, tables: BlockTables | None = None) -> None:
        self._scheduler, self.tables = scheduler, tables
        self._computed_tokens = first.num_computed_tokens + sum(
            other.num_computed_tokens for other in scheduler.running
        )
        self._covered = 0
        """Number of running requests, from the first on, that have the blocks for what they compute in this step."""

    def take_out(self, victim: Any) -> int:
        """Remove ``victim``; return the computed tokens of the other requests, without this and earlier victims."""
        self._computed_tokens -= victim.num_computed_tokens
        return int(self._computed_tokens)

    def short_blocks(self, victim: Any) -> int:
        """Number of blocks that the failed allocation lacked.

        vLLM does not say whose allocation failed: see :func:`kvpolicy.features.short_blocks`.
        """
        free = self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return short_blocks(self._lacking(victim), free)

    def _lacking(self, victim: Any) -> Iterator[int]:
        """Blocks that each running request and the victim, in scheduling order, lack for what they compute next.

        A request that had its blocks at an earlier preemption of the step still has them, so each search continues
        where the last one ended.
        """
        running = self._scheduler.running
        # A victim removed since may have stood before the index at which the last search ended.
        self._covered = max(0, min(self._covered - 1, len(running)))
        for index in range(self._covered, len(running)):
            lacking = self._lacking_of(running[index])
            if lacking <= 0 and self._covered == index:
                self._covered += 1
            yield lacking
        yield self._lacking_of(victim)

    def _lacking_of(self, request: Any) -> int:
        computed, size = request.num_computed_tokens, self._scheduler.block_size
        known_tokens = request.num_tokens + request.num_output_placeholders
        next_tokens = min(max(1, known_tokens - computed), self._scheduler.max_num_scheduled_tokens)
        if self.tables is not None:
            return self.tables.lacking_blocks(self._scheduler, request.request_id, computed + next_tokens)
        covered = -(-computed // size)
        if lacking_blocks(computed, next_tokens, covered, size) == 0:
            return 0  # true for nearly every decode; counting the blocks it holds takes far longer
        held = len(self._scheduler.kv_cache_manager.get_blocks(request.request_id).blocks[0])
        return lacking_blocks(computed, next_tokens, held, size)


def situation_of(
    request: Any,
    scheduler: Any,
    running: RunningView,
    cause: Cause,
    copies: CopyBook,
    survival: Survival | None,
    now: float,
    gain_per_block: Callable[[Preemption], float | None] = lambda situation: None,
) -> Preemption:
    """The situation of ``request``, already removed from ``scheduler.running``. O(its blocks), apart from the view.

    ``survival``: None where only the blocks of other requests survive, and all that are not in host memory are saved at
    once. Of several block tables all that the request needs is saved at once. ``gain_per_block``: predicts that of its
    copy, where host memory is short.
    """
    pool = scheduler.kv_cache_manager.block_pool
    computed, tables = request.num_computed_tokens, running.tables
    hashed_tokens: int | None = None
    if tables is None:
        size = scheduler.block_size
        held = scheduler.kv_cache_manager.get_blocks(request.request_id).blocks[0][: -(-computed // size)]
        shared = len(held) - [block.ref_cnt for block in held].count(1)
        hashed = min(bisect_left(held, True, key=_is_unhashed), computed // size)  # see contents_of
        keyed = held[:hashed]
    else:
        size = min(tables.block_sizes)
        held = [*tables.needed(scheduler, request.request_id, computed).values()]
        hashed_tokens = tables.findable_tokens(scheduler, request)
        hashed = len(held) - tables.load_blocks(scheduler, hashed_tokens, computed)
        shared, keyed = 0, []
    free = pool.get_num_free_blocks()
    waiting = scheduler.get_num_unfinished_requests() - len(scheduler.running)
    hit_blocks, hit_tokens = float(shared), None if hashed_tokens is None else 0.0
    if survival is not None:
        hit_blocks = survival.hit_blocks(len(held), shared, hashed, free, size, cause)
        hit_tokens = None if hashed_tokens is None else survival.hit_tokens(hashed_tokens, cause)
    save_blocks, keys = float(len(held)), [*_keys(keyed, scheduler, copies.pool)]
    if survival is None or tables is not None:
        save_blocks -= copies.pool.stored(keys)
    elif not scheduler.needs_kv_cache_zeroing:  # otherwise all blocks are saved at once
        surviving = int(hit_blocks)
        own = keys[:surviving].count(None)  # saved at once, whatever survives
        save_blocks -= hit_blocks - own + copies.pool.stored(keys[surviving:])
        save_blocks = max(0.0, save_blocks)  # a block of which a part is expected to survive may be stored
    lacking = running.short_blocks(request) if cause == "memory" else 0
    batch_tokens = running.take_out(request)

    def situation(free_host_blocks: int) -> Preemption:
        return Preemption(
            time_s=now,
            computed_tokens=computed,
            prompt_tokens=request.num_prompt_tokens,
            output_tokens=request.num_output_tokens,
            block_size=size,
            block_bytes=copies.block_bytes,
            segment_bytes=copies.segment_bytes,
            held_blocks=len(held),
            shared_blocks=shared,
            hashed_blocks=hashed,
            hit_blocks=hit_blocks,
            save_blocks=save_blocks,
            device_blocks=pool.num_gpu_blocks,
            free_blocks=free,
            short_blocks=lacking,
            host_blocks=copies.pool.total,
            free_host_blocks=free_host_blocks,
            running_requests=len(scheduler.running),
            waiting_requests=max(0, waiting),
            batch_tokens=batch_tokens,
            queued_save_bytes=copies.queued_bytes("save"),
            queued_load_bytes=copies.queued_bytes("load"),
            earlier_preemptions=request.num_preemptions,
            priority=request.priority,
            cause=cause,
            absence_tokens=None if survival is None else survival.absence_tokens(cause),
            hashed_tokens=hashed_tokens,
            hit_tokens=hit_tokens,
        )

    return situation(copies.pool.obtainable(computed, save_blocks, keys, lambda: gain_per_block(situation(0))))


def contents_of(
    request_id: str, situation: Preemption, scheduler: Any, pool: HostStore, measured: bool
) -> list[tuple[Hashable | None, int]]:
    """Hash and number of each block that a request loses, in order; without a hash it is the request's own.

    vLLM hashes a block when the step that fills it is scheduled. Where that step preempts the request after all, the
    block is not full, and its hash stands for more than it holds.

    Where the engine clears new blocks, it may do so before the worker can save what they held, and a tool that measures
    evicts them. There no block can be left on the device, and none has a hash here, unless a tool has its content in
    host memory. ``measured``: whether a tool measures.
    """
    leave = not (scheduler.needs_kv_cache_zeroing or measured)
    blocks = scheduler.kv_cache_manager.get_blocks(request_id).blocks[0][: situation.held_blocks]
    full_blocks = situation.computed_tokens // situation.block_size if leave or measured else 0
    hashes = [*_keys(blocks[:full_blocks], scheduler, pool), *[None] * len(blocks[full_blocks:])]
    if not leave:
        hashes = [value if pool.stored([value]) else None for value in hashes]
    return [(value, block.block_id) for value, block in zip(hashes, blocks, strict=True)]


def _keys(blocks: Iterable[Any], scheduler: Any, pool: HostStore) -> Iterator[Hashable | None]:
    """The hash of each block; None where its content is not that of others with the hash.

    At the last position of a block an EAGLE or MTP drafter keeps what also depends on the token behind it, which the
    hash does not cover: for that vLLM drops the last block of a hit, unless it is told not to. There only one block of
    the device is one content.
    """
    # Whether there is such a drafter, and whether the block is dropped; the second is not in all versions.
    if not (getattr(scheduler, "use_eagle", False) or getattr(scheduler, "use_eagle_block_drop", False)):
        return (block.block_hash for block in blocks)
    return (None if pool.has_elsewhere(block.block_hash, block.block_id) else block.block_hash for block in blocks)


def prompt_situation(
    scheduler: Any,
    copies: CopyBook,
    total_tokens: int,
    local_tokens: int,
    now: float,
    request: Any = None,
    save_blocks: int = 0,
) -> Preemption:
    """The situation of a request that goes on in host memory up to ``total_tokens``, as if it had been preempted there:
    ``local_tokens`` are on the device, the others are to be loaded, or computed.

    ``request``: None for one that is not there yet, for which no other copy is under way. ``save_blocks``: blocks that
    have to be saved before. O(running requests).
    """
    size, pool = int(scheduler.block_size), scheduler.kv_cache_manager.block_pool
    local_blocks, running = local_tokens // size, scheduler.running
    waiting = scheduler.get_num_unfinished_requests() - len(running)
    return Preemption(
        time_s=now,
        computed_tokens=total_tokens,
        prompt_tokens=total_tokens if request is None else request.num_prompt_tokens,
        output_tokens=0 if request is None else request.num_output_tokens,
        block_size=size,
        block_bytes=copies.block_bytes,
        segment_bytes=copies.segment_bytes,
        held_blocks=-(-total_tokens // size),
        shared_blocks=0,
        hashed_blocks=local_blocks,
        hit_blocks=float(local_blocks),
        save_blocks=float(save_blocks),
        device_blocks=pool.num_gpu_blocks,
        free_blocks=pool.get_num_free_blocks(),
        short_blocks=0,
        host_blocks=copies.pool.total,
        free_host_blocks=copies.pool.free,
        running_requests=len(running),
        waiting_requests=max(0, waiting),
        batch_tokens=sum(other.num_computed_tokens for other in running),
        queued_save_bytes=0 if request is None else copies.queued_bytes("save"),
        queued_load_bytes=0 if request is None else copies.queued_bytes("load"),
        earlier_preemptions=0 if request is None else request.num_preemptions,
        priority=0 if request is None else request.priority,
        cause="memory",
        absence_tokens=0.0,
    )


def _is_unhashed(block: Any) -> bool:
    """Key for bisection: full blocks are hashed in order, so hashed blocks precede all others."""
    return block.block_hash is None


def why_not_loadable(
    request: Any, scheduler: Any, copies: CopyBook, now: float, tables: BlockTables | None = None
) -> str:
    """Why this engine would not load ``request`` back, as a word for the trace; empty where it would.

    ``tables``: None where one block table holds every token's block. While copies fail, no request is swapped.
    """
    if request.skip_reading_prefix_cache or getattr(request, "resumable", False):
        return "not_loadable"
    # A copy of several tables is loaded whole or not at all, so tokens that are not loaded exclude the others.
    if tables is not None and (
        _partial_block_tokens(scheduler, request.num_computed_tokens) > 0 or _loses_its_token(request, scheduler)
    ):
        return "not_loadable"
    return "copies_failing" if copies.health.suspended(now) else ""


def restorable_tokens(request: Any, scheduler: Any, copies: CopyBook) -> int:
    """Number of tokens that ``request`` can have after a load; 0 without a copy.

    The last known token is always computed, in order to sample the next one. A copy of several block tables is loaded
    whole or not at all: it has a state after its last token only, and no more than the last window.
    """
    copy = copies.of(request.request_id)
    tokens = 0 if copy is None else min(copy.tokens, int(request.num_tokens) - 1)
    tokens -= _partial_block_tokens(scheduler, tokens)
    if copy is not None and copy.positions is not None and tokens != copy.tokens:
        return 0
    return tokens


def _loses_its_token(request: Any, scheduler: Any) -> bool:
    """Whether the next token of ``request`` is in flight and will be dropped. It then has no more tokens than were
    computed, and the last one is always computed anew.

    vLLM drops it where a connector has to hand KV on, as another one in a list has to in the role of a producer.
    """
    if not getattr(scheduler, "requires_kv_delivery", False):  # not in all versions
        return False
    return bool(request.num_computed_tokens >= request.num_tokens)


def _partial_block_tokens(scheduler: Any, tokens: int) -> int:
    """Those of the first ``tokens`` that are not loaded since they do not fill a block.

    With --enable-return-routed-experts vLLM 0.33 loads only whole blocks. Earlier versions with it are refused.
    """
    if getattr(scheduler, "aux_output_connector", None) is None:
        return 0
    return tokens % int(scheduler.block_size)
