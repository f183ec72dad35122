"""Workloads: the same seed gives the same requests, and their lengths follow the quantiles they are drawn from."""

from __future__ import annotations

import pytest

from kvpolicy.workload import (
    AZURE_CONVERSATION,
    DEEPSEEK_R1,
    SHAREGPT,
    Lengths,
    all_at_once,
    scale_to,
)

ALL = (AZURE_CONVERSATION, SHAREGPT, DEEPSEEK_R1)


def test_same_seed_same_workload() -> None:
    one, other, third = (all_at_once(AZURE_CONVERSATION, 50, seed, 2048) for seed in (3, 3, 4))
    assert one == other
    assert one.requests != third.requests
    assert one.seed == 3


@pytest.mark.parametrize("lengths", ALL, ids=lambda lengths: lengths.name)
def test_requests_fit_the_context(lengths: Lengths) -> None:
    workload = all_at_once(lengths, 2000, 0, 512)
    assert workload.longest_tokens <= 512
    assert min(request.prompt_tokens for request in workload.requests) >= 1
    assert min(request.output_tokens for request in workload.requests) >= 1


def test_scale_brings_the_tails_into_the_context() -> None:
    factor = scale_to(AZURE_CONVERSATION, 2048)
    assert factor == pytest.approx(2048 / (4123 + 610))
    assert scale_to(AZURE_CONVERSATION, 1 << 20) == 1.0
    one = all_at_once(AZURE_CONVERSATION, 100, 0, 1 << 20, scale=1.0)
    half = all_at_once(AZURE_CONVERSATION, 100, 0, 1 << 20, scale=0.5)
    for request, smaller in zip(one.requests, half.requests, strict=True):
        assert smaller.prompt_tokens == pytest.approx(request.prompt_tokens / 2, abs=1)


def test_all_at_once_arrives_at_once() -> None:
    assert {request.arrival_s for request in all_at_once(SHAREGPT, 10, 0, 1024).requests} == {0.0}


def test_a_context_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="context_tokens is 1"):
        all_at_once(SHAREGPT, 1, 0, 1)
