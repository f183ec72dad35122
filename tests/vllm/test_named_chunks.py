"""What is kept of the chunks that vLLM names for a request."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("vllm.v1.kv_offload.tiering.backpressure", reason="tiers of this vLLM have another interface")

from vllm.v1.kv_offload.base import OffloadKey, ReqContext, get_offload_group_idx, make_offload_key

from kvpolicy_vllm.named_chunks import Asked, by_group

pytestmark = pytest.mark.scheduler

SIZES = (16, 48)
"""Tokens of a chunk, by KV cache group."""
HASHED = 4
"""Tokens of a hash: a prompt may go on at each of these ends within a block."""


def key_of(group: int, end: int) -> OffloadKey:
    """Of the chunk of one and the same prompt that ends at this token."""
    return make_offload_key(f"up to {end}".encode(), group)


def name_chunks(request: ReqContext, tokens: int) -> None:
    """As vLLM does once a request has so many tokens: group by group, each in its order."""
    for group, size in enumerate(SIZES):
        for end in range(size, tokens + 1, size):
            request.set_offload_key_position(key_of(group, end), end)


def name_ends(request: ReqContext, chunk: int) -> None:
    """As vLLM does where it looks for a hit that ends within this chunk of the first group: the last end first."""
    for end in range(SIZES[0] * (chunk + 1) - HASHED, SIZES[0] * chunk, -HASHED):
        for group in range(len(SIZES)):
            request.set_offload_key_position(key_of(group, end), end)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_kept_is_in_the_order_of_tokens_whenever_it_was_named(seed: int) -> None:
    draw, request, tokens = random.Random(seed), ReqContext("r"), 0
    for _ in range(12):
        tokens += draw.randrange(100)
        name_chunks(request, tokens)
        if draw.random() < 0.5:
            name_ends(request, draw.randrange(1 + tokens // SIZES[0]))
        named, asked = request._offload_key_positions, Asked.of(request)
        for group in range(len(SIZES)):
            expected = sorted((key for key in named if get_offload_group_idx(key) == group), key=named.__getitem__)
            assert asked.of_group(group).keys == expected
            assert [asked.place(key) for key in expected] == [*range(len(expected))]


def test_a_part_is_of_its_group_and_begins_with_the_chunk_before() -> None:
    request = ReqContext("r")
    name_chunks(request, 96)
    small, large = (Asked.of(request).of_group(group) for group in (0, 1))
    assert small.part([key_of(0, 48), key_of(0, 80)]) == tuple(key_of(0, end) for end in (32, 48, 64, 80))
    assert small.part([key_of(0, 48)]).first == 1
    assert large.part([key_of(1, 96)]) == (key_of(1, 48), key_of(1, 96)) and large.part([key_of(1, 96)]).first == 0
    assert large.part([key_of(1, 48)]) == (key_of(1, 48),), "nothing is before it"


def test_of_what_vllm_has_not_named_a_part_has_nothing_else() -> None:
    request = ReqContext("r")
    name_chunks(request, 32)
    asked = Asked.of(request)
    unnamed = [key_of(0, 32), key_of(0, 48)]
    assert asked.of_group(0).part(unnamed) == (*unnamed,) and asked.of_group(0).part(unnamed).first == 0
    assert asked.of_group(1).part([key_of(1, 48)]) == (key_of(1, 48),) and asked.place(key_of(1, 48)) == 0
    name_chunks(request, 48)
    assert Asked.of(request) is asked and asked.of_group(0).part(unnamed).first == 0
    assert asked.of_group(0).part(unnamed) == (key_of(0, 16), *unnamed) and asked.place(key_of(0, 48)) == 2


def test_the_keys_of_a_job_come_by_group_in_the_order_of_tokens() -> None:
    """vLLM passes them as a set."""
    request = ReqContext("r")
    name_chunks(request, 96)
    job = [key_of(1, 96), key_of(0, 64), key_of(1, 48), key_of(0, 16)]
    assert by_group(job, request) == {1: [key_of(1, 48), key_of(1, 96)], 0: [key_of(0, 16), key_of(0, 64)]}
