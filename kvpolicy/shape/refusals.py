"""Refuses configurations with fields that change a layer's cost in ways that are not modelled."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from kvpolicy.shape.layers import ConfigError

COUNTED = frozenset({
    "n_routed_experts", "num_local_experts", "num_experts", "num_experts_per_tok", "num_experts_per_token",
    "experts_per_token", "moe_topk", "moe_intermediate_size", "moe_layer_freq", "interleave_moe_layer_step",
    "n_shared_experts", "shared_expert_intermediate_size",
})  # fmt: skip
"""Fields about experts that the counts take into account."""
COSTLESS = frozenset({"output_hidden_states", "chunk_size_feed_forward"})
"""Fields of every configuration that match a pattern below and do not affect costs."""
_COSTLESS_OF_EXPERTS = re.compile(r"loss|router|dropout|jitter|norm|bias|score|scoring|scaling")

_EXPERTS = re.compile(r"expert|moe|shared_intermediate")
_STATE = re.compile(
    r"ssm|mamba|conv|state|rwkv|lru_|recurren|hybrid|kda|^linear_|linear_att|full_attention_interval|full_att\w*_idx"
    r"|attn_type|attn_layer|block_types|attention_types?$|layers_block_type"
)
_CHUNK = re.compile(r"chunk")
_SHARED_KV = re.compile(r"kv_shared|global_head_dim|global_key_value")
_SHAPE_OF_LAYER = re.compile(r"^per_layer_config|^hidden_size_per_layer_input")
_SPARSE_ATTENTION = re.compile(r"^index_(topk|n_heads|head_dim)")
_MEANINGS = (
    (_EXPERTS, "experts it describes are not counted"),
    (_STATE, "layers that keep a state instead of KV are not understood"),
    (_CHUNK, "attention within chunks is not understood"),
    (_SHARED_KV, "layers that share KV, or keep KV of another size, are not understood"),
    (_SHAPE_OF_LAYER, "what single layers have of their own is not understood"),
    (_SPARSE_ATTENTION, "attention to chosen tokens is not understood"),
)


def refuse_uncounted(config: Mapping[str, Any], counted: Collection[str] = ()) -> None:
    """Raise ConfigError naming the first field that is set and would make the counts wrong.

    Fields are recognised by patterns of their names, not by family, so that new families are refused as well.
    ``counted``: fields that the model's own family counts.
    """
    for name, value in config.items():
        if not value or name in COUNTED or name in counted or name in COSTLESS or _all_full(name, value):
            continue
        meaning = next((text for pattern, text in _MEANINGS if pattern.search(name.lower())), None)
        if meaning is None or (_EXPERTS.search(name) and _COSTLESS_OF_EXPERTS.search(name)):
            continue
        raise ConfigError(f"field {name} is {_short(value)}: {meaning}")


def _all_full(name: str, value: Any) -> bool:
    """Whether a list of attention types declares full attention for every layer (type 1, as MiniMax writes it)."""
    return name == "attn_type_list" and isinstance(value, list) and all(kind == 1 for kind in value)


def _short(value: Any, max_length: int = 40) -> str:
    text = repr(value)
    return text if len(text) <= max_length else f"{text[:max_length]}..."
