"""What the plugin reads from vLLM's configuration, and what it hands to vLLM's metrics."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.engine.arg_utils import EngineArgs

from kvpolicy.hardware import Geometry
from kvpolicy_vllm.plugin.connector import cores_here
from kvpolicy_vllm.plugin.engine_config import geometry_of
from kvpolicy_vllm.plugin.metrics import KVPolicyStats
from tests.shape.configs import LLAMA_31_8B, MIXTRAL_8X7B, QWEN3_30B_A3B


@pytest.mark.parametrize(("size_local", "rank_local", "cores"), [(1, None, 1), (4, 0, 4), (1, 3, 4), (0, None, 1)])
def test_cores_are_counted_where_each_is_told_that_it_is_alone(
    size_local: int, rank_local: int | None, cores: int
) -> None:
    """Of a dense model vLLM tells every core that it is the only one, but leaves it its rank."""
    parallel = SimpleNamespace(data_parallel_size_local=size_local, data_parallel_rank_local=rank_local)
    config: Any = SimpleNamespace(parallel_config=parallel)
    assert cores_here(config) == cores


def test_counters_add_up_and_gauges_stand() -> None:
    first = KVPolicyStats({"counters": {"fallbacks|reason=host_full": 1}, "gauges": {"host_slots_used": 3}})
    second = KVPolicyStats({"counters": {"fallbacks|reason=host_full": 2}, "gauges": {"host_slots_used": 0}})
    both = first.aggregate(second)
    assert both.data == {"counters": {"fallbacks|reason=host_full": 3}, "gauges": {"host_slots_used": 0}}
    assert KVPolicyStats().is_empty() and not both.is_empty()


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
    made = EngineArgs(model=str(tmp_path), skip_tokenizer_init=True, max_model_len=512).create_engine_config()
    assert geometry_of(made) == Geometry.from_config(config)
