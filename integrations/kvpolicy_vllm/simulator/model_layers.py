"""The layers of a model as vLLM's scheduler sees them: what each keeps of a request, and the groups that vLLM makes.

For :class:`kvpolicy_vllm.simulator.engine.VllmScheduler`. vLLM's own code makes the groups, from vLLM 0.32 on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from kvpolicy.errors import InputError
from kvpolicy_vllm.plugin.versions import OLDEST_WITH_TABLES, engine_version

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

DTYPE = torch.bfloat16
LAYOUT = "LBNHC"
"""In which every layer's blocks lie together. The scheduler does not depend on it."""
ALIGNED_TOKENS = 16
"""Blocks of a model with states have a multiple of so many tokens."""
PLENTY = 1 << 50
"""Bytes of memory; the number of blocks is given besides."""
PLANNING, UNTIL_0_32 = "vllm.v1.core.kv_cache_planning", "vllm.v1.core.kv_cache_utils"
"""Where vLLM makes groups of layers: from 0.33 on, and before."""
planning = import_module(PLANNING if find_spec(PLANNING) else UNTIL_0_32)


@dataclass(frozen=True, slots=True)
class Attention:
    """Layers that keep the keys and values of tokens, or one vector of each token.

    Raises InputError for layers of two kinds at once.
    """

    layers: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    """Tokens that a layer attends to; None: all."""
    chunk: int | None = None
    """Tokens in each of the chunks that a layer attends within; None: none."""
    latent: bool = False
    """Whether a token has one vector of ``head_dim`` values (MLA), for keys and values of all heads."""

    def __post_init__(self) -> None:
        if sum((self.window is not None, self.chunk is not None, self.latent)) > 1:
            raise InputError(f"{self}: should have one of window, chunk and latent")
        if self.latent and self.kv_heads != 1:
            raise InputError(f"{self}: kv_heads should be 1, as all heads share a latent vector")

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer."""
        return (1 if self.latent else 2) * self.kv_heads * self.head_dim * int(DTYPE.itemsize)

    @property
    def reach(self) -> int | None:
        """Tokens back from the last one that a layer attends to at most; None: all."""
        return self.window or self.chunk

    def specification(self, block_size: int) -> Any:
        """vLLM's, of one of these layers."""
        shape = {
            "block_size": block_size, "num_kv_heads": self.kv_heads, "head_size": self.head_dim, "dtype": DTYPE,
        }  # fmt: skip
        if self.latent:
            return MLAAttentionSpec(**shape)
        if self.chunk is not None:
            return ChunkedLocalAttentionSpec(attention_chunk_size=self.chunk, **shape)
        if self.window is not None:
            return SlidingWindowSpec(sliding_window=self.window, **shape)
        return FullAttentionSpec(**shape)


@dataclass(frozen=True, slots=True)
class States:
    """Layers that keep a state, of the same size however many tokens it follows from."""

    layers: int
    state_bytes: int


