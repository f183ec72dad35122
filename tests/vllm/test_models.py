"""Models and tokenizers made for tests and demos."""

from __future__ import annotations

import hashlib
from pathlib import Path

from kvpolicy_vllm.bench.models import VOCABULARY, make_llama, make_tokenizer


def test_the_model_is_the_same_from_the_same_seed(tmp_path: Path) -> None:
    digests = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        folder = make_llama(tmp_path / name, seed)
        digests.append(hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest())
    assert digests[0] == digests[1] != digests[2]


def test_the_tokenizer_covers_all_texts() -> None:
    tokenizer = make_tokenizer()
    assert len(tokenizer) == VOCABULARY
    for text in ("Hello world, what is swapped comes back.", "ça va?\n\t你好", ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("hello world")) < len("hello world")
    assert all(isinstance(tokenizer.decode([token]), str) for token in range(VOCABULARY))
