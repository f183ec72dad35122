"""vLLM's own configuration classes with all of their fields, of which only those that are given have a value."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm.config import (
    AttentionConfig,
    CacheConfig,
    CompilationConfig,
    KernelConfig,
    LoadConfig,
    ModelConfig,
    MultiModalConfig,
    ParallelConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.config.compilation import PassConfig

PARTS = {
    "model_config": ModelConfig, "cache_config": CacheConfig, "parallel_config": ParallelConfig,
    "load_config": LoadConfig, "attention_config": AttentionConfig, "kernel_config": KernelConfig,
}  # fmt: skip


def bare(kind: type[Any], **values: Any) -> Any:
    """Without what vLLM checks and fills in."""
    made = object.__new__(kind)
    for field in fields(kind):
        setattr(made, field.name, values.get(field.name))
    return made


def bare_config(model: Path | str, **more: Any) -> Any:
    """Of a server of the model in this folder. ``more``: values by the names of their fields, whichever class has
    them."""
    given = {
        "model": str(model), "dtype": "float16", "seed": 0, "max_model_len": 4096, "load_format": "auto",
        "cache_dtype": "auto", "prefix_caching_hash_algo": "sha256", "hf_config": model_of(1e4),
        "compilation_config": bare(CompilationConfig, pass_config=bare(PassConfig)),
    }  # fmt: skip
    given |= more
    parts = {name: bare(kind, **given) for name, kind in PARTS.items()}
    return bare(VllmConfig, **parts | given)


def model_of(rope_theta: float) -> Any:
    """A model's configuration, of which its positions matter."""
    return SimpleNamespace(to_dict=lambda: {"rope_theta": rope_theta})


def drafting(model: Path | str, **more: Any) -> Any:
    """Settings of speculation by a model of its own."""
    drafter = bare(ModelConfig, model=str(model), hf_config=model_of(1e4))
    return bare(SpeculativeConfig, method="draft_model", draft_model_config=drafter, **more)


def multimodal() -> Any:
    return bare(MultiModalConfig)
