"""Makes vLLM's scheduler for a described server: real configuration and KV cache manager, no model."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import vllm.platforms
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.structured_output import StructuredOutputManager

from kvpolicy.errors import InputError
from kvpolicy.simulator import Server
from kvpolicy.simulator.base import NULL_BLOCK
from kvpolicy_vllm.plugin import NAME, register
from kvpolicy_vllm.plugin.kv_layout import block_bytes
from kvpolicy_vllm.simulator.model_layers import ModelLayers, kv_cache_of, prepare

HEADS, HEAD_DIM = 1, 16
"""Shape of a placeholder model. Scheduling does not depend on it: bytes and times are the server's own."""


def scheduler_for(server: Server, layers: ModelLayers | None = None) -> Any:
    """The scheduler that vLLM would make for this server with the plugin. ``layers``: None for full attention alone.

    Raises ValueError as vLLM does, and InputError where the server's blocks are not those of the layers.
    """
    with _environment_kept():
        config = _configuration(server, layers)
        more: dict[str, Any] = {"kv_cache_config": _kv_cache(server), "block_size": server.block_size}
        if layers is not None:
            kv_cache, scheduler_block_size = kv_cache_of(config, layers, server.device_blocks + NULL_BLOCK)
            _refuse_other_blocks(server, layers, block_bytes(kv_cache))
            more = {"kv_cache_config": kv_cache, "block_size": scheduler_block_size}
            more["hash_block_size"] = kv_cache.hash_block_size
        return config.scheduler_config.get_scheduler_cls()(
            vllm_config=config,
            structured_output_manager=StructuredOutputManager(config),
            log_stats=False,
            **more,
        )


def block_bytes_of(layers: ModelLayers) -> int:
    """Bytes of one KV block of a model with these layers. Takes seconds: vLLM says it."""
    with _environment_kept():
        server = Server(layers.block_size, 1, 1, 0, max_model_len=layers.block_size)
        return block_bytes(kv_cache_of(_configuration(server, layers), layers, 2)[0])


def _refuse_other_blocks(server: Server, layers: ModelLayers, right_bytes: int) -> None:
    for name, right in (("block_size", layers.block_size), ("block_bytes", right_bytes)):
        if getattr(server, name) != right:
            raise InputError(f"{name} is {getattr(server, name)}, but the layers of {layers.name} have {right}")


@contextmanager
def _environment_kept() -> Iterator[None]:
    """Restore environment variables and suppress logs: vLLM sets and logs much for an engine that is never started."""
    environment, disabled = dict(os.environ), logging.root.manager.disable
    logging.disable(logging.WARNING)
    os.environ.pop("KVPOLICY", None)  # this engine is given flags
    try:
        yield
    finally:
        logging.disable(disabled)
        os.environ.clear()
        os.environ.update(environment)


def _kv_cache(server: Server) -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=server.block_size, num_kv_heads=HEADS, head_size=HEAD_DIM, dtype=torch.float32)
    cache = KVCacheConfig(
        num_blocks=server.device_blocks + NULL_BLOCK,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer.0"], spec)],
    )
    if hasattr(cache, "hash_block_size"):
        cache.hash_block_size = server.block_size
    return cache


def _configuration(server: Server, layers: ModelLayers | None) -> Any:
    config = _cached_configuration(
        server.block_size,
        server.max_model_len,
        server.max_running,
        server.token_budget,
        server.prefix_caching,
        server.scheduling,
        layers,
    )
    config.cache_config.num_gpu_blocks = server.device_blocks + NULL_BLOCK
    # The CPU platform would turn it off, but the scheduler alone does not depend on the platform.
    config.scheduler_config.async_scheduling = server.asynchronous
    config.scheduler_config.watermark = server.watermark
    return config


@lru_cache(maxsize=4)
def _cached_configuration(
    block: int, context: int, running: int, budget: int, caching: bool, scheduling: str, layers: ModelLayers | None
) -> Any:
    """vLLM's configuration, cached as it takes seconds to make. Fields that are changed later are set for every run."""
    platform = vllm.platforms.current_platform
    if not (platform.is_cuda() or platform.is_cpu()):
        # No device, or one that the plugin cannot copy on: the scheduler is the same on every platform.
        vllm.platforms._current_platform = CpuPlatform()
    register()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(_model(context)))
        arguments = EngineArgs(
            model=folder,
            dtype="float32",
            skip_tokenizer_init=True,
            block_size=block,
            max_model_len=context,
            max_num_seqs=running,
            max_num_batched_tokens=budget,
            enable_prefix_caching=caching,
            scheduling_policy=scheduling,
            scheduler_cls="kvpolicy_vllm.AdaptiveScheduler",
            kv_transfer_config=_transfers(),
        )
        config = arguments.create_engine_config()
    if layers is not None:
        prepare(config, layers)
    return config


def _transfers() -> dict[str, Any]:
    """Transfer settings with which the plugin starts; each run then replaces its controller."""
    return {
        "kv_connector": NAME,
        "kv_role": "kv_producer",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"policy": "always-recompute", "host_gib": 1.0},
    }


def _model(context: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HEADS * HEAD_DIM,
        "intermediate_size": HEAD_DIM,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": context,
        "vocab_size": 256,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
