"""Layers read out of a configuration; missing and wrong fields are named."""

from __future__ import annotations

from typing import Any

import pytest

from kvpolicy.shape import ConfigError, ModelShape
from tests.shape.configs import LLAMA_31_8B


def test_qwen2_has_a_window_only_where_it_says_so() -> None:
    qwen = LLAMA_31_8B | {"model_type": "qwen2", "sliding_window": 32768, "use_sliding_window": False}
    assert ModelShape.from_config(qwen).window_tokens is None
    upper = qwen | {"use_sliding_window": True, "max_window_layers": 28}
    windows = {kind.attention.window: kind.layers for kind in ModelShape.from_config(upper).kinds}
    assert windows == {None: 28, 32768: 4}


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
        ({"num_hidden_layers": "many"}, "num_hidden_layers is 'many'"),
        ({"layer_types": ["full_attention"]}, "layer_types names 1 layers"),
        ({"layer_types": ["linear_attention"] * 32}, r"layer_types\[0\] is 'linear_attention'"),
        ({"num_local_experts": 8}, "num_experts_per_tok.* is missing"),
        ({"layer_types": ["chunked_attention"] * 32}, r"layer_types\[0\] is 'chunked_attention'"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelShape.from_config(LLAMA_31_8B | change)
