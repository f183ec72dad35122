"""What the plugin reads from vLLM's configuration, and what it hands to vLLM's metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs

from kvpolicy.hardware import Geometry
from kvpolicy_vllm.plugin.engine_config import geometry_of
from tests.shape.configs import LLAMA_31_8B, MIXTRAL_8X7B, QWEN3_30B_A3B

pytest.importorskip("vllm")


OPT = {
    "model_type": "opt", "hidden_size": 768, "ffn_dim": 3072, "num_attention_heads": 12, "num_hidden_layers": 12,
    "vocab_size": 50272, "max_position_embeddings": 2048, "word_embed_proj_dim": 768, "torch_dtype": "float16",
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "architecture"),
    [
        (OPT, "OPTForCausalLM"),
        (LLAMA_31_8B, "LlamaForCausalLM"),
        (MIXTRAL_8X7B, "MixtralForCausalLM"),
        (QWEN3_30B_A3B, "Qwen3MoeForCausalLM"),
    ],
)
def test_an_engine_sees_the_geometry_of_the_models_shape(
    tmp_path: Path, config: dict[str, Any], architecture: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
    result = EngineArgs(model=str(tmp_path), skip_tokenizer_init=True, max_model_len=512).create_engine_config()
    assert geometry_of(result) == Geometry.from_config(config)
