"""Hand-made KV caches for a scheduler that has no model: which layers attend to everything, to a window, or keep a
state."""

from __future__ import annotations

from dataclasses import fields, replace
from math import lcm
from typing import Any

import torch
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from tests.vllm.setups import CHUNK, KINDS, WINDOW

MODEL_TOKENS = 2048


def spec_of(kind: str, block: int, caching: bool) -> Any:
    """vLLM's specification of a group; every page has the same size."""
    shape: dict[str, Any] = {"num_kv_heads": 4, "head_size": 32, "dtype": torch.float32}
    if kind == "window":
        return SlidingWindowSpec(block_size=block, sliding_window=WINDOW, **shape)
    if kind == "wide":
        return SlidingWindowSpec(block_size=2 * block, sliding_window=WINDOW, **shape | {"num_kv_heads": 2})
    if kind == "chunk":
        return ChunkedLocalAttentionSpec(block_size=block, attention_chunk_size=CHUNK, **shape)
    full = FullAttentionSpec(block_size=block, **shape)
    if kind == "full":
        return full
    return MambaSpec(
        block_size=block if caching else MODEL_TOKENS,
        shapes=((16, 8), (4, 16)),
        dtypes=(torch.float32, torch.float32),
        page_size_padded=full.page_size_bytes,
        mamba_cache_mode="align" if caching else "none",
    )


def latent_spec(block: int) -> Any:
    """vLLM's specification of a group of latent KV."""
    return MLAAttentionSpec(block_size=block, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)


def kv_cache(
    layers: str, blocks: int, block: int, caching: bool, dense: bool = True, placed: bool = False
) -> KVCacheConfig:
    """``layers``: one of :data:`tests.vllm.setups.KINDS`; each group has four layers. ``dense``: whether windows and
    states are cached at the end of every block, not only of the prompt as is vLLM's default. ``placed``: whether it is
    said where layers lie if all are of full attention, too."""
    kinds = KINDS[layers]
    groups = [
        KVCacheGroupSpec([f"layer.{group}.{i}" for i in range(4)], spec_of(kind, block, caching))
        for group, kind in enumerate(kinds)
    ]
    tensors: list[Any] = []
    if (placed or kinds != ("full",)) and any(
        field.name == "layers" for field in fields(KVCacheTensor)
    ):  # from vLLM 0.32 on
        page = groups[0].kv_cache_spec.page_size_bytes
        tensors = [
            KVCacheTensor(
                size=4 * page * blocks, layers=group.layer_names, layer_stride=page * blocks, block_stride=page
            )
            for group in groups
        ]
    cache = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=tensors, kv_cache_groups=groups)
    if hasattr(cache, "hash_block_size"):
        cache.hash_block_size = block
    if not dense:
        cache.prefix_cache_retention_interval = 0
    return cache


def unserved_groups(block: int) -> dict[str, KVCacheGroupSpec]:
    """Groups that no model here has, by name."""
    window, state = spec_of("window", block, True), spec_of("state", block, True)
    latent = latent_spec(block)
    # What vLLM makes of latent KV and an indexer's keys, which differ in bytes.
    specs = {"latent": latent, "indexer": replace(latent, head_size=132, dtype=torch.uint8)}
    groups = {
        "group MAMBA1": KVCacheGroupSpec(["layer"], replace(state, mamba_type=MambaAttentionBackendEnum.MAMBA1)),
        "group mode all": KVCacheGroupSpec(["layer"], replace(state, mamba_cache_mode="all")),
        "group host": KVCacheGroupSpec(["layer"], window),
        "group indexer": KVCacheGroupSpec([*specs], UniformTypeKVCacheSpecs(block_size=block, kv_cache_specs=specs)),
        "states on runner v2": KVCacheGroupSpec(["layer"], state),
    }
    groups["group host"].host_resident = True
    return groups


def scheduler_block_size(cache: KVCacheConfig) -> int:
    """What vLLM gives its scheduler."""
    return lcm(*(group.kv_cache_spec.block_size for group in cache.kv_cache_groups))
