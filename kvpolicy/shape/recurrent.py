"""Layers of families in which some keep a state of fixed size in place of keys and values: Mamba2 and gated delta net.

A state costs the same for every token, however many came before, so such a layer has no pairs. What is read of a
configuration here is what vLLM's models of these families read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from kvpolicy.shape.layers import (
    NO_ATTENTION,
    NO_MLP,
    Attention,
    Config,
    ConfigError,
    Mlp,
    grouped,
    mixture,
    mlps_of,
    number,
)

Layers = tuple[list[Attention], list[Mlp]]

ATTENTION = frozenset({"attention", "full_attention"})
STATE = frozenset({"mamba", "linear_attention"})
"""Names of the two kinds of layers, as published and as transformers 5 writes them."""


# ---- states ----


def delta_net(config: Config) -> Attention:
    """A gated delta net: projections to queries, keys, values and a gate, two numbers per head, and back.

    A token reads the state of each value head with its key, adds an outer product to it, and reads it with its query.
    """
    hidden = number(config, "hidden_size")
    keys = number(config, "linear_num_key_heads") * number(config, "linear_key_head_dim")
    heads, head = number(config, "linear_num_value_heads"), number(config, "linear_value_head_dim")
    convolved = 2 * keys + heads * head
    width = number(config, "linear_conv_kernel_dim")
    projections = hidden * (convolved + heads * head + 2 * heads) + heads * head * hidden
    state = heads * head * number(config, "linear_key_head_dim")
    return Attention(0, 0, projections + convolved * width, 0, 0, None, 6 * state, state, convolved * (width - 1))


def mamba2(config: Config, heads: int, head: int, groups: int, state_size: int, width: int) -> Attention:
    """Mamba2: projections to values, a gate, two vectors per group and a number per head, and back.

    A token adds an outer product to the state of each head and reads it. ``width``: of the convolution.
    """
    hidden, inner = number(config, "hidden_size"), heads * head
    convolved = inner + 2 * groups * state_size
    projections = hidden * (inner + convolved + heads) + inner * hidden
    state = inner * state_size
    return Attention(0, 0, projections + convolved * width, 0, 0, None, 4 * state, state, convolved * (width - 1))


# ---- families ----


def _qwen(config: Config, family: str) -> Layers:
    """Gated delta nets beside attention whose queries come with a gate of their size."""
    attention = grouped(config, family, None)
    if config.get("attn_output_gate", True):
        gate = number(config, "hidden_size") * attention.pair_flops // 4
        attention = replace(attention, parameters=attention.parameters + gate)
    kinds = _kinds(config, "layer_types", number(config, "num_hidden_layers"))
    return [attention if kind in ATTENTION else delta_net(config) for kind in kinds], mlps_of(config, family)


def _granite(config: Config, family: str) -> Layers:
    """Mamba2 beside attention; every layer has an MLP, with experts beside it where there are any."""
    heads = number(config, "mamba_n_heads")
    if config.get("mamba_d_head", "auto") == "auto":
        head = number(config, "mamba_expand") * number(config, "hidden_size") // heads
    else:
        head = number(config, "mamba_d_head")
    state = mamba2(
        config, heads, head, number(config, "mamba_n_groups"), number(config, "mamba_d_state"),
        number(config, "mamba_d_conv"),
    )  # fmt: skip
    hidden = number(config, "hidden_size")
    mlp = _mlp_of(3 * hidden * number(config, "shared_intermediate_size"))
    if config.get("num_local_experts"):
        mlp = _together(mixture(config, family, hidden), mlp)
    kinds = _kinds(config, "layer_types", number(config, "num_hidden_layers"))
    attention = grouped(config, family, None)
    return [attention if kind in ATTENTION else state for kind in kinds], [mlp] * len(kinds)


NEMOTRON_PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def _nemotron(config: Config, family: str) -> Layers:
    """Every layer is one thing: Mamba2, attention, an MLP of two matrices, or experts of two matrices each."""
    pattern = config.get("hybrid_override_pattern")
    kinds = config.get("layers_block_type")
    if kinds is None and isinstance(pattern, str):
        kinds = [NEMOTRON_PATTERN.get(letter, letter) for letter in pattern]
    kinds = _kinds({"layers_block_type": kinds}, "layers_block_type", None, also=("mlp", "moe"))
    makers: Mapping[str, Callable[[], tuple[Attention, Mlp]]] = {
        **dict.fromkeys(ATTENTION, lambda: (grouped(config, family, None), NO_MLP)),
        **dict.fromkeys(STATE, lambda: (_nemotron_state(config), NO_MLP)),
        "mlp": lambda: (
            NO_ATTENTION,
            _mlp_of(2 * number(config, "hidden_size") * number(config, "intermediate_size")),
        ),
        "moe": lambda: (NO_ATTENTION, _nemotron_experts(config)),
    }
    made = {kind: makers[kind]() for kind in dict.fromkeys(kinds)}
    return [made[kind][0] for kind in kinds], [made[kind][1] for kind in kinds]


def _nemotron_state(config: Config) -> Attention:
    return mamba2(
        config, number(config, "mamba_num_heads"), number(config, "mamba_head_dim"), number(config, "n_groups"),
        number(config, "ssm_state_size"), number(config, "conv_kernel"),
    )  # fmt: skip


def _nemotron_experts(config: Config) -> Mlp:
    hidden, experts = number(config, "hidden_size"), number(config, "n_routed_experts")
    inner, chosen = number(config, "moe_intermediate_size"), number(config, "num_experts_per_tok")
    latent = config.get("moe_latent_size")
    width = hidden if latent is None else number(config, "moe_latent_size")
    each = 2 * width * inner
    always = hidden * experts + (0 if latent is None else 2 * hidden * width)
    if config.get("n_shared_experts"):
        shared = number(config, "moe_shared_expert_intermediate_size") * number(config, "n_shared_experts")
        always += 2 * hidden * shared
    return Mlp(experts * each + always, chosen * each + always, experts * each, experts, chosen)


def _mlp_of(parameters: int) -> Mlp:
    """An MLP that every token uses whole."""
    return Mlp(parameters, parameters)


def _together(experts: Mlp, beside: Mlp) -> Mlp:
    """Experts, and an MLP beside them that every token uses."""
    parameters, active = experts.parameters + beside.parameters, experts.active + beside.active
    return replace(experts, parameters=parameters, active=active)


def _kinds(config: Config, name: str, layers: int | None, also: Collection[str] = ()) -> list[str]:
    """The kind of every layer. Raises ConfigError, naming the field, for one that is missing or not understood."""
    kinds = config.get(name)
    if kinds is None and layers is not None and config.get("full_attention_interval"):
        every = number(config, "full_attention_interval")
        return ["linear_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]
    if not isinstance(kinds, list) or not kinds:
        raise ConfigError(f"field {name} is missing")
    if layers is not None and len(kinds) != layers:
        raise ConfigError(f"field {name} names {len(kinds)} layers, num_hidden_layers is {layers}")
    known = ATTENTION | STATE | set(also)
    for layer, kind in enumerate(kinds):
        if kind not in known:
            names = ", ".join(sorted(known))
            raise ConfigError(f"field {name}[{layer}] is {kind!r}: not understood; known are {names}")
    return kinds


_QWEN_FIELDS = frozenset({
    "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads",
    "linear_num_value_heads", "full_attention_interval", "mamba_ssm_dtype",
})  # fmt: skip
_GRANITE_FIELDS = frozenset({
    "mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head", "mamba_d_conv", "mamba_expand",
    "mamba_chunk_size", "mamba_conv_bias", "shared_intermediate_size", "layers_block_type",
})  # fmt: skip
_NEMOTRON_FIELDS = frozenset({
    "layers_block_type", "hybrid_override_pattern", "mtp_layers_block_type", "mtp_hybrid_override_pattern",
    "ssm_state_size", "mamba_num_heads", "mamba_head_dim", "mamba_hidden_act", "mamba_ssm_cache_dtype", "conv_kernel",
    "use_conv_bias", "chunk_size", "use_mamba_kernels", "moe_shared_expert_intermediate_size", "moe_latent_size",
    "moe_shared_expert_overlap",
})  # fmt: skip

UNDERSTOOD: Mapping[str, tuple[Callable[[Config, str], Layers], frozenset[str]]] = {
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
        (_qwen, _QWEN_FIELDS),
    ),
    "granitemoehybrid": (_granite, _GRANITE_FIELDS),
    "nemotron_h": (_nemotron, _NEMOTRON_FIELDS),
}
"""By family, how its layers are read, and the fields about states and experts that are counted here. Chunks of a state
are how its arithmetic is arranged."""
