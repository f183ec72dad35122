"""What an engine is, read from vLLM's configuration: its shape, its models' loader, the header of its traces."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import vllm
from vllm.platforms import current_platform

from kvpolicy.cost import Engine, FittedModel, engine_loader
from kvpolicy.hardware import Geometry, describe
from kvpolicy.shape import ConfigError
from kvpolicy.trace import Header

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvpolicy.hardware.link import SimulatedLink
    from kvpolicy_vllm.plugin.settings import Settings


def page_bytes(kv_cache: KVCacheConfig) -> int:
    """Bytes of one block in one layer: what lies contiguous unless a worker reports smaller pieces."""
    return int(kv_cache.kv_cache_groups[0].kv_cache_spec.page_size_bytes)


def device_name() -> str:
    return "cpu" if current_platform.is_cpu() else str(current_platform.get_device_name())


def engine_shape(config: VllmConfig, kv_cache: KVCacheConfig, block_bytes: int) -> dict[str, Any]:
    """What a cost model must have been made for: block size and bytes, geometry of one rank, hardware, token budget."""
    return {
        "block_size": int(kv_cache.kv_cache_groups[0].kv_cache_spec.block_size),
        "block_bytes": block_bytes,
        "geometry": geometry_of(config),
        "hardware": describe(device_name()),
        "token_budget": int(config.scheduler_config.max_num_batched_tokens),
    }


def model_loader(
    config: VllmConfig, kv_cache: KVCacheConfig, block_bytes: int, pinned: bool, link: Mapping[str, Any]
) -> Callable[[str], FittedModel]:
    """What loads cost models in this engine: by name or folder, or its own untrained one."""
    shape = engine_shape(config, kv_cache, block_bytes)
    engine = Engine(
        block_size=shape["block_size"],
        token_budget=shape["token_budget"],
        ranks=config.parallel_config.tensor_parallel_size,
        pinned=pinned,
        block_bytes=block_bytes,
        geometry=shape["geometry"],
        hardware=shape["hardware"],
        link=dict(link),
    )
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


def header_link(link: SimulatedLink | None) -> dict[str, Any]:
    return {"kind": "native"} if link is None else link.to_dict()


def header_of(
    settings: Settings,
    config: VllmConfig,
    kv_cache: KVCacheConfig,
    core: str,
    policy: str,
    slots: int,
    block_bytes: int,
) -> Header:
    """The header of what this engine core records."""
    shape = engine_shape(config, kv_cache, block_bytes)
    return Header(
        run_id=core,
        source=settings.source,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        engine=f"vllm {vllm.__version__}",
        hardware=shape["hardware"],
        geometry=shape["geometry"].to_dict(),
        block_size=shape["block_size"],
        block_bytes=block_bytes,
        device_blocks=kv_cache.num_blocks,
        host_blocks=slots,
        policy=policy,
        link=header_link(settings.link),
        seed=settings.seed,
        token_budget=shape["token_budget"],
    )
