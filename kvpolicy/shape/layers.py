"""The layers a Hugging Face config.json describes: attention and MLP of each, in order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvpolicy.errors import KVPolicyError

Config = Mapping[str, Any]


class ConfigError(KVPolicyError):
    """A model configuration that costs cannot be derived from; the message names the field."""


UNGATED = frozenset(
    {"bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "mpt", "nemotron", "opt", "phi", "starcoder2"}
)
"""Families whose MLP has two matrices; all others have three (gate, up, down)."""
FOURFOLD = frozenset({"bloom", "falcon", "gpt2", "gpt_bigcode", "gptj"})
"""Families whose MLP is by default four times as wide as the model."""
STATEFUL = frozenset({
    "bamba", "falcon_h1", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "mamba", "mamba2",
    "nemotron_h", "olmo_hybrid", "plamo2", "qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_next",
    "recurrent_gemma", "zamba2",
})  # fmt: skip
"""Families with layers that keep a state instead of KV, even where the configuration omits the fields about it."""
BIASED_QKV = frozenset({"qwen2", "qwen2_moe"})
"""Families whose query, key and value projections have biases."""


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention of one layer, or the state that takes its place."""

    heads: int
    kv_heads: int
    """0 for latent attention, which stores no heads, and for a state."""
    parameters: int
    kv_values: int
    """Values stored per token."""
    pair_flops: int
    """FLOPs per (query, key) pair: scores and weighted values."""
    window: int | None
    """Tokens a query sees; None for the whole context."""
    state_flops: int = 0
    """FLOPs per token of updating and reading a state, beside those of the projections."""
    state_values: int = 0
    """Values of a request's state, however long it is; 0 for attention."""
    convolution_values: int = 0
    """Values of the last inputs of its convolution, which are kept with the state."""

    @property
    def attends(self) -> bool:
        """Whether queries attend to keys: neither a state nor nothing at all."""
        return self.heads > 0


@dataclass(frozen=True, slots=True)
class Mlp:
    """MLP of one layer."""

    parameters: int
    active: int
    """Parameters that one token uses."""
    routed: int = 0
    """Parameters of routed experts, included in ``parameters``."""
    experts: int = 0
    chosen: int = 0


NO_ATTENTION = Attention(0, 0, 0, 0, 0, None)
NO_MLP = Mlp(0, 0)
"""What the layers of some families lack."""


def text_of(config: Config) -> Config:
    """The part of a configuration about the language model, which multimodal configurations nest."""
    for name in ("text_config", "llm_config", "language_config"):
        nested = config.get(name)
        if isinstance(nested, Mapping):
            return nested
    return config


