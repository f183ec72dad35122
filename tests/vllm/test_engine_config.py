"""What the plugin reads from vLLM's configuration, and what it hands to vLLM's metrics."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

from kvpolicy.cost import FittedModel, ModelError
from kvpolicy.hardware import Geometry
from kvpolicy.shape import ConfigError, ModelShape
from kvpolicy_vllm.plugin.engine_config import (
    engine_spec,
    geometry_of,
    refuse_other_model,
    token_budget,
    why_not_priced,
)
from kvpolicy_vllm.plugin.settings import Settings
from tests.shape.configs import LLAMA_31_8B, MIXTRAL_8X7B, QWEN3_30B_A3B
from tests.synthetic import fitted_model
from tests.vllm.families import FAMILIES, PLAIN, WINDOW
from tests.vllm.harness import ROOT

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


def made_for(geometry: Geometry) -> FittedModel:
    model = fitted_model("linear")
    return replace(model, provenance=replace(model.provenance, geometry=geometry))


@pytest.mark.parametrize(
    ("config", "architecture"),
    [(OPT, "OPTForCausalLM"), (LLAMA_31_8B, "LlamaForCausalLM"), (QWEN3_30B_A3B, "Qwen3MoeForCausalLM")],
)
def test_a_cost_model_of_another_shape_is_refused_before_layers_are_made(
    tmp_path: Path, config: dict[str, Any], architecture: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
    engine = EngineArgs(model=str(tmp_path), skip_tokenizer_init=True, max_model_len=512).create_engine_config()
    own = Geometry.from_config(config)
    refuse_other_model(made_for(own), engine)
    refuse_other_model(made_for(replace(own, kv_bytes=1)), engine)  # what a checkpoint may still settle
    refuse_other_model(None, engine)
    for other in (replace(own, layers=own.layers + 1), replace(own, dtype="float8")):
        with pytest.raises(ModelError, match=r": geometry\.(layers|dtype) is .* here, it was measured on"):
            refuse_other_model(made_for(other), engine)


def test_of_other_layers_than_full_attention_only_the_layers_tell(tmp_path: Path) -> None:
    made = FAMILIES["gpt-oss"].config()
    made.dtype = "float32"
    made.save_pretrained(tmp_path)
    engine = EngineArgs(model=str(tmp_path), skip_tokenizer_init=True, max_model_len=512).create_engine_config()
    refuse_other_model(made_for(Geometry.from_config(LLAMA_31_8B)), engine)


HEADS, HEAD = 2, 32


def kv_cache_of(*specs: Any) -> KVCacheConfig:
    return KVCacheConfig(10, [], [KVCacheGroupSpec([f"{spec}.{i}" for i in "ab"], spec) for spec in specs])


def full(heads: int = HEADS, head: int = HEAD, **more: Any) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=16, num_kv_heads=heads, head_size=head, dtype=torch.float32, **more)


def window(heads: int = HEADS, head: int = HEAD) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=16, num_kv_heads=heads, head_size=head, dtype=torch.float32, sliding_window=WINDOW
    )


@pytest.mark.parametrize(
    ("family", "specs", "kept"),
    [
        ("llama", [full()], ""),
        ("llama", [full(head=64)], "256"),
        ("llama", [full(heads=1)], "64"),
        ("llama", [full(head_size_v=16)], "96"),
        ("gpt-oss", [full(), window()], ""),
        ("gpt-oss", [full(heads=1, head=128), window()], "128 or 256"),
    ],
)
def test_costs_are_not_known_where_vllm_keeps_other_heads_than_the_geometry_has(
    family: str, specs: list[Any], kept: str, tmp_path: Path
) -> None:
    """As Gemma 4's layers of full attention, whose heads are twice as wide as those of its windows."""
    made = (PLAIN | FAMILIES)[family].config()
    made.dtype = "float32"
    made.save_pretrained(tmp_path)
    config = EngineArgs(model=str(tmp_path), skip_tokenizer_init=True, max_model_len=512).create_engine_config()
    reason = why_not_priced(config, kv_cache_of(*specs))
    words = f"its configuration tells of 128 values of a token in each layer that attends, vLLM of {kept}"
    assert reason == (words if kept else "")


