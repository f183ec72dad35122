"""Small models with random weights, one for each kind of KV cache, made from a seed; nothing is downloaded.

Their shapes are those of the families they are named after: which layers attend to everything, to a window, or keep a
state.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GenerationConfig,
    Glm4MoeLiteConfig,
    GptOssConfig,
    GraniteMoeHybridConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    NemotronHConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from kvpolicy_vllm.bench.models import make_tokenizer
from tests.vllm.harness import TORCHVISION
from tests.vllm.versions import skip_before_tables

WINDOW = 128
CHUNK = 64
VOCABULARY = 2048
SPREAD = 0.15
"""Standard deviation of the weights, wide enough that greedy text does not repeat itself at once."""
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096, "initializer_range": SPREAD,
    "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1,
}  # fmt: skip


NO_CACHING = {"enable_prefix_caching": False}
"""For models with one block table: with prefix caching their blocks are not saved before others take them."""


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of model."""

    config: Callable[[], PretrainedConfig]
    feature: str
    """That of the support matrix which it stands for."""
    groups: tuple[str, ...]
    """The kinds of its KV cache groups, by the names of vLLM's specifications, sorted."""
    dtype: str = "float32"
    """What it is computed in; vLLM's CPU build computes some families in bfloat16 alone."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Engine arguments."""
    torchvision: bool = False
    """Whether vLLM's code of the model imports it."""


def llama() -> PretrainedConfig:
    return LlamaConfig(**COMMON, num_hidden_layers=4)


def qwen2() -> PretrainedConfig:
    return Qwen2Config(**COMMON, num_hidden_layers=4)


def mixtral() -> PretrainedConfig:
    return MixtralConfig(**COMMON, num_hidden_layers=4, num_local_experts=4, num_experts_per_tok=2, sliding_window=None)


def qwen3_moe() -> PretrainedConfig:
    return Qwen3MoeConfig(**COMMON, num_hidden_layers=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)


def gpt_oss() -> PretrainedConfig:
    return GptOssConfig(
        **COMMON, num_hidden_layers=4, num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )  # fmt: skip


def gemma3() -> PretrainedConfig:
    return Gemma3TextConfig(
        **COMMON | {"num_hidden_layers": 6}, sliding_window=WINDOW, query_pre_attn_scalar=32,
        layer_types=["sliding_attention"] * 5 + ["full_attention"], architectures=["Gemma3ForCausalLM"],
    )  # fmt: skip


def gemma4() -> PretrainedConfig:
    """Layers of full attention have wider heads, so that their blocks have fewer tokens."""
    return Gemma4TextConfig(
        **COMMON | {"num_hidden_layers": 6}, sliding_window=WINDOW, global_head_dim=64, num_kv_shared_layers=0,
        hidden_size_per_layer_input=0, layer_types=["sliding_attention"] * 5 + ["full_attention"],
        architectures=["Gemma4ForCausalLM"],
    )  # fmt: skip


def mistral() -> PretrainedConfig:
    return MistralConfig(**COMMON, num_hidden_layers=4, sliding_window=WINDOW)


def llama4() -> PretrainedConfig:
    return Llama4TextConfig(
        **COMMON, num_hidden_layers=4, intermediate_size_mlp=256, num_local_experts=4, num_experts_per_tok=1,
        attention_chunk_size=CHUNK, no_rope_layers=[1, 1, 1, 0], architectures=["Llama4ForCausalLM"],
    )  # fmt: skip


def granite4() -> PretrainedConfig:
    return GraniteMoeHybridConfig(
        **COMMON, num_hidden_layers=4, layer_types=["mamba", "mamba", "attention", "mamba"], num_local_experts=0,
        num_experts_per_tok=0, shared_intermediate_size=256, mamba_n_heads=8, mamba_n_groups=1, mamba_d_state=32,
        mamba_d_head=32, mamba_expand=2, mamba_d_conv=4, mamba_chunk_size=32, position_embedding_type="rope",
    )  # fmt: skip


