"""Whether a step may compute a prompt beyond the end of a block of Mamba2 states. Called by
:mod:`kvpolicy_vllm.plugin.layer_refusals` where vLLM ends then, or may."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpolicy_vllm.plugin.engine_config import token_budget
from kvpolicy_vllm.plugin.kv_layout import state_kind

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def beyond_a_block_of_states(config: VllmConfig, kv_cache: KVCacheConfig) -> str:
    """Why the engine would end, and what would be right; empty where it would not.

    With prefix caching vLLM keeps the state at the last end of a block within a step's part of a prompt. Mamba2 layers
    ask their kernel for the states at the ends of all chunks, and take that one and each request's last one from them.
    The kernel of vLLM 0.32's CPU build returns the last ones alone, whatever it is asked for, and the engine ends with
    an IndexError, with and without kvpolicy. Of GDN layers nothing is asked within a step: vLLM ends a step's part of
    the prompt at the block's end.
    """
    sizes = [
        int(group.kv_cache_spec.block_size)
        for group in kv_cache.kv_cache_groups
        if state_kind(group) == "MAMBA2"
        and group.kv_cache_spec.mamba_cache_mode == "align"
        and getattr(group.kv_cache_spec, "num_prefill_checkpoint_blocks", 0) > 0  # not in all versions
    ]
    if not sizes:
        return ""
    scheduler, block = config.scheduler_config, min(sizes)
    room = token_budget(scheduler)
    flag = "scheduled" if scheduler.max_num_scheduled_tokens == room else "batched"
    if min(room, config.model_config.max_model_len) <= block:
        return ""
    return (
        "with prefix caching vLLM's CPU build ends with an IndexError in mamba_mixer2 (seen on 0.32, also without "
        f"kvpolicy) once a step computes more tokens of a prompt than a block of Mamba2 states has, {block} here, and "
        f"a step may have {room}: give --no-enable-prefix-caching, or "
        f"--max-num-{flag}-tokens of at most {block}"
    )
