"""Widths of weights and KV read out of a configuration."""

from __future__ import annotations

from typing import Any

import pytest

from kvpolicy.shape import ConfigError, ModelShape
from tests.shape.configs import (
    GPT_OSS_20B,
    LLAMA_31_8B,
)


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
    ("change", "message"),
    [
        ({"torch_dtype": "int3"}, "torch_dtype is 'int3'"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quant_method is 'hqq'"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, r"quantization_config\.group_size is None"),
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
def test_an_unknown_width_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelShape.from_config(LLAMA_31_8B | change)
