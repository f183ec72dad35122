"""States that an engine is brought to before it is measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpolicy.overflow import EVICTED_TOKENS, figure_and_level
from kvpolicy_vllm.bench.reach import (
    FULL_CPU,
    FULL_DEVICE,
    QUICK,
    Reach,
    study_states,
)
from kvpolicy_vllm.bench.states import free_blocks_for, running_for

REACHES = (QUICK, FULL_CPU, FULL_DEVICE)


@pytest.mark.parametrize("more", [0, 1, 7])
@pytest.mark.parametrize(("victims", "blocks_each"), [(1, 4), (2, 1), (3, 2), (8, 4)])
def test_so_many_free_blocks_make_so_many_victims(victims: int, blocks_each: int, more: int) -> None:
    """vLLM's rule played through: whoever finds no block has the last one go, whose blocks are then free."""

    def evicted(running: int, free: int) -> int:
        gone, at = 0, 0
        while at < running - gone:
            if free:
                free, at = free - 1, at + 1
            else:
                free, gone = free + blocks_each, gone + 1
        return gone

    running = running_for(victims, blocks_each) + more
    free = free_blocks_for(victims, running, blocks_each)
    assert free == more and evicted(running, free) == victims
    assert evicted(running, free + 2) < victims
    assert free_blocks_for(victims, running - more - 1, blocks_each) < 0


@pytest.mark.parametrize("reach", REACHES)
def test_overflows_of_several_victims_are_all_beside_as_many_requests_as_the_largest_wants(reach: Reach) -> None:
    states = study_states(reach, EVICTED_TOKENS, 32)
    assert [(state.victims, figure_and_level(state.state_id)) for state in states] == [
        (count, (EVICTED_TOKENS, count)) for count in reach.victims
    ]
    (running,) = {1 + len(state.other_prompts) for state in states}
    assert running == running_for(max(reach.victims), reach.victim_tokens // 32)
    with pytest.raises(ValueError, match="victim_tokens is 100, should be whole blocks of 32"):
        study_states(replace(reach, victim_tokens=100), EVICTED_TOKENS, 32)