def number(config: Config, *names: str) -> int:
    """The first of these fields that is present. Raises ConfigError unless it is a whole number above 0."""
    value = next((config[name] for name in names if config.get(name) is not None), None)
    if value is None:
        raise ConfigError(f"field {' or '.join(names)} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"field {names[0]} is {value!r}, should be a whole number above 0")
    return value


def _layer_count(config: Config) -> int:
    return number(config, "num_hidden_layers", "n_layer", "n_layers", "num_layers")


# ---- attention ----


def attentions_of(config: Config, family: str) -> list[Attention]:
    """Attention of every layer, in order."""
    make = _latent if "kv_lora_rank" in config else grouped
    return [make(config, family, window) for window in _windows(config, family)]


def grouped(config: Config, family: str, window: int | None) -> Attention:
    """Attention of query heads that share KV heads."""
    hidden = number(config, "hidden_size", "n_embd", "d_model")
    heads = number(config, "num_attention_heads", "n_head", "n_heads")
    kv_heads = _kv_heads(config, family, heads)
    head = number(config, "head_dim") if config.get("head_dim") else hidden // heads
    projections = hidden * head * (2 * heads + 2 * kv_heads)
    biases = head * (heads + 2 * kv_heads) if family in BIASED_QKV else 0
    return Attention(heads, kv_heads, projections + biases, 2 * kv_heads * head, 4 * heads * head, window)


def _kv_heads(config: Config, family: str, heads: int) -> int:
    if family == "falcon" and not config.get("new_decoder_architecture"):
        return 1 if config.get("multi_query", True) else heads
    if config.get("num_key_value_heads") is None and config.get("num_kv_heads") is None:
        return 1 if family == "gpt_bigcode" and config.get("multi_query", True) else heads
    return number(config, "num_key_value_heads", "num_kv_heads")


def _latent(config: Config, family: str, window: int | None) -> Attention:
    """Multi-head latent attention: one compressed vector and one rotary key per token and layer.

    FLOPs are those of a prefill, which expands the vector to keys and values of all heads.
    """
    hidden, heads = number(config, "hidden_size"), number(config, "num_attention_heads")
    latent, rope = number(config, "kv_lora_rank"), number(config, "qk_rope_head_dim")
    nope, value = number(config, "qk_nope_head_dim"), number(config, "v_head_dim")
    query = heads * (nope + rope)
    rank = config.get("q_lora_rank")
    queries = hidden * query if rank is None else (hidden + query) * number(config, "q_lora_rank")
    parameters = queries + hidden * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden
    return Attention(heads, 0, parameters, latent + rope, 2 * heads * (nope + rope + value), window)


def _windows(config: Config, family: str) -> list[int | None]:
    """Attention window of every layer, in order; None for the whole context."""
    layers = _layer_count(config)
    types = config.get("layer_types")
    if types is not None:
        if len(types) != layers:
            raise ConfigError(f"field layer_types names {len(types)} layers, num_hidden_layers is {layers}")
        return [_window_of(config, layer, kind) for layer, kind in enumerate(types)]
    if family in STATEFUL:
        raise ConfigError(f"field model_type is {family!r}: layers that keep a state instead of KV are not understood")
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return [None] * layers
    window = number(config, "sliding_window")
    return [window if _slides(config, family, layer) else None for layer in range(layers)]


def _window_of(config: Config, layer: int, kind: str) -> int | None:
    if kind == "full_attention":
        return None
    if kind == "sliding_attention":
        return number(config, "sliding_window")
    raise ConfigError(
        f"field layer_types[{layer}] is {kind!r}: not understood; known are full_attention and sliding_attention"
    )


def _slides(config: Config, family: str, layer: int) -> bool:
    """Whether a layer uses the model's window, where ``layer_types`` is missing."""
    if family == "gemma2":
        return layer % 2 == 0
    pattern = config.get("sliding_window_pattern", 6 if family in ("gemma3", "gemma3_text") else None)
    if pattern is not None:
        return (layer + 1) % int(pattern) != 0
    if family in ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"):
        return layer >= number(config, "max_window_layers")
    return True


# ---- MLP ----


def mlps_of(config: Config, family: str) -> list[Mlp]:
    """MLP of every layer, in order."""
    hidden = number(config, "hidden_size", "n_embd", "d_model")
    layers = _layer_count(config)
    dense_layers = [not _is_sparse(config, layer) for layer in range(layers)]
    dense_mlp = _dense(config, family, hidden) if any(dense_layers) else None
    sparse_mlp = None if all(dense_layers) else mixture(config, family, hidden)
    mlps = [dense_mlp if is_dense else sparse_mlp for is_dense in dense_layers]
    return [mlp for mlp in mlps if mlp is not None]


def _dense(config: Config, family: str, hidden: int) -> Mlp:
    matrices = 2 if family in UNGATED else 3
    names = ("intermediate_size_mlp", "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
    if family in FOURFOLD and all(config.get(name) is None for name in names):
        intermediate = 4 * hidden
    else:
        intermediate = number(config, *names)
    return Mlp(matrices * hidden * intermediate, matrices * hidden * intermediate)


_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")


def _is_sparse(config: Config, layer: int) -> bool:
    if not any(config.get(name) for name in _EXPERTS):
        return False
    if "first_k_dense_replace" in config:
        return layer >= config["first_k_dense_replace"] and layer % int(config.get("moe_layer_freq", 1)) == 0
    if layer in (config.get("mlp_only_layers") or ()):
        return False
    every = config.get("decoder_sparse_step") or config.get("interleave_moe_layer_step") or 1
    return (layer + 1) % int(every) == 0


def mixture(config: Config, family: str, hidden: int) -> Mlp:
    """Experts, and those that every token uses."""
    experts = number(config, *_EXPERTS)
    experts_per_token = number(config, "num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk")
    per_expert = 3 * hidden * number(config, "moe_intermediate_size", "intermediate_size")
    shared = _shared(config, family, hidden, per_expert) + hidden * experts
    return Mlp(
        experts * per_expert + shared,
        experts_per_token * per_expert + shared,
        experts * per_expert,
        experts,
        experts_per_token,
    )


def _shared(config: Config, family: str, hidden: int, per_expert: int) -> int:
    """Parameters of experts that every token uses. ``per_expert``: parameters of one routed expert."""
    if config.get("shared_expert_intermediate_size"):
        return 3 * hidden * number(config, "shared_expert_intermediate_size") + hidden
    if config.get("n_shared_experts"):
        return per_expert * number(config, "n_shared_experts")
    return per_expert if family in ("llama4", "llama4_text") else 0
