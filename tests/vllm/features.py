"""What an engine or a request may have beside plain attention, each on a small model with random weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.vllm import families

DRAFTED = 3
"""Tokens drafted at a time."""
RANK = 8
LAYERS, HIDDEN = 4, 128
"""Of the Llama that adapters and drafters are made for."""


@dataclass(frozen=True, slots=True)
class Feature:
    """Something that an engine has from its start."""

    family: str
    engine: dict[str, Any] = field(default_factory=dict)
    """Engine arguments."""
    prepare: Callable[[Path, Path], dict[str, Any]] | None = None
    """Writes what the engine needs besides its model to a folder, or changes the model; returns engine arguments. Given
    that folder and the model's."""
    slow: bool = False
    """Whether it is left to the long suite."""
    drafts: bool = False
    tolerance: float = 0.0
    """By how much log-probabilities may differ after a swap."""


def budget_of(feature: Feature) -> dict[str, Any]:
    """The engine argument by which a step holds the longest prompt, where vLLM may compute it whole, as with latent
    attention on a CPU without AMX: with drafts it does not raise the budget to that by itself."""
    whole = feature.drafts and (families.PLAIN | families.FAMILIES)[feature.family].feature == "MLA"
    return {"max_num_batched_tokens": 640} if whole else {}


def of_ngrams() -> dict[str, Any]:
    """What was said once is drafted whenever its first token comes again."""
    drafted = {"method": "ngram", "num_speculative_tokens": DRAFTED, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    return {"speculative_config": drafted}


def itself_as_drafter(folder: Path, model: Path) -> dict[str, Any]:
    """The same model drafts, so that all that it drafts is accepted, as long as its own KV is right."""
    return {"speculative_config": _drafted_by("draft_model", model)}


def eagle_head(folder: Path, model: Path) -> dict[str, Any]:
    """A head of one layer with random weights: it drafts, and is hardly ever right."""
    drafter = families.make("llama", folder / "eagle", seed=1)
    config = json.loads((drafter / "config.json").read_text())
    (drafter / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    weights = {name.removeprefix("model."): tensor for name, tensor in load_file(drafter / "model.safetensors").items()}
    layer = {name: tensor for name, tensor in weights.items() if name.startswith("layers.0.")}
    del layer["layers.0.input_layernorm.weight"]
    drawn = torch.Generator().manual_seed(2)
    layer["fc.weight"] = torch.randn(HIDDEN, 2 * HIDDEN, generator=drawn) * families.SPREAD
    save_file(layer, drafter / "model.safetensors", {"format": "pt"})
    return {"speculative_config": _drafted_by("eagle", drafter)}


def eagle3_head(folder: Path, model: Path) -> dict[str, Any]:
    """As :func:`eagle_head`, over what three layers of the model come to, with an output layer of its own. Its layer
    reads that beside the last token, so that its queries, keys and values are of both."""
    drafter = families.make("llama", folder / "eagle3", seed=1)
    config = json.loads((drafter / "config.json").read_text())
    seen = {"num_hidden_layers": 1, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}
    (drafter / "config.json").write_text(json.dumps(config | seen))
    weights = {name.removeprefix("model."): tensor for name, tensor in load_file(drafter / "model.safetensors").items()}
    head = {"lm_head.weight": weights["lm_head.weight"], "norm.weight": weights["norm.weight"]}
    layer = {name.replace("layers.0.", "midlayer."): weights[name] for name in weights if name.startswith("layers.0.")}
    layer["midlayer.hidden_norm.weight"] = torch.ones(HIDDEN)
    drawn = torch.Generator().manual_seed(2)
    for name in ("q", "k", "v"):
        path = f"midlayer.self_attn.{name}_proj.weight"
        layer[path] = torch.randn(len(layer[path]), 2 * HIDDEN, generator=drawn) * families.SPREAD
    layer["fc.weight"] = torch.randn(HIDDEN, 3 * HIDDEN, generator=drawn) * families.SPREAD
    save_file(head | layer, drafter / "model.safetensors", {"format": "pt"})
    return {"speculative_config": _drafted_by("eagle3", drafter)}


def further_layer(folder: Path, model: Path) -> dict[str, Any]:
    """A layer of the model's own that drafts, as MiMo has one: multi-token prediction."""
    config = json.loads((model / "config.json").read_text())
    config |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (model / "config.json").write_text(json.dumps(config))
    weights, own = load_file(model / "model.safetensors"), "model.mtp_layers.0."
    first = {name: tensor.clone() for name, tensor in weights.items() if name.startswith("model.layers.0.")}
    weights |= {name.replace("model.layers.0.", own): tensor for name, tensor in first.items()}
    weights |= {f"{own}{name}_layernorm.weight": torch.ones(HIDDEN) for name in ("token", "hidden", "final")}
    drawn = torch.Generator().manual_seed(2)
    weights[f"{own}input_proj.weight"] = torch.randn(HIDDEN, 2 * HIDDEN, generator=drawn) * families.SPREAD
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    return {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}


def further_latent_layer(folder: Path, model: Path) -> dict[str, Any]:
    """A layer with latent attention that drafts, as DeepSeek V3 has one."""
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    weights, last, own = load_file(model / "model.safetensors"), "model.layers.1.", "model.layers.2."
    weights |= {name.replace(last, own): weights[name].clone() for name in [*weights] if name.startswith(last)}
    weights |= {f"{own}{name}.weight": torch.ones(HIDDEN).bfloat16() for name in ("enorm", "hnorm", "shared_head.norm")}
    shared = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
    weights |= {f"{own}{name}.weight": weights[f"{of}.weight"].clone() for name, of in shared.items()}
    drawn = torch.Generator().manual_seed(2)
    weights[f"{own}eh_proj.weight"] = (torch.randn(HIDDEN, 2 * HIDDEN, generator=drawn) * families.SPREAD).bfloat16()
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    return {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}


def _drafted_by(method: str, drafter: Path) -> dict[str, Any]:
    return {"method": method, "model": str(drafter), "num_speculative_tokens": DRAFTED}


def adapter(folder: Path, seed: int) -> Path:
    """Write a LoRA adapter of the Llama, wide enough that greedy text is another one with it."""
    folder.mkdir(parents=True)
    drawn = torch.Generator().manual_seed(seed)
    widths = {"q_proj": HIDDEN, "v_proj": HIDDEN // 2}
    weights = {}
    for layer in range(LAYERS):
        for name, width in widths.items():
            path = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{path}.lora_A.weight"] = torch.randn(RANK, HIDDEN, generator=drawn) * families.SPREAD
            weights[f"{path}.lora_B.weight"] = torch.randn(width, RANK, generator=drawn) * families.SPREAD
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": [*widths], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


PADDED = 1e-5
"""In the step in which a request comes back vLLM fills up its drafts with ones that are rejected. Where a step computes
a single token as a rule, that one is computed together with others, and comes out different in its last bits."""
ADAPTERS = {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK, "max_cpu_loras": 2}
ENGINES: dict[str, Feature] = {
    "fp8 KV cache": Feature("llama", {"kv_cache_dtype": "fp8"}),
    "fp8 KV cache, e5m2": Feature("llama", {"kv_cache_dtype": "fp8_e5m2"}, slow=True),
    "fp8 KV cache, windows": Feature("gpt-oss", {"kv_cache_dtype": "fp8"}, slow=True),
    "MoE, Mixtral": Feature("mixtral"),
    "MoE, Qwen 3": Feature("qwen3-moe", slow=True),
    "speculation by ngram": Feature("llama", of_ngrams(), slow=True, drafts=True, tolerance=PADDED),
    "speculation by ngram, windows": Feature("gpt-oss", of_ngrams(), slow=True, drafts=True, tolerance=PADDED),
    "speculation by a draft model": Feature("llama", prepare=itself_as_drafter, drafts=True),
    "speculation by EAGLE": Feature("llama", prepare=eagle_head, slow=True, drafts=True),
    "speculation by EAGLE-3": Feature("llama", prepare=eagle3_head, slow=True, drafts=True),
    "speculation by MTP": Feature("qwen2", prepare=further_layer, slow=True, drafts=True),
    "speculation by MTP on MLA": Feature("deepseek-v3", prepare=further_latent_layer, slow=True, drafts=True),
}
"""By name; up to the first comma it is that of the support matrix."""


def feature_of(name: str) -> str:
    """The feature of the support matrix that an entry backs."""
    return name.partition(",")[0]
