"""Prompts that vLLM computes whole have room in a step, or are refused with what gives them room."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvpolicy_vllm.plugin.prompt_room import longer_than_a_step


def configured(chunks: bool, drafts: Any = None, **scheduler: Any) -> Any:
    return SimpleNamespace(
        speculative_config=drafts,
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
    ids=["chunks", "room", "no limit", "an older vLLM"],
)
def test_prompts_that_have_room(config: Any) -> None:
    assert longer_than_a_step(config) == ""


def test_a_prompt_that_has_none_beside_drafts() -> None:
    """Either flag may be what limits."""
    problem = longer_than_a_step(configured(False, drafts="mtp", max_num_scheduled_tokens=511))
    assert "beside drafts at most 511 tokens in a step" in problem and "\n" not in problem
    assert problem.endswith(
        "Give --max-num-batched-tokens 512, or --max-num-scheduled-tokens 512 where that flag is given, or a "
        "--max-model-len of at most 511"
    )


def test_a_prompt_that_has_none_without_drafts() -> None:
    """There is a limit only where the flag gives it."""
    problem = longer_than_a_step(configured(False, max_num_scheduled_tokens=511))
    assert "whole here, and at most 511 tokens in a step" in problem and "batched" not in problem
    assert problem.endswith("Give --max-num-scheduled-tokens 512, or a --max-model-len of at most 511")
