"""Reading a `Preemption` off a live scheduler, before it frees the victim's blocks, and what that scheduler would load.

Needs no vLLM: it asks the scheduler that it is given.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

from kvpolicy.events import Cause, Preemption
from kvpolicy.features import lacking_blocks, short_blocks
from kvpolicy_vllm.plugin.host_copies import CopyBook


class RunningView:
    """What preemptions of one step ask of all running requests, looked through once. O(running requests) to make.

    ``first``: the step's first victim. Victims have already been taken out of ``scheduler.running``.
    """

    def __init__(self, scheduler: Any, first: Any) -> None:
        self._scheduler = scheduler
        self._computed_tokens = first.num_computed_tokens + sum(
            other.num_computed_tokens for other in scheduler.running
        )
        self._covered = 0
        """So many running requests from the first on have the blocks for what they compute in this step."""

    def take_out(self, victim: Any) -> int:
        """Computed tokens of the others, without ``victim`` and those before it."""
        self._computed_tokens -= victim.num_computed_tokens
        return int(self._computed_tokens)

    def short_blocks(self, victim: Any) -> int:
        """Blocks the failed allocation lacked.

        vLLM does not say whose allocation failed: see :func:`kvpolicy.features.short_blocks`.
        """
        free = self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return short_blocks(self._lacking(victim), free)

    def _lacking(self, victim: Any) -> Iterator[int]:
        """Blocks that the running requests and the victim, in scheduling order, lack for what they compute next.

        Whoever had its blocks at an earlier preemption of the step has them still, so each search goes on where the
        last one ended.
        """
        running = self._scheduler.running
        # Victims may have stood before the place where the last search ended.
        self._covered = max(0, min(self._covered - 1, len(running)))
        for place in range(self._covered, len(running)):
            lacking = self._lacking_of(running[place])
            if lacking <= 0 and self._covered == place:
                self._covered += 1
            yield lacking
        yield self._lacking_of(victim)

    def _lacking_of(self, request: Any) -> int:
        computed, size = request.num_computed_tokens, self._scheduler.block_size
        known = request.num_tokens + request.num_output_placeholders
        ahead = min(max(1, known - computed), self._scheduler.max_num_scheduled_tokens)
        covered = -(-computed // size)
        if lacking_blocks(computed, ahead, covered, size) == 0:
            return 0  # as of nearly every decode; to count the blocks it holds takes far longer
        held = len(self._scheduler.kv_cache_manager.get_blocks(request.request_id).blocks[0])
        return lacking_blocks(computed, ahead, held, size)


def situation_of(
    request: Any,
    scheduler: Any,
    running: RunningView,
    cause: Cause,
    copies: CopyBook,
    segment_bytes: int,
    now: float,
) -> Preemption:
    """What is known about ``request``, already taken out of ``scheduler.running``. O(its blocks), but for the view."""
    pool = scheduler.kv_cache_manager.block_pool
    size = scheduler.block_size
    computed = request.num_computed_tokens
    held = scheduler.kv_cache_manager.get_blocks(request.request_id).blocks[0][: -(-computed // size)]
    waiting = scheduler.get_num_unfinished_requests() - len(scheduler.running)
    return Preemption(
        time_s=now,
        computed_tokens=computed,
        prompt_tokens=request.num_prompt_tokens,
        output_tokens=request.num_output_tokens,
        block_size=size,
        block_bytes=copies.block_bytes,
        segment_bytes=segment_bytes,
        held_blocks=len(held),
        shared_blocks=len(held) - [block.ref_cnt for block in held].count(1),
        hashed_blocks=bisect_left(held, True, key=_is_unhashed),
        device_blocks=pool.num_gpu_blocks,
        free_blocks=pool.get_num_free_blocks(),
        short_blocks=running.short_blocks(request) if cause == "memory" else 0,
        host_blocks=copies.pool.total,
        free_host_blocks=copies.pool.free,
        running_requests=len(scheduler.running),
        waiting_requests=max(0, waiting),
        batch_tokens=running.take_out(request),
        queued_save_bytes=copies.queued_bytes("save"),
        queued_load_bytes=copies.queued_bytes("load"),
        earlier_preemptions=request.num_preemptions,
        priority=request.priority,
        cause=cause,
    )


def _is_unhashed(block: Any) -> bool:
    """Full blocks are hashed in their order, so the count of those that are is a boundary, found by bisection."""
    return block.block_hash is None


def why_not_loadable(request: Any, copies: CopyBook, now: float) -> str:
    """Why this engine would not load ``request`` back, in a word for the trace; empty where it would.

    While copies fail nobody is swapped.
    """
    if request.skip_reading_prefix_cache or getattr(request, "resumable", False):
        return "not_loadable"
    return "copies_failing" if copies.health.suspended(now) else ""


def restorable_tokens(request: Any, scheduler: Any, copies: CopyBook) -> int:
    """Tokens that a load can bring ``request`` to, 0 without a copy. The last one known is computed, to sample the
    next."""
    copy = copies.of(request.request_id)
    tokens = 0 if copy is None else min(copy.tokens, int(request.num_tokens) - 1)
    # With --enable-return-routed-experts vLLM 0.33 would load nothing where a block is not whole; earlier versions are
    # refused with it.
    if getattr(scheduler, "aux_output_connector", None) is not None:
        tokens -= tokens % int(scheduler.block_size)
    return tokens
