"""Sizes of published models: weights, KV, operations of a step."""

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


def test_files_are_read_and_named_in_errors(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_31_8B))
    assert ModelShape.read(tmp_path) == ModelShape.read(tmp_path / "config.json") == ModelShape.from_config(LLAMA_31_8B)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json: not a readable"):
        ModelShape.read(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"config\.json: field .* is missing"):
        ModelShape.read(tmp_path)
