"""A small model on a GPU that has a data sheet."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from kvpolicy.study.config import Criterion, Run, Serving

SOURCE = """
from kvpolicy import Policy

LIMIT = 300

class Rule(Policy):
    name = "rule"

    def probabilities(self, situation, options, state):
        swap = len(options) > 1 and situation.computed_tokens > LIMIT
        return [1.0 - swap, float(swap)][: len(options)]
"""


CONFIG = {
    "model_type": "llama",
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 4096,
    "vocab_size": 32000,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def hardware(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return f"H100-SXM:{tmp_path / 'config.json'}"


def grouped(**given: Any) -> dict[str, Any]:
    """Arguments of a study, each field of how it is served, run and judged put where it belongs."""
    for name, kind in (("serving", Serving), ("run", Run), ("criterion", Criterion)):
        mine = {field.name: given.pop(field.name) for field in fields(kind) if field.name in given}
        given |= {name: kind(**mine)} if mine else {}
    return given


@pytest.fixture
def rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    file = tmp_path / "modules" / "changing_rule.py"
    file.parent.mkdir()
    file.write_text(SOURCE)
    monkeypatch.syspath_prepend(file.parent)
    yield file
    sys.modules.pop("changing_rule", None)
