"""Model configurations without weights: all that a scheduler asks of a model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 16384,
    "vocab_size": 2048,
    "torch_dtype": "float32",
}
MIXTRAL = LLAMA | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_hidden_layers": 1,
    "num_local_experts": 2048,
    "num_experts_per_tok": 2,
}
"""As many experts as there are tokens and positions, so that a choice of experts can name both."""


def write_llama(folder: Path) -> Path:
    """Write the configuration to ``folder`` and return it; processes that share the folder may do so at once."""
    return _write(folder, LLAMA)


def write_mixtral(folder: Path) -> Path:
    """As :func:`write_llama`."""
    return _write(folder, MIXTRAL)


def _write(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f".config-{os.getpid()}"
    unfinished.write_text(json.dumps(config))
    unfinished.replace(folder / "config.json")
    return folder
