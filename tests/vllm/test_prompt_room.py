"""Prompts that vLLM computes whole have room in a step, or are refused with what gives them room."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvpolicy_vllm.plugin.prompt_room import longer_than_a_step


def configured(chunks: bool, **scheduler: Any) -> Any:
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(enable_chunked_prefill=chunks, **scheduler),
        model_config=SimpleNamespace(max_model_len=512),
    )


@pytest.mark.parametrize(
    "config",
    [
        configured(True, max_num_scheduled_tokens=128),
        configured(False, max_num_scheduled_tokens=512),
        configured(False, max_num_scheduled_tokens=None),
        configured(False),
    ],
    ids=["chunks", "room", "no drafts", "an older vLLM"],
)
def test_prompts_that_have_room(config: Any) -> None:
    assert longer_than_a_step(config) == ""


def test_a_prompt_that_has_none() -> None:
    problem = longer_than_a_step(configured(False, max_num_scheduled_tokens=511))
    assert "at most 511 tokens in a step" in problem and "\n" not in problem
    assert problem.endswith("Give --max-num-batched-tokens 512, or a --max-model-len of at most 511")
