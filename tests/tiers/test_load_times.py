"""How long loads take, by the clock of their tier."""

from __future__ import annotations

from kvpolicy.tiers import Took
from kvpolicy.tiers.load_times import LoadTimes


def test_a_load_takes_from_its_beginning_to_its_last_block_and_alone_from_the_end_of_the_one_before() -> None:
    now_s = [1.0]
    times = LoadTimes(lambda: now_s[0])
    times.begins(1)
    times.block_ended(1, 3.0)
    now_s[0] = 2.0
    times.begins(2)
    times.block_ended(1, 2.5)
    times.block_ended(2, 6.0)
    now_s[0] = 100.0
    assert times.ended(1) == Took(2.0, 2.0), "its blocks end in any order, and it is asked later"
    assert times.ended(2) == Took(4.0, 3.0)
    times.begins(3)
    times.block_ended(3, 101.0)
    assert times.ended(3) == Took(1.0, 1.0), "nothing was read before it"


def test_of_two_that_are_read_at_once_the_time_counts_once() -> None:
    times = LoadTimes(lambda: 0.0)
    for job in (1, 2):
        times.begins(job)
    times.block_ended(2, 4.0)
    assert times.ended(2) == Took(4.0, 4.0)
    times.block_ended(1, 3.9)
    assert times.ended(1) == Took(3.9, 0.0)