def nemotron_h() -> PretrainedConfig:
    return NemotronHConfig(
        **COMMON, layers_block_type=["mamba", "attention", "mamba", "mlp"], mamba_num_heads=8, mamba_head_dim=32,
        ssm_state_size=32, n_groups=1, conv_kernel=4, chunk_size=32,
    )  # fmt: skip


def qwen3_next() -> PretrainedConfig:
    return Qwen3NextConfig(
        **COMMON | {"head_dim": 128}, num_hidden_layers=4, layer_types=["linear_attention"] * 3 + ["full_attention"],
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=64, linear_value_head_dim=64,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=64,
    )  # fmt: skip


def qwen3_5() -> PretrainedConfig:
    return Qwen3_5TextConfig(
        **COMMON | {"head_dim": 128}, num_hidden_layers=4, layer_types=["linear_attention"] * 3 + ["full_attention"],
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=64, linear_value_head_dim=64,
        architectures=["Qwen3_5ForCausalLM"],
    )  # fmt: skip


def deepseek_v2() -> PretrainedConfig:
    return DeepseekV2Config(
        **COMMON | {"num_key_value_heads": 4}, num_hidden_layers=2, first_k_dense_replace=2, moe_intermediate_size=64,
        n_routed_experts=2, num_experts_per_tok=1, kv_lora_rank=512, q_lora_rank=None, qk_rope_head_dim=64,
        qk_nope_head_dim=128, v_head_dim=128,
    )  # fmt: skip


LATENT: dict[str, Any] = COMMON | {
    "num_key_value_heads": 4, "num_hidden_layers": 2, "moe_intermediate_size": 64, "kv_lora_rank": 512,
    "q_lora_rank": 128, "head_dim": 64, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
}  # fmt: skip
"""Of models with latent attention whose queries are compressed, too."""


def deepseek_v3() -> PretrainedConfig:
    return DeepseekV3Config(
        **LATENT, first_k_dense_replace=1, topk_method="noaux_tc", n_routed_experts=8, num_experts_per_tok=2,
        n_group=2, topk_group=1, architectures=["DeepseekV3ForCausalLM"],
    )  # fmt: skip


def glm4_moe_lite() -> PretrainedConfig:
    return Glm4MoeLiteConfig(
        **LATENT, mlp_layer_types=["dense", "sparse"], first_k_dense_replace=1, n_routed_experts=4,
        num_experts_per_tok=2, n_group=1, topk_group=1, architectures=["Glm4MoeLiteForCausalLM"],
    )  # fmt: skip


