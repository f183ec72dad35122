"""Fields of a configuration whose cost is not counted are refused."""

from __future__ import annotations

from typing import Any

import pytest

from kvpolicy.shape import ConfigError, ModelShape
from tests.shape.configs import (
    LLAMA_31_8B,
)


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "keep a state instead of KV"),
        ({"model_type": "lfm2"}, "model_type is 'lfm2'.* keep a state"),
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
        ({"per_layer_config": {5: {"head_dim": 512}}}, "per_layer_config is .* what single layers have of their own"),
        ({"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input is 256: what single layers"),
        ({"index_topk": 2048}, "index_topk is 2048: attention to chosen tokens"),
    ],
)
def test_a_field_whose_cost_is_not_counted_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelShape.from_config(LLAMA_31_8B | change)


def test_heads_that_transformers_gives_to_single_layers_are_refused() -> None:
    """A published Gemma 4 says ``global_head_dim``, which transformers replaces when it reads the file."""
    transformers = pytest.importorskip("transformers")
    fields = transformers.Gemma4TextConfig(num_kv_shared_layers=0, hidden_size_per_layer_input=0).to_dict()
    with pytest.raises(ConfigError, match=r"per_layer_config|global_head_dim"):
        ModelShape.from_config(fields | {"dtype": "bfloat16"})
