"""States that an engine is brought to before it is measured."""

from __future__ import annotations

import random
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
from kvpolicy_vllm.bench.states import (
    Span,
    State,
    check_states,
    free_blocks_for,
    grid,
    running_for,
    waiting_prompt_tokens,
)

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


SPAN = Span(64, 1500, 7, 6000, 4096)


def test_a_grid_spreads_over_everything_it_is_to_cover() -> None:
    states = grid(32, 24, SPAN, random.Random(0))
    assert len({state.state_id for state in states}) == 24
    assert sum(state.cause == "memory" for state in states) * 2 >= 24 + len(check_states(32, SPAN))
    assert {len(state.other_prompts) for state in states} == set(range(8))
    lengths = sorted(state.prompt_tokens + state.decoded_tokens for state in states)
    assert lengths[0] < 80
    assert lengths[-1] > 1200
    assert len({state.spare_blocks for state in states}) >= 3
    assert any(state.waiting for state in states)
    assert all(sum(state.other_prompts) <= SPAN.max_batch_tokens for state in states)


def test_a_grid_shares_prompts_in_every_degree_and_no_more_than_another_request_has() -> None:
    """A shared block is a full one of both prompts, before the last token, which is always computed."""
    for size in (32, 64):
        states = grid(size, 40, SPAN, random.Random(size))
        sharing = [state for state in states if state.shared_blocks]
        assert 40 / 4 <= len(sharing) <= 40 * 3 / 5
        for state in sharing:
            assert state.shared_blocks * size < min(state.prompt_tokens, state.other_prompts[0])
            assert state.shared_blocks * size <= 0.75 * state.prompt_tokens + 1
        shares = sorted(state.shared_blocks * size / state.prompt_tokens for state in sharing)
        assert shares[0] < 0.3 and shares[-1] > 0.5
        assert {state.cause for state in sharing} == {"memory", "forced"}


def test_a_grid_queues_copies_in_both_directions_and_has_victims_in_host_memory() -> None:
    states = grid(32, 40, SPAN, random.Random(0))
    for direction in ("save", "load"):
        sizes = [getattr(state, f"queued_{direction}_share") for state in states]
        assert [sizes.count(share) for share in (0.0, 0.5, 1.0)] == [24, 8, 8]
    assert len({(state.queued_save_share, state.queued_load_share) for state in states}) > 5, "not together"
    assert sum(state.stored for state in states) == 10
    for state in states:
        most = max(state.queued_save_share, state.queued_load_share) * state.victim_blocks
        assert most <= state.tool_blocks < most + 1
        alone = replace(state, queued_save_share=0.0, queued_load_share=0.0)
        assert state.device_blocks == alone.device_blocks + state.tool_blocks
    assert not any(s.queued_save_share or s.queued_load_share or s.stored for s in check_states(32, SPAN))


def test_a_forced_overflow_has_several_victims_where_others_run() -> None:
    states = grid(32, 60, SPAN, random.Random(0))
    counts = [state.victims for state in states if state.cause == "forced"]
    assert set(counts) >= {1, 2, 4} and counts.count(1) < 0.6 * len(counts)
    for state in states:
        assert 1 <= state.victims <= max(1, len(state.other_prompts))
        assert state.cause == "forced" or state.victims == 1


def test_a_request_alone_shares_nothing() -> None:
    alone = grid(32, 40, replace(SPAN, max_others=0), random.Random(0))
    assert not any(state.shared_blocks for state in alone)


def test_a_grid_depends_on_its_seed_alone() -> None:
    assert grid(32, 24, SPAN, random.Random("a")) == grid(32, 24, SPAN, random.Random("a"))
    assert grid(32, 24, SPAN, random.Random("a")) != grid(32, 24, SPAN, random.Random("b"))


@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_nobody_who_waits_would_fit_during_a_window(size: int) -> None:
    for state in grid(size, 40, SPAN, random.Random(size)):
        free_at_most = state.victim_blocks + state.growth_blocks + state.spare_blocks
        assert not state.waiting or free_at_most < waiting_prompt_tokens(SPAN.model_tokens) / size


def test_a_state_survives_being_written_down() -> None:
    for state in grid(64, 8, SPAN, random.Random(1)):
        assert State.from_dict(state.to_dict()) == state
