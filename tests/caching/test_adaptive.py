"""The choices of ARC and S3-FIFO, worked by hand; what every policy promises is in test_by_use.py."""

from __future__ import annotations

from kvpolicy.caching.adaptive import Arc, S3Fifo
from tests.caching.test_by_use import serve


def test_arc_gives_the_list_more_room_whose_blocks_were_missed() -> None:
    """Blocks used again stay while one-time blocks pass; a one-time block that is missed soon grows their share."""
    policy = Arc(4)
    for chain in ("ab", "ab"):
        serve(policy, chain)
    assert [serve(policy, chain) for chain in "cdef"] == ["", "", "c", "d"]
    assert policy.hits("ab") == 2
    assert serve(policy, "d") == "e"  # asked for after it went: the share of the one-time blocks is 1 now
    assert serve(policy, "g") == "b"


def test_a_block_that_is_gone_moves_the_share_of_arc_once_however_often_it_is_asked_for() -> None:
    """The device may have it, so that it is not stored again."""
    policy = Arc(4)
    for chain in ("ab", "ab", "c", "d", "e", "f"):
        serve(policy, chain)
    for _ in range(3):
        policy.asked("d", 0)
    assert policy._share == 1.0
    policy.stored("d", [0])
    assert not policy._returning and "d" in policy._again


def test_a_tie_of_arc_is_decided_by_what_room_is_made_for() -> None:
    """Of two that were used once, which is their share, one goes for a block that was used again and given up."""
    for newcomer, gone in (("x", "b"), ("r", "e")):
        policy = Arc(4)
        policy.stored("de", [0, 1])
        policy.stored("ab", [0, 1])
        policy.asked("ab", 2)
        policy._share, policy._gone_again["r"] = 2.0, None
        assert policy.make_room(1, (), [newcomer]) == [gone]


def test_arc_remembers_no_more_than_the_paper_does_after_a_store() -> None:
    """Those in the first list and those that have left it are as many as there may be blocks."""
    policy = Arc(4)
    for chain in "abcd":
        serve(policy, chain)
    policy.evict(4, ())
    assert len(policy._gone_once) == 4
    policy.stored("x", [0])
    assert [*policy._gone_once] == ["b", "c", "d"]


def test_s3fifo_evicts_from_the_small_queue_while_it_has_a_tenth() -> None:
    policy = S3Fifo(20)
    policy.stored("ab", [0, 1])
    policy.asked("a", 1)
    policy.asked("a", 1)
    assert policy.evict(1, ()) == ["b"] and "a" in policy._small
    policy.stored("xyz", [0, 1, 2])
    assert policy.evict(1, ()) == ["z"] and "a" in policy._main
    assert policy.evict(1, ()) == ["y"], "one of two is a tenth"
    assert policy.evict(1, ()) == ["a"], "one of twenty is less"


def test_s3fifo_remembers_as_many_as_its_main_queue_has() -> None:
    policy = S3Fifo(10)
    policy.stored([*range(10)], [*range(10)])
    policy.evict(10, ())
    assert [*policy._gone] == [*range(8, -1, -1)]


def test_s3_fifo_gives_up_what_was_used_once_before_what_was_used_again() -> None:
    policy = S3Fifo(10)
    for chain in ("a", "b", "a", "a"):
        serve(policy, chain)
    assert [serve(policy, chain) for chain in "cdefghij"] == [""] * 8
    assert serve(policy, "k") == "b"  # a, used again, went to the main queue
    assert serve(policy, "b") == "c" and serve(policy, "l") == "d"
    assert "b" in policy and "a" in policy


def test_s3fifo_forgets_blocks_that_are_lost_before_anything_is_evicted() -> None:
    policy = S3Fifo(4)
    policy.stored(["a", "b"], [0, 1])
    for number in range(1000):
        policy.stored([number], [0])
        policy.lost(number)
    assert sum(len(queue._heap) for queue in policy._queues) <= 65
    policy.stored(["a2"], [0])
    assert policy.evict(3, ()) == ["b", "a", "a2"]


def test_s3fifo_gives_a_block_that_was_lost_and_returns_a_place_behind_the_others() -> None:
    policy = S3Fifo(4)
    policy.stored(["a"], [0])
    policy.stored(["b"], [0])
    policy.lost("a")
    policy.stored(["a"], [0])
    assert policy.evict(2, ()) == ["b", "a"]
