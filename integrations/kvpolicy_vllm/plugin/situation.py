"""Reading a `Preemption` off a live scheduler, before it frees the victim's blocks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform

from kvpolicy.cost import FittedModel, engine_loader
from kvpolicy.events import Cause, Preemption
from kvpolicy.features import lacking_blocks, short_blocks
from kvpolicy.hardware import EngineSpec, Geometry, describe
from kvpolicy.hardware.link import header_link
from kvpolicy.shape import ConfigError
from kvpolicy_vllm.plugin.copies import CopyBook

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvpolicy_vllm.plugin.settings import Settings


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


def page_bytes(kv_cache: KVCacheConfig) -> int:
    """Bytes of one block in one layer: what lies contiguous unless a worker reports smaller pieces."""
    return int(kv_cache.kv_cache_groups[0].kv_cache_spec.page_size_bytes)


def device_name() -> str:
    return "cpu" if current_platform.is_cpu() else str(current_platform.get_device_name())


def engine_spec(config: VllmConfig, kv_cache: KVCacheConfig, block_bytes: int, settings: Settings) -> EngineSpec:
    """What a cost model must have been made for: of one rank of this engine, with the plugin's link and host pool."""
    return EngineSpec(
        block_size=int(kv_cache.kv_cache_groups[0].kv_cache_spec.block_size),
        token_budget=int(config.scheduler_config.max_num_batched_tokens),
        ranks=config.parallel_config.tensor_parallel_size,
        pinned=settings.pin_memory,
        block_bytes=block_bytes,
        geometry=geometry_of(config).to_dict(),
        hardware=describe(device_name()),
        link=header_link(settings.link),
    )


def model_loader(config: VllmConfig, engine: EngineSpec) -> Callable[[str], FittedModel]:
    """What loads cost models in this engine: by name or folder, or its own untrained one."""
    return engine_loader(config.model_config.hf_config.to_dict(), engine, config.cache_config.cache_dtype)


def geometry_of(config: VllmConfig) -> Geometry:
    """The model's shape on one rank, from its Hugging Face configuration.

    The MLP is as wide as :class:`Geometry` has it, so that mixtures and families with fields of their own count alike
    with and without an engine.
    """
    model, parallel = config.model_config, config.parallel_config
    dtype = str(model.dtype).removeprefix("torch.")
    ranks = parallel.tensor_parallel_size
    return Geometry(
        layers=model.get_num_layers(parallel),
        hidden=model.get_hidden_size(),
        heads=model.get_num_attention_heads(parallel),
        kv_heads=model.get_num_kv_heads(parallel),
        head_dim=model.get_head_size(),
        intermediate=_mlp_width(config) // ranks,
        vocab=model.get_vocab_size(),
        weight_bytes=model.dtype.itemsize,
        kv_bytes=_kv_itemsize(config),
        dtype=dtype,
    )


def _mlp_width(config: VllmConfig) -> int:
    """As the shape has it; the field of that name, or 0, where the shape is not understood."""
    try:
        return Geometry.from_config(config.model_config.hf_config.to_dict()).intermediate
    except ConfigError:
        return int(getattr(config.model_config.hf_text_config, "intermediate_size", 0))


def _kv_itemsize(config: VllmConfig) -> int:
    cache_dtype = config.cache_config.cache_dtype
    return int(config.model_config.dtype.itemsize) if cache_dtype in ("auto", "float32", "bfloat16", "float16") else 1
