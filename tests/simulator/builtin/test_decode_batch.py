"""The decode batch: blocks and ends by its clock, counts of a member when it leaves."""

from __future__ import annotations

import random

import pytest

from kvpolicy.simulator.builtin.blocks import CountedPool
from kvpolicy.simulator.builtin.decode_batch import DecodeBatch, LongestGaps
from kvpolicy.simulator.builtin.live_request import LiveRequest
from kvpolicy.workload import Request


def member(turn: int, prompt_tokens: int, output_tokens: int, pool: CountedPool) -> LiveRequest:
    """A request whose prompt is computed and whose first token is known."""
    live = LiveRequest(turn, Request(0.0, prompt_tokens, output_tokens), 0.0, outputs=1, computed=prompt_tokens)
    live.turn = turn
    pool.grow(live, -(-prompt_tokens // 4))
    return live


def test_blocks_are_taken_when_they_fill_and_requests_leave_at_their_end() -> None:
    """Blocks of 4 tokens: 7 computed tokens need a block at the second step, 4 at the first."""
    pool = CountedPool(20)
    batch = DecodeBatch(4, 0)
    first, second = member(0, 7, 4, pool), member(1, 4, 3, pool)
    batch.join(first)
    batch.join(second)
    assert (len(batch), batch.read_tokens, batch.next_end(), batch.missing_blocks()) == (2, 11, 2, 1)
    batch.step(pool)
    assert (first.held, second.held, batch.missing_blocks(), batch.read_tokens) == (2, 2, 1, 13)
    batch.step(pool)
    assert batch.pop_finished(pool) == [second]
    assert (second.computed, second.outputs, second.placeholders) == (6, 3, 0)
    assert (first.held, len(batch), batch.read_tokens, batch.next_end()) == (3, 1, 9, 1)
    batch.step(pool)
    assert batch.pop_finished(pool) == [first] and (first.computed, first.outputs) == (10, 4)


@pytest.mark.parametrize(("free_blocks", "steps"), [(0, 0), (1, 1), (2, 4), (3, 5), (4, 8), (100, 10)])
def test_free_blocks_suffice_for_so_many_steps(free_blocks: int, steps: int) -> None:
    """One member takes a block at steps 1, 5 and 9, the other at steps 2, 6 and 10."""
    pool = CountedPool(20)
    batch = DecodeBatch(4, 0)
    batch.join(member(0, 4, 50, pool))
    batch.join(member(1, 7, 50, pool))
    assert batch.steps_within(free_blocks, 10) == steps


def test_a_token_in_flight_is_no_known_output() -> None:
    pool = CountedPool(20)
    batch = DecodeBatch(4, 1)
    live = member(0, 6, 9, pool)
    batch.join(live)
    batch.step(pool)
    batch.step(pool)
    assert list(batch.dissolve(pool)) == [live]
    assert (live.computed, live.outputs, live.placeholders, live.in_flight) == (8, 2, 1, 1)
    assert (len(batch), batch.read_tokens) == (0, 0)


def test_the_longest_gap_since_some_time() -> None:
    rng, gaps, steps, now_s = random.Random(0), LongestGaps(), [], 0.0
    for _ in range(300):
        gap_s = rng.choice((1.0, 1.0, rng.uniform(0.5, 9.0)))
        now_s += gap_s
        gaps.add(now_s, gap_s)
        steps.append((now_s, gap_s))
    assert len(gaps._gaps_s) < 100
    for began_s in (0.0, *(end_s for end_s, _ in steps)):
        assert gaps.after(began_s) == max((gap_s for end_s, gap_s in steps if end_s > began_s), default=0.0)
