"""Models of known shapes without weights: a configuration and a small tokenizer, for ``load_format="dummy"``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from kvpolicy_vllm.bench.models import BOS, EOS, SPECIAL, make_tokenizer


@dataclass(frozen=True, slots=True)
class Geometry:
    """A Llama architecture."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context_tokens: int

    @property
    def kv_token_bytes(self) -> int:
        """In 16 bits."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


ONE_B = Geometry("llama-1b", 2048, 8192, 16, 32, 8, 64, 128256, 131072)
"""Llama-3.2-1B's."""
EIGHT_B = Geometry("llama-8b", 4096, 14336, 32, 32, 8, 128, 128256, 131072)
"""Llama-3.1-8B's."""
SEVEN_B_MHA = Geometry("llama-7b-mha", 4096, 11008, 32, 32, 32, 128, 32000, 131072)
"""Yarn-Llama-2-7B-128k's: as many KV heads as heads."""
TINY = Geometry("llama-tiny", 128, 256, 2, 4, 2, 32, 2048, 16384)
"""To try programs out without a GPU."""

GEOMETRIES = (EIGHT_B, ONE_B, SEVEN_B_MHA)


def write_model(folder: Path, geometry: Geometry, dtype: str) -> Path:
    """Configuration and tokenizer in ``folder``; positions beyond what such a model was trained for do no harm here."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": geometry.hidden,
        "intermediate_size": geometry.intermediate,
        "num_hidden_layers": geometry.layers,
        "num_attention_heads": geometry.heads,
        "num_key_value_heads": geometry.kv_heads,
        "head_dim": geometry.head_dim,
        "vocab_size": geometry.vocabulary,
        "max_position_embeddings": geometry.context_tokens,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "torch_dtype": dtype,
        "bos_token_id": SPECIAL.index(BOS),
        "eos_token_id": SPECIAL.index(EOS),
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    make_tokenizer(geometry.context_tokens).save_pretrained(folder)
    return folder
