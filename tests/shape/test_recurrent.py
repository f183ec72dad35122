"""Families in which layers keep a state instead of KV: sizes of published models, and work by hand."""

from __future__ import annotations

from typing import Any

import pytest

from kvpolicy.shape import ConfigError, ModelShape
from tests.shape.configs import GRANITE_4_SMALL, LLAMA_31_8B, NEMOTRON_3_NANO, NEMOTRON_H_8B, QWEN3_NEXT_80B

BILLION = 1e9


@pytest.mark.parametrize(
    ("config", "parameters", "states"),
    [
        (QWEN3_NEXT_80B, 79.7, 36),
        (GRANITE_4_SMALL, 32.2, 36),
        (NEMOTRON_H_8B, 8.1, 24),
        (NEMOTRON_3_NANO, 31.6, 23),
    ],
    ids=["qwen3-next-80b", "granite-4-small", "nemotron-h-8b", "nemotron-3-nano"],
)
def test_published_sizes(config: dict[str, Any], parameters: float, states: int) -> None:
    shape = ModelShape.from_config(config)
    assert shape.parameters / BILLION == pytest.approx(parameters, rel=0.005)
    assert shape.layers_with(lambda kept: kept.state_values > 0) == states


def test_names_that_transformers_gives_are_understood() -> None:
    kinds = ["full_attention" if layer % 10 == 5 else "linear_attention" for layer in range(40)]
    assert ModelShape.from_config(GRANITE_4_SMALL | {"layer_types": kinds}) == ModelShape.from_config(GRANITE_4_SMALL)
    letters = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}
    pattern = NEMOTRON_H_8B["hybrid_override_pattern"]
    without = {name: value for name, value in NEMOTRON_H_8B.items() if name not in ("hybrid_override_pattern",)}
    named = without | {"layers_block_type": [letters[letter] for letter in pattern]}
    del named["num_hidden_layers"]  # transformers counts the kinds
    assert ModelShape.from_config(named) == ModelShape.from_config(NEMOTRON_H_8B)


def test_a_gated_delta_net_by_hand() -> None:
    """16 key heads and 32 value heads of 128; per layer projections to q, k, v and z, to b and a, and back."""
    shape = ModelShape.from_config(QWEN3_NEXT_80B)
    (net,) = {kind.attention for kind in shape.kinds if kind.attention.state_values}
    keys, values = 16 * 128, 32 * 128
    assert net.parameters == 2048 * (2 * keys + 2 * values + 2 * 32) + values * 2048 + (2 * keys + values) * 4
    assert (net.state_values, net.convolution_values) == (32 * 128 * 128, (2 * keys + values) * 3)
    assert net.state_flops == 6 * 32 * 128 * 128 and (net.kv_values, net.pair_flops) == (0, 0)
    assert shape.attention.parameters == 2048 * 256 * (3 * 16 + 2 * 2), "queries come with a gate"


def test_a_mamba2_layer_by_hand() -> None:
    shape = ModelShape.from_config(GRANITE_4_SMALL)
    (layer,) = {kind.attention for kind in shape.kinds if kind.attention.state_values}
    inner, convolved = 128 * 64, 128 * 64 + 2 * 128
    assert layer.parameters == 4096 * (inner + convolved + 128) + inner * 4096 + convolved * 4
    assert (layer.state_values, layer.convolution_values) == (inner * 128, convolved * 3)
    assert layer.state_flops == 4 * inner * 128


def test_a_state_has_the_same_work_and_bytes_whatever_the_context() -> None:
    shape = ModelShape.from_config(GRANITE_4_SMALL)
    assert shape.kv_bytes(10_000) == 10_000 * 4 * 2 * 8 * 128 * 2, "of four layers of attention alone"
    assert shape.attention_flops_per_pair == 4 * 4 * 32 * 128 and shape.window_flops_per_pair == 0
    assert shape.state_bytes == 36 * (128 * 64 * 128 + (128 * 64 + 256) * 3) * 2
    wide = ModelShape.from_config(NEMOTRON_3_NANO)
    assert wide.state_bytes == 23 * (64 * 64 * 128 * 4 + (64 * 64 + 2 * 8 * 128) * 3 * 2), "states in float32"
    states = 36 * 4 * 128 * 64 * 128
    active = sum(kind.layers * (kind.attention.parameters + kind.mlp.active) for kind in shape.kinds)
    assert shape.linear_flops_per_token == 2 * active + states


def test_experts_stand_beside_an_mlp_that_every_token_uses() -> None:
    shape = ModelShape.from_config(GRANITE_4_SMALL)
    (mlp,) = {kind.mlp for kind in shape.kinds}
    each, beside = 3 * 4096 * 768, 3 * 4096 * 1536 + 4096 * 72
    assert (mlp.parameters, mlp.active) == (72 * each + beside, 10 * each + beside)
    dense = ModelShape.from_config(GRANITE_4_SMALL | {"num_local_experts": 0})
    assert {kind.mlp.active for kind in dense.kinds} == {3 * 4096 * 1536}


def test_latent_experts_are_reached_through_two_projections() -> None:
    shape = ModelShape.from_config(NEMOTRON_3_NANO | {"moe_latent_size": 1024})
    (mlp,) = {kind.mlp for kind in shape.kinds if kind.mlp.experts}
    always = 2688 * 128 + 2 * 2688 * 1024 + 2 * 2688 * 3712
    assert (mlp.parameters, mlp.active) == (128 * 2 * 1024 * 1856 + always, 6 * 2 * 1024 * 1856 + always)


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (GRANITE_4_SMALL, {"layer_types": ["mamba"] * 39 + ["rwkv"]}, r"layer_types\[39\] is 'rwkv': not understood"),
        (GRANITE_4_SMALL, {"layer_types": ["mamba"]}, "layer_types names 1 layers, num_hidden_layers is 40"),
        (GRANITE_4_SMALL, {"layer_types": None}, "layer_types is missing"),
        (GRANITE_4_SMALL, {"mamba_d_state": None}, "mamba_d_state is missing"),
        (GRANITE_4_SMALL, {"mamba_d_head": "wide"}, "mamba_d_head is 'wide', should be a whole number"),
        (GRANITE_4_SMALL, {"mamba_proj_bias": True}, "mamba_proj_bias is True"),
        (GRANITE_4_SMALL, {"linear_conv_kernel_dim": 4}, "linear_conv_kernel_dim is 4: .* keep a state"),
        (NEMOTRON_H_8B, {"hybrid_override_pattern": "MM?"}, r"layers_block_type\[2\] is '\?'"),
        (NEMOTRON_H_8B, {"hybrid_override_pattern": None}, "layers_block_type is missing"),
        (NEMOTRON_3_NANO, {"mamba_ssm_cache_dtype": "int4"}, "mamba_ssm_cache_dtype is 'int4'"),
        (QWEN3_NEXT_80B, {"linear_num_value_heads": None}, "linear_num_value_heads is missing"),
        (QWEN3_NEXT_80B, {"mamba_d_state": 16}, "mamba_d_state is 16: .* keep a state"),
        (LLAMA_31_8B, {"model_type": "jamba"}, "model_type is 'jamba'.* keep a state"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(
    config: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelShape.from_config(config | change)


def test_a_model_without_attention_has_none_to_show() -> None:
    shape = ModelShape.from_config(GRANITE_4_SMALL | {"layer_types": ["mamba"] * 40})
    with pytest.raises(ConfigError, match="no layer is one of attention"):
        _ = shape.attention