@dataclass(frozen=True, slots=True)
class ModelLayers:
    """Layers of one rank, and the flags of vLLM's that say how they are stored.

    Raises InputError for layers that vLLM's scheduler cannot have.
    """

    name: str
    attention: tuple[Attention, ...]
    states: States | None = None
    hybrid_manager: bool = True
    """False: ``--disable-hybrid-kv-cache-manager``. Windows are stored whole."""
    retention: int | None = 0
    """``--prefix-cache-retention-interval``: tokens between the ends at which windows and states are cached, beside the
    end of the prompt. 0, vLLM's default: that end only. None: every block's."""

    def __post_init__(self) -> None:
        if not self.attention:
            raise InputError(f"{self.name}: has no attention layers; kvpolicy serves no model without")
        if self.states is not None and not self.hybrid_manager:
            raise InputError(f"{self.name}: has states, which vLLM keeps with hybrid_manager alone: leave it True")

    @property
    def digest(self) -> str:
        """Stands for all of these fields."""
        return blake2b(repr(self).encode(), digest_size=4).hexdigest()

    @property
    def block_size(self) -> int:
        """Tokens in a block of the layers with the most bytes of a token; vLLM makes that of others longer. A page
        holds a state or the tokens of one layer, so there are as many as a state takes."""
        if self.states is None:
            return ALIGNED_TOKENS
        max_bytes = max(attention.token_bytes for attention in self.attention)
        return -(-self.states.state_bytes // (max_bytes * ALIGNED_TOKENS)) * ALIGNED_TOKENS

    def specifications(self, caching: bool, context: int) -> dict[str, Any]:
        """vLLM's specification of each layer, by its name. ``context``: most tokens of a request."""
        size, names = self.block_size, _names()
        found: dict[str, Any] = {}
        for attention in self.attention:
            spec = attention.specification(size)
            found |= {next(names): spec for _ in range(attention.layers)}
        if self.states is not None:
            page_bytes = max(spec.page_size_bytes for spec in found.values())
            state = MambaSpec(
                block_size=size if caching else context,
                shapes=((self.states.state_bytes // DTYPE.itemsize,),),
                dtypes=(DTYPE,),
                page_size_padded=page_bytes,
                mamba_cache_mode=self.mode(caching),
            )
            found |= {next(names): state for _ in range(self.states.layers)}
        return found

    @staticmethod
    def mode(caching: bool) -> str:
        """vLLM's ``mamba_cache_mode``."""
        return "align" if caching else "none"


def _names() -> Iterator[str]:
    number = 0
    while True:
        yield f"layer.{number}"
        number += 1


def prepare(config: VllmConfig, layers: ModelLayers) -> None:
    """Configure an engine for these layers. Raises InputError on a vLLM older than 0.32."""
    if engine_version() < OLDEST_WITH_TABLES:
        oldest = ".".join(map(str, OLDEST_WITH_TABLES))
        raise InputError(f"{layers.name}: layers of a model are simulated from vLLM {oldest} on")
    cache = config.cache_config
    cache.kv_cache_layout = LAYOUT
    cache.prefix_cache_retention_interval = layers.retention
    cache.mamba_cache_mode = layers.mode(cache.enable_prefix_caching)
    config.scheduler_config.disable_hybrid_kv_cache_manager = not layers.hybrid_manager


def kv_cache_of(config: VllmConfig, layers: ModelLayers, blocks: int) -> tuple[KVCacheConfig, int]:
    """The KV cache of these layers, ``blocks`` blocks with vLLM's null block, in the groups that vLLM makes; and the
    tokens between the positions at which its scheduler may find what is cached."""
    cache, context = config.cache_config, int(config.model_config.max_model_len)
    cache.num_gpu_blocks_override = blocks
    specifications = layers.specifications(bool(cache.enable_prefix_caching), context)
    groups = planning.get_kv_cache_groups(config, specifications)
    kv_cache: KVCacheConfig = planning.get_kv_cache_config_from_groups(config, groups, PLENTY)
    scheduler_block_size, kv_cache.hash_block_size = resolve_kv_cache_block_sizes(kv_cache, config)
    return kv_cache, scheduler_block_size


def max_blocks(managers: Sequence[Any], tokens: int) -> int:
    """Device blocks that a request of so many tokens holds at most. ``managers``: vLLM's, of the groups."""
    return sum(_max_of(manager, tokens) for manager in managers)


def _max_of(manager: Any, tokens: int) -> int:
    mode = getattr(manager, "mamba_cache_mode", "")
    if mode:  # the state that a step reads, and the one that it writes
        return 2 if mode == "align" else 1
    blocks = -(-tokens // int(manager.block_size))
    bound = getattr(manager, "max_admission_blocks_per_request", None)  # not so named in vLLM 0.24, nor needed
    return blocks if bound is None else min(blocks, int(bound))


MODELS: Mapping[str, ModelLayers] = {
    layers.name: layers
    for layers in (
        ModelLayers("llama-3.1-8b", (Attention(32, 8, 128),)),
        ModelLayers("mistral-7b-v0.1", (Attention(32, 8, 128, window=4096),)),
        ModelLayers("gpt-oss-20b", (Attention(12, 8, 64, window=128), Attention(12, 8, 64))),
        ModelLayers("gemma-3-12b", (Attention(40, 8, 256, window=1024), Attention(8, 8, 256))),
        ModelLayers("gemma-4-31b", (Attention(50, 16, 256, window=1024), Attention(10, 4, 512))),
        ModelLayers("llama-4-scout", (Attention(36, 8, 128, chunk=8192), Attention(12, 8, 128))),
        # 512 values of keys and values of all heads, and 64 of their positions.
        ModelLayers("deepseek-v3", (Attention(61, 1, 512 + 64, latent=True),)),
        # Convolution of 3 x 8,448 values and state of 128 heads x 64 x 128; two bytes each.
        ModelLayers("granite-4-h-small", (Attention(4, 8, 128),), States(36, 2 * (3 * 8448 + 128 * 64 * 128))),
        # Convolution of 3 x 10,240 values and state of 128 heads x 64 x 128; two bytes each.
        ModelLayers("nemotron-h-8b", (Attention(4, 8, 128),), States(24, 2 * (3 * 10240 + 128 * 64 * 128))),
        # Convolution of 3 x 8,192 values and state of 32 heads x 128 x 128; two bytes each.
        ModelLayers("qwen3-next-80b-a3b", (Attention(12, 2, 256),), States(36, 2 * (3 * 8192 + 32 * 128 * 128))),
    )
}
"""Models by name, with the shapes that they were published with."""
