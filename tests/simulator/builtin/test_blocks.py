"""Pools of blocks: keys, the order of eviction, sharing."""

from __future__ import annotations

from kvpolicy.simulator.builtin.blocks import CachingPool, CountedPool, shared_keys
from kvpolicy.simulator.builtin.live_request import LiveRequest
from kvpolicy.workload import Request


def test_keys_follow_from_all_ids_before() -> None:
    one = shared_keys(Request(0.0, 40, 1, prefix=(1, 2, 3, 4), prefix_block_tokens=10), 16)
    same = shared_keys(Request(9.0, 64, 1, prefix=(1, 2, 3, 4), prefix_block_tokens=10), 16)
    other = shared_keys(Request(0.0, 40, 1, prefix=(1, 9, 3, 4), prefix_block_tokens=10), 16)
    assert len(one) == 2 and same == one
    assert other[0] != one[0] and other[1] != one[1]
    late = shared_keys(Request(0.0, 40, 1, prefix=(1, 2, 3, 9), prefix_block_tokens=10), 16)
    assert late[:1] == one[:1] and late[1] != one[1]
    assert shared_keys(Request(0.0, 40, 1), 16) == ()


def test_cached_blocks_go_last_and_tails_first() -> None:
    """Of six free blocks three are taken, two of them full and cached; the partial one is the next to be had."""
    pool = CachingPool(6, 4)
    live = LiveRequest(0, Request(0.0, 10, 5), 0.0, computed=10)
    pool.grow(live, 3)
    pool.cache(live, 10)
    live.preemptions = 1
    pool.release(live, preempted=True)
    assert pool.free == 6 and len(pool.hits(live)) == 2
    other = LiveRequest(1, Request(0.0, 30, 5), 0.0)
    pool.grow(other, 4)
    assert len(pool.hits(live)) == 2
    pool.grow(other, 1)
    assert len(pool.hits(live)) == pool.idle(pool.hits(live)) == 1
    pool.adopt(live, pool.hits(live))
    assert pool.free == 0 and pool.shared(live, 1) == 0 and pool.references == 1


def test_what_was_used_last_goes_last_even_where_nobody_can_look_for_it() -> None:
    """Full blocks of a finished request join the queue behind those of the victim before it."""
    pool = CachingPool(4, 4)
    victim, finished, new = (LiveRequest(number, Request(0.0, 9, 5), 0.0, preemptions=1) for number in range(3))
    for live in (victim, finished):
        pool.grow(live, 2)
        pool.cache(live, 8)
    pool.release(victim, preempted=True)
    pool.release(finished, preempted=False)
    assert len(pool.hits(victim)) == 2
    pool.grow(new, 2)
    assert pool.hits(victim) == []


def test_evicted_blocks_are_noted_and_can_be_foreseen() -> None:
    """Of six blocks three are free and one more has no content; then come the victim's two, its last one first."""
    pool = CachingPool(6, 4)
    live = LiveRequest(0, Request(0.0, 10, 5), 0.0, computed=10)
    pool.grow(live, 3)
    pool.cache(live, 10)
    contents = pool.contents(live, 3)
    blocks = [block for _, block in contents]
    assert [key is None for key, _ in contents] == [False, False, True] and blocks[2] is None
    assert pool.contents(live, 3) == contents and pool.contents(live, 1) == contents[:1]
    pool.release(live, preempted=True)
    assert [pool.unevicting(count, lambda block: block is blocks[0]) for count in (3, 9)] == [3, 5]
    assert pool.unevicting(9, lambda block: False) == 6 and pool.unevicting(9, lambda block: True) == 4
    pool.grow(LiveRequest(1, Request(0.0, 30, 5), 0.0), 5)
    assert [one.block for one in pool.evicted] == [blocks[1]]


def test_what_no_step_has_computed_is_not_found() -> None:
    """Of three blocks cached when a step was to fill the last two of them, the first is left in the cache."""
    pool = CachingPool(6, 4)
    live = LiveRequest(0, Request(0.0, 12, 5), 0.0, computed=5)
    pool.grow(live, 3)
    pool.cache(live, 12)
    live.preemptions = 1
    pool.withdraw(live)
    pool.release(live, preempted=True)
    assert pool.free == 6 and len(pool.hits(live)) == 1 and pool.references == 0
    other = LiveRequest(1, Request(0.0, 24, 5), 0.0)
    pool.grow(other, 5)
    assert len(pool.hits(live)) == 1 and pool.evicted == []


def test_without_prefix_caching_nothing_is_known_of_a_content() -> None:
    pool = CountedPool(6)
    assert pool.contents(LiveRequest(0, Request(0.0, 10, 5), 0.0), 2) == [(None, None)] * 2
    assert pool.unevicting(9, lambda block: True) == 9 and pool.evicted == []


def test_blocks_of_equal_content_are_found_first_come_first() -> None:
    """Two that computed the same prefix at the same time both keep it; the one that got it first is found."""
    pool = CachingPool(8, 4)
    ids = Request(0.0, 9, 5, prefix=(1, 2, 3), prefix_block_tokens=4)
    first, second, third = (LiveRequest(number, ids, 0.0, shared_keys(ids, 4)) for number in range(3))
    for live in (first, second):
        pool.grow(live, 3)
        pool.cache(live, 9)
    assert pool.hits(third) == first.keyed_blocks
    pool.adopt(third, pool.hits(third))
    assert pool.shared(third, 2) == 2 and pool.shared(second, 2) == 0
    pool.release(first, preempted=False)
    assert pool.free == 3 and pool.shared(third, 2) == 0


def test_of_equal_content_the_next_is_found_once_the_first_is_gone() -> None:
    pool = CachingPool(12, 4)
    ids = Request(0.0, 9, 5, prefix=(1, 2, 3), prefix_block_tokens=4)
    first, second, third, fourth, waiting = (LiveRequest(number, ids, 0.0, shared_keys(ids, 4)) for number in range(5))
    for live in (first, second, third, fourth):
        pool.grow(live, 3)
        pool.cache(live, 9)
    pool.withdraw(third)  # from among them
    assert pool.hits(waiting) == first.keyed_blocks
    pool.withdraw(first)
    assert pool.hits(waiting) == second.keyed_blocks
    pool.withdraw(second)
    assert pool.hits(waiting) == fourth.keyed_blocks and len(fourth.keyed_blocks) == 2
    assert pool.references == 2
    pool.withdraw(fourth)
    assert pool.hits(waiting) == [] and pool.references == 0