PLAIN: dict[str, Family] = {
    "llama": Family(llama, "full attention", ("FullAttentionSpec",), engine={"block_size": 32, **NO_CACHING}),
    "llama, bfloat16": Family(
        llama, "full attention", ("FullAttentionSpec",), "bfloat16", engine={"block_size": 32, **NO_CACHING}
    ),
    "qwen2": Family(qwen2, "full attention", ("FullAttentionSpec",), engine={"block_size": 32, **NO_CACHING}),
    "mixtral": Family(mixtral, "MoE", ("FullAttentionSpec",), engine={"block_size": 32, **NO_CACHING}),
    "qwen3-moe": Family(qwen3_moe, "MoE", ("FullAttentionSpec",), engine={"block_size": 32, **NO_CACHING}),
}
"""Full attention alone. What an engine or a request may have besides is tested on these."""
FAMILIES: dict[str, Family] = {
    "gpt-oss": Family(
        gpt_oss, "sliding windows", ("FullAttentionSpec", "SlidingWindowSpec"), engine={"block_size": 32}
    ),
    "gpt-oss, windows stored whole": Family(
        gpt_oss,
        "windows stored whole",
        ("FullAttentionSpec",),
        engine={"block_size": 32, "disable_hybrid_kv_cache_manager": True, **NO_CACHING},
    ),
    "gemma-3": Family(
        gemma3, "sliding windows", ("FullAttentionSpec", *["SlidingWindowSpec"] * 5), engine={"block_size": 32}
    ),
    "gemma-4": Family(
        gemma4, "sliding windows", ("FullAttentionSpec", *["SlidingWindowSpec"] * 5), engine={"block_size": 32}
    ),
    "mistral": Family(mistral, "sliding windows", ("SlidingWindowSpec",), engine={"block_size": 32}),
    "llama-4": Family(
        llama4,
        "chunked local attention",
        (*["ChunkedLocalAttentionSpec"] * 3, "FullAttentionSpec"),
        engine={"block_size": 32},
    ),
    "llama-4, chunks stored whole": Family(
        llama4,
        "chunks stored whole",
        ("FullAttentionSpec",),
        engine={"block_size": 32, "disable_hybrid_kv_cache_manager": True, **NO_CACHING},
    ),
    "granite-4": Family(granite4, "Mamba2 states", ("FullAttentionSpec", *["MambaSpec"] * 3)),
    "nemotron-h": Family(nemotron_h, "Mamba2 states", ("FullAttentionSpec", *["MambaSpec"] * 2)),
    "qwen3-next": Family(qwen3_next, "GDN states", ("FullAttentionSpec", *["MambaSpec"] * 3), "bfloat16"),
    "qwen3.5": Family(qwen3_5, "GDN states", ("FullAttentionSpec", *["MambaSpec"] * 3), "bfloat16", torchvision=True),
    "deepseek-v2": Family(deepseek_v2, "MLA", ("MLAAttentionSpec",), "bfloat16", NO_CACHING),
    "deepseek-v3": Family(deepseek_v3, "MLA", ("MLAAttentionSpec",), "bfloat16", NO_CACHING),
    "glm-4.7": Family(glm4_moe_lite, "MLA", ("MLAAttentionSpec",), "bfloat16", NO_CACHING),
}


def skip_unless_served(family: Family) -> None:
    """Skip the test that asks where the installed vLLM's CPU build does not compute the family on this machine, or is
    too old for its KV cache groups."""
    if family.dtype == "bfloat16" and not has_bfloat16():
        pytest.skip("vLLM's CPU build computes this family in bfloat16 alone, which this machine cannot")
    if family.groups != ("FullAttentionSpec",):
        skip_before_tables("windows, states and MLA are")
    if family.torchvision:
        skip_without_torchvision()


def skip_without_torchvision() -> None:
    """Skip the test that asks where torchvision was not installed."""
    if TORCHVISION not in os.environ:
        pytest.skip(
            "vLLM's models import torchvision: pip install --no-deps --target FOLDER torchvision==0.28.0, and name the "
            f"folder in {TORCHVISION}"
        )


def skip_unless_stored(engine: Mapping[str, Any]) -> None:
    """Skip the test that asks where vLLM's CPU build cannot keep KV in the type that these engine arguments name."""
    is_fp8 = str(engine.get("kv_cache_dtype", "")).startswith("fp8")
    if is_fp8 and not (torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()):
        pytest.skip("vLLM's CPU build keeps KV in fp8 with AVX-512 or AMX alone, which this machine has not")


def has_bfloat16() -> bool:
    return "bf16" in Path("/proc/cpuinfo").read_text()


def make(name: str, folder: Path, seed: int = 0, kv_heads: int | None = None) -> Path:
    """Write the family's model and a tokenizer to ``folder``; return the folder. ``kv_heads``: others than its own."""
    family = (PLAIN | FAMILIES)[name]
    config = family.config()
    if kv_heads is not None:
        config.num_key_value_heads = kv_heads
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, family.dtype))
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=1)
    model.save_pretrained(folder)
    make_tokenizer(4096).save_pretrained(folder)
    return folder