@pytest.mark.parametrize(
    ("limits", "tokens"),
    [
        ({}, 512),
        ({"max_num_scheduled_tokens": None}, 512),
        ({"max_num_scheduled_tokens": 128}, 128),
        ({"max_num_scheduled_tokens": 1024}, 512),
    ],
    ids=["an older vLLM", "not given", "less", "more"],
)
def test_the_token_budget_is_the_lesser_of_both_limits(limits: dict[str, Any], tokens: int) -> None:
    scheduler: Any = SimpleNamespace(max_num_batched_tokens=512, **limits)
    assert token_budget(scheduler) == tokens


def test_a_recompute_is_priced_in_as_many_chunks_as_vllm_makes_of_it(tmp_path: Path) -> None:
    """By the engine that cost models are checked against, which is in the headers of traces."""
    made = PLAIN["llama"].config()
    made.dtype = "float32"
    made.save_pretrained(tmp_path)
    config = EngineArgs(
        model=str(tmp_path), skip_tokenizer_init=True, max_model_len=512, max_num_batched_tokens=512
    ).create_engine_config()
    settings = Settings.read({"policy": "always-swap"})
    assert engine_spec(config, kv_cache_of(full()), 4096, settings).token_budget == 512
    config.scheduler_config.max_num_scheduled_tokens = 128
    assert engine_spec(config, kv_cache_of(full()), 4096, settings).token_budget == 128


CHUNKED = [name for name in FAMILIES if name.startswith("llama-4")]
OWN_HEADS = "gemma-4"
"""Single layers have heads of their own."""


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in (*CHUNKED, OWN_HEADS)])
def test_a_shape_has_the_weights_of_the_familys_model(name: str) -> None:
    """All matrices of the layers, as transformers makes them; vectors and biases are left out."""
    config = FAMILIES[name].config()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    embedding = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    matrices = [weight for weight in model.parameters() if weight.ndim > 1 and id(weight) not in embedding]
    shape = ModelShape.from_config(config.to_dict() | {"dtype": FAMILIES[name].dtype})
    in_layers = shape.parameters - shape.embedding_parameters
    assert in_layers == pytest.approx(sum(weight.numel() for weight in matrices), rel=0.01)


def test_costs_of_layers_with_heads_of_their_own_are_not_known() -> None:
    with pytest.raises(ConfigError, match="what single layers have of their own is not understood"):
        ModelShape.from_config(FAMILIES[OWN_HEADS].config().to_dict())


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        (OWN_HEADS, {}, r"field (per_layer_config|global_head_dim) is "),
        ("gemma-3", {"num_kv_shared_layers": 2}, "field num_kv_shared_layers is 2: layers that share KV"),
    ],
)
def test_no_price_is_predicted_where_layers_differ_in_size_or_share_kv(
    family: str, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """Beside windows: where vLLM keeps as much in every layer and all attend to everything, costs are measured."""
    made = FAMILIES[family].config()
    made.update({"dtype": "float32"} | changes)
    made.save_pretrained(tmp_path)
    config = EngineArgs(model=str(tmp_path), skip_tokenizer_init=True, max_model_len=512).create_engine_config()
    assert re.match(words, why_not_priced(config, kv_cache_of(full(), window())))


def test_the_page_says_that_layers_which_share_kv_were_not_tested() -> None:
    """Remove the sentence, and the row of the support matrix, once a family of the tests has some."""
    shared = [name for name in FAMILIES if getattr(FAMILIES[name].config(), "num_kv_shared_layers", 0)]
    page = " ".join((ROOT / "docs" / "model-families.md").read_text().split())
    assert not shared and "Swaps of layers that share KV were never tested" in page


@pytest.mark.parametrize("name", CHUNKED)
def test_costs_of_attention_within_chunks_are_not_known(name: str) -> None:
    """Whatever its experts are."""
    fields = FAMILIES[name].config().to_dict()
    without_experts = {name: value for name, value in fields.items() if "moe" not in name and "expert" not in name}
    with pytest.raises(ConfigError, match="attention_chunk_size is 64: attention within chunks is not understood"):
        ModelShape.from_config(without_experts)
