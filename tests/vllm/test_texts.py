"""Prompts for the simulator: equal where the ids are equal."""

from __future__ import annotations

import pytest

from kvpolicy.workload import Request
from kvpolicy_vllm.simulator.texts import prompt_of, token_at

pytestmark = pytest.mark.scheduler


def test_prompts_share_what_their_ids_say_and_nothing_else() -> None:
    first = Request(0.0, 50, 5, prefix=(7, 8, 9), prefix_block_tokens=16)
    second = Request(0.0, 60, 5, prefix=(7, 8, 5), prefix_block_tokens=16)
    one, other = prompt_of(first, 0), prompt_of(second, 1)
    assert len(one) == 50 and len(other) == 60
    assert one[:32] == other[:32] and not set(one[32:]) & set(other[32:])
    assert token_at(first, 0, 50) not in {*one, *other} and token_at(first, 0, 50) != token_at(second, 1, 50)
    assert [token_at(first, 0, at) for at in range(50)] == one, "ids first, then the request's own"


def test_an_answer_has_the_tokens_of_the_turn_that_repeats_it() -> None:
    turn = Request(0.0, 20, 30, prefix=(7, 8, 9), prefix_block_tokens=16)
    again = prompt_of(Request(0.0, 60, 5, prefix=(7, 8, 9), prefix_block_tokens=16), 1)
    assert [token_at(turn, 0, at) for at in range(20, 48)] == again[20:48]
    assert token_at(turn, 0, 48) != again[48]


def test_part_of_a_prefix_is_shared_too() -> None:
    prompt = prompt_of(Request(0.0, 50, 5, prefix=(7, 8, 9), prefix_block_tokens=16), 0)
    partly = prompt_of(Request(0.0, 20, 5, prefix=(7, 8), prefix_block_tokens=16), 2)
    assert partly == prompt[:20]


def test_blocks_of_another_size_share_nothing() -> None:
    """Ids mean blocks of their own size: the first id of both stands for other tokens."""
    small = prompt_of(Request(0.0, 64, 5, prefix=(0, 1, 2, 3), prefix_block_tokens=16), 0)
    large = prompt_of(Request(0.0, 64, 5, prefix=(0, 1), prefix_block_tokens=32), 1)
    assert not set(small) & set(large)
