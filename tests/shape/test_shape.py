"""Shapes from configurations, against published sizes; what is missing is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvpolicy.hardware import Geometry
from kvpolicy.shape import ConfigError, ModelShape
from tests.shape.configs import (
    DEEPSEEK_V3,
    GEMMA_2_9B,
    GEMMA_3_27B,
    GPT_OSS_20B,
    LLAMA_2_7B,
    LLAMA_31_8B,
    MIXTRAL_8X7B,
    QWEN3_30B_A3B,
)

BILLION = 1e9


@pytest.mark.parametrize(
    ("config", "parameters", "active", "tolerance"),
    [
        (LLAMA_31_8B, 8.03, 8.03, 0.001),
        (LLAMA_2_7B, 6.74, 6.74, 0.001),
        (MIXTRAL_8X7B, 46.7, 12.9, 0.002),
        (DEEPSEEK_V3, 671.0, 37.0, 0.02),
        (QWEN3_30B_A3B, 30.5, 3.3, 0.02),
        (GEMMA_2_9B, 9.24, 9.24, 0.001),
        (GEMMA_3_27B, 27.0, 27.0, 0.005),
        (GPT_OSS_20B, 20.9, 4.2, 0.01),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else None,
)
def test_published_sizes(config: dict[str, Any], parameters: float, active: float, tolerance: float) -> None:
    shape = ModelShape.from_config(config)
    assert shape.parameters / BILLION == pytest.approx(parameters, rel=tolerance)
    used_by_a_token = shape.embedding_parameters + shape.linear_flops_per_token / 2
    assert used_by_a_token / BILLION == pytest.approx(active, rel=tolerance)


@pytest.mark.parametrize(
    ("config", "kv_bytes"),
    [
        (LLAMA_31_8B, 131072),
        (LLAMA_2_7B, 524288),
        (MIXTRAL_8X7B, 131072),
        (DEEPSEEK_V3, 576 * 61 * 2),
        (QWEN3_30B_A3B, 98304),
        (GEMMA_2_9B, 42 * 2 * 8 * 256 * 2),
    ],
)
def test_kv_bytes_of_a_token_that_all_layers_see(config: dict[str, Any], kv_bytes: int) -> None:
    shape = ModelShape.from_config(config)
    assert shape.kv_bytes_per_token == kv_bytes
    assert ModelShape.from_config(config, "fp8").kv_bytes_per_token == kv_bytes / 2
    assert Geometry.from_config(config).kv_bytes_per_token == kv_bytes


@pytest.mark.parametrize("config", [LLAMA_31_8B, LLAMA_2_7B, MIXTRAL_8X7B, QWEN3_30B_A3B, GEMMA_2_9B, GEMMA_3_27B])
def test_what_traces_record_has_the_shapes_linear_work(config: dict[str, Any]) -> None:
    wanted = ModelShape.from_config(config).linear_flops_per_token
    assert Geometry.from_config(config).linear_flops_per_token == pytest.approx(wanted, rel=0.005)


def test_layers_with_a_window_keep_no_more_than_it() -> None:
    gemma_2, gemma_3 = ModelShape.from_config(GEMMA_2_9B), ModelShape.from_config(GEMMA_3_27B)
    per_layer = 2 * 8 * 256 * 2
    assert gemma_2.kv_bytes(10_000) == 21 * per_layer * 10_000 + 21 * per_layer * 4096
    assert sum(kind.layers for kind in gemma_3.kinds if kind.attention.window is None) == 10
    assert gemma_3.window_tokens == 1024
    assert ModelShape.from_config(GPT_OSS_20B).window_tokens == 128
    assert ModelShape.from_config(LLAMA_31_8B).window_tokens is None


def test_pairs_under_a_window_are_counted_apart() -> None:
    shape = ModelShape.from_config(GEMMA_2_9B)
    assert shape.attention_flops_per_pair == shape.window_flops_per_pair == 4 * 16 * 256 * 21


def test_qwen2_has_a_window_only_where_it_says_so() -> None:
    qwen = LLAMA_31_8B | {"model_type": "qwen2", "sliding_window": 32768, "use_sliding_window": False}
    assert ModelShape.from_config(qwen).window_tokens is None
    upper = qwen | {"use_sliding_window": True, "max_window_layers": 28}
    windows = {kind.attention.window: kind.layers for kind in ModelShape.from_config(upper).kinds}
    assert windows == {None: 28, 32768: 4}


def test_llama_8b_by_hand() -> None:
    shape = ModelShape.from_config(LLAMA_31_8B)
    layer = 4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 14336
    assert shape.linear_flops_per_token == 2 * 32 * layer
    assert shape.attention_flops_per_pair == 4 * 32 * 32 * 128
    assert shape.weight_bytes == 2 * shape.parameters
    assert shape.steady_weight_bytes == 2 * (32 * layer + 128256 * 4096) and shape.expert_weight_bytes == 0


def test_a_token_reads_its_experts() -> None:
    shape = ModelShape.from_config(QWEN3_30B_A3B)
    expert = 3 * 2048 * 768 * 2 * 48
    assert shape.expert_weight_bytes * (1 - shape.expert_miss) == pytest.approx(8 * expert)
    all_but_embedding = shape.weight_bytes - 151936 * 2048 * 2
    assert shape.steady_weight_bytes + shape.expert_weight_bytes == pytest.approx(all_but_embedding, rel=1e-6)


@pytest.mark.parametrize(
    ("quantised", "bits", "arithmetic"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4 + 20 / 128, "bf16"),
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, 4 + 20 / 64, "bf16"),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 8, "bf16"),
        ({"quant_method": "fp8"}, 8, "fp8"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8 + 32 / 16384, "fp8"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.5, "bf16"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5, "bf16"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}},
            },
            4.5,
            "bf16",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 128}}},
            },
            4 + 16 / 128,
            "bf16",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {"weights": {"num_bits": 8}, "input_activations": {"num_bits": 8, "type": "int"}}
                },
            },
            8,
            "int8",
        ),
    ],
)
def test_quantised_weights(quantised: dict[str, Any], bits: float, arithmetic: str) -> None:
    shape = ModelShape.from_config(LLAMA_31_8B | {"quantization_config": quantised})
    inside = shape.parameters - shape.embedding_parameters
    assert shape.weight_bytes == pytest.approx((inside * bits + shape.embedding_parameters * 16) / 8)
    assert shape.precision.arithmetic == arithmetic
    assert shape.kv_bytes_per_token == 131072


def test_mxfp4_quantises_experts_only() -> None:
    """12.8 GiB is what its weights are published at; KV stays in 16 bits."""
    shape = ModelShape.from_config(GPT_OSS_20B)
    assert shape.weight_bytes / 2**30 == pytest.approx(12.8, rel=0.01)
    assert shape.kv_bytes_per_token == 24 * 2 * 8 * 64 * 2


def test_quantised_kv_from_the_configuration_itself() -> None:
    scheme = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    assert ModelShape.from_config(LLAMA_31_8B | {"quantization_config": scheme}).kv_bytes_per_token == 65536


@pytest.mark.parametrize(
    "field",
    ["num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size", "torch_dtype"],
)
def test_a_missing_field_is_named(field: str) -> None:
    config = {name: value for name, value in LLAMA_31_8B.items() if name != field}
    with pytest.raises(ConfigError, match=rf"field .*{field}.* is missing"):
        ModelShape.from_config(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"torch_dtype": "int3"}, "torch_dtype is 'int3'"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers is 'many'"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quant_method is 'hqq'"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, r"quantization_config\.group_size is None"),
        ({"layer_types": ["full_attention"]}, "layer_types names 1 layers"),
        ({"layer_types": ["linear_attention"] * 32}, r"layer_types\[0\] is 'linear_attention'"),
        ({"num_local_experts": 8}, "num_experts_per_tok.* is missing"),
        ({"model_type": "mamba"}, "keep a state instead of KV"),
        ({"model_type": "lfm2"}, "model_type is 'lfm2'.* keep a state"),
        ({"layer_types": ["chunked_attention"] * 32}, r"layer_types\[0\] is 'chunked_attention'"),
        ({"attention_chunk_size": 8192}, "attention_chunk_size is 8192: attention within chunks"),
        ({"moe_num_experts": 64, "moe_k": 6}, "moe_num_experts is 64: experts"),
        ({"shared_intermediate_size": 1024}, "shared_intermediate_size is 1024"),
        ({"attn_type_list": [0] * 28 + [1] * 4}, "attn_type_list is .* keep a state"),
        ({"linear_attn_config": {"kda_layers": [1]}}, "linear_attn_config is .* keep a state"),
        ({"linear_conv_kernel_dim": 4}, "linear_conv_kernel_dim is 4: .* keep a state"),
        ({"full_attention_interval": 4}, "full_attention_interval is 4: .* keep a state"),
        ({"mamba_d_state": 64}, "mamba_d_state is 64: .* keep a state"),
        ({"conv_L_cache": 3}, "conv_L_cache is 3: .* keep a state"),
        ({"ssm_cfg": {"d_state": 16}}, "ssm_cfg is .* keep a state"),
        ({"state_size": 16}, "state_size is 16: .* keep a state"),
        ({"num_kv_shared_layers": 10}, "num_kv_shared_layers is 10: layers that share KV"),
        ({"index_topk": 2048}, "index_topk is 2048: attention to chosen tokens"),
        (
            {
                "quantization_config": {
                    "quant_method": "compressed-tensors",
                    "config_groups": {"a": {"weights": {"num_bits": 4}}, "b": {"weights": {"num_bits": 8}}},
                }
            },
            "config_groups has weights of several widths",
        ),
    ],
)
def test_what_is_not_understood_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelShape.from_config(LLAMA_31_8B | change)


@pytest.mark.parametrize(
    "change",
    [
        {"mamba_d_state": None, "num_experts": 0, "conv_bias": False, "attention_chunk_size": None},
        {"output_hidden_states": True, "chunk_size_feed_forward": 0},
        {"attn_type_list": [1] * 32},
        {"moe_aux_loss_coef": 0.001, "use_expert_bias": True, "moe_router_activation_func": "sigmoid"},
    ],
)
def test_fields_that_are_unset_or_cost_nothing_are_no_reason_to_refuse(change: dict[str, Any]) -> None:
    plain = ModelShape.from_config(LLAMA_31_8B)
    assert ModelShape.from_config(LLAMA_31_8B | change) == plain


def test_files_are_read_and_named_in_errors(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_31_8B))
    assert ModelShape.read(tmp_path) == ModelShape.read(tmp_path / "config.json") == ModelShape.from_config(LLAMA_31_8B)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json: not a readable"):
        ModelShape.read(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"config\.json: field .* is missing"):
        ModelShape.read(tmp_path)


def test_what_traces_record_of_a_shape_is_unchanged() -> None:
    geometry = Geometry.from_config(LLAMA_31_8B)
    assert geometry == Geometry.from_dict(geometry.to_dict())
    assert set(geometry.to_dict()) == {
        "layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "weight_bytes", "kv_bytes",
        "dtype",
    }  # fmt: skip
    assert (geometry.kv_heads, geometry.head_dim, geometry.intermediate, geometry.weight_bytes) == (8, 128, 14336, 2)
