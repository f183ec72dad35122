"""How long loads from files take, and when nobody waits for them."""

from __future__ import annotations

import pytest

from kvpolicy.tiers import Took
from kvpolicy_vllm.plugin.file_reads import MAX_WAIT_S, RENEWED_S, FileReads
from kvpolicy_vllm.plugin.host_copies import MAX_FAILURES_IN_A_ROW


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def measured() -> tuple[FileReads, Clock]:
    """Files of which two blocks took a second."""
    clock = Clock()
    reads = FileReads(100, clock)
    assert reads.expected_s(2) == 0.0
    clock.now_s = 1.0
    reads.ended(0.0, 2)
    return reads, clock


def test_what_loads_took_counts_for_a_while() -> None:
    reads, clock = measured()
    assert reads.expected_s(2) == pytest.approx(1.0) and reads.expected_s(6) == pytest.approx(3.0)
    clock.now_s += RENEWED_S
    assert reads.expected_s(2) == 0.0


def test_what_is_overdue_is_expected_to_take_as_long_again() -> None:
    reads, clock = measured()
    for now_s, left_s in ((1.0, 1.0), (1.75, 0.25), (2.0, 0.0), (4.0, 2.0)):
        clock.now_s = now_s
        assert reads.left_s(1.0, 2) == pytest.approx(left_s)


def test_where_workers_say_how_long_a_load_took_steps_of_the_engine_do_not_count() -> None:
    clock = Clock()
    reads = FileReads(100, clock)
    clock.now_s = 0.05
    reads.ended(0.0, 2, Took(0.006, 0.002))
    assert reads.expected_s(1) == pytest.approx(0.001), "what was before it does not count, either"


def test_no_load_is_overdue_as_long_as_its_end_may_not_have_been_heard_of() -> None:
    """The last one was heard of 48 ms after two that it took. One that takes much longer is."""
    clock = Clock()
    reads = FileReads(100, clock)
    clock.now_s = 0.05
    reads.ended(0.0, 2, Took(0.002, 0.002))
    for now_s, left_s in ((1.0, 0.002), (1.048, 0.002), (1.05, 0.0), (1.55, 0.5)):
        clock.now_s = now_s
        assert reads.left_s(1.0, 2) == pytest.approx(left_s)


def test_a_load_is_in_time_by_the_time_that_workers_took() -> None:
    reads, clock = measured()
    reads.late()
    clock.now_s += 2 * MAX_WAIT_S
    reads.ended(clock.now_s - 1.0, 2, Took(MAX_WAIT_S, 0.1))
    assert reads.suspended, "a disk that is slow, and reads several blocks at once"
    reads.ended(clock.now_s - 2 * MAX_WAIT_S, 2, Took(1.0, 1.0))
    assert not reads.suspended, "the engine was"


def test_a_load_that_brings_nothing_moves_no_bytes() -> None:
    """It takes its time all the same, which the others that are waited for take longer by."""
    reads, clock = measured()
    reads.ended(clock.now_s, 0)
    assert reads.expected_s(2) == pytest.approx(1.0)
    clock.now_s += 1.0
    reads.ended(clock.now_s - 1.0, 0)
    assert reads.expected_s(2) > 1.5


def test_a_late_load_or_several_that_bring_nothing_suspend_reads_until_one_comes_in_time() -> None:
    reads, clock = measured()
    for _ in range(MAX_FAILURES_IN_A_ROW - 1):
        reads.ended(clock.now_s, 0)
    assert not reads.suspended
    reads.ended(clock.now_s, 1)
    reads.ended(clock.now_s, 0)
    assert not reads.suspended, "not in a row"
    reads.late()
    assert reads.suspended
    clock.now_s += MAX_WAIT_S
    reads.ended(clock.now_s - MAX_WAIT_S, 2)
    assert reads.suspended, "the late one is there by now"
    reads.ended(clock.now_s - 1.0, 2)
    assert not reads.suspended
    for _ in range(MAX_FAILURES_IN_A_ROW):
        assert not reads.suspended
        reads.ended(clock.now_s, 0)
    assert reads.suspended


def test_what_would_be_late_is_not_waited_for() -> None:
    """Two blocks take a second, and a request waits ten: half of that is room for an estimate that is off."""
    reads, clock = measured()
    found = [reads.in_time(blocks, backlog_s) for blocks, backlog_s in ((10, 0.0), (30, 0.0), (30, 4.0), (1, 5.0))]
    assert found == [10, 10, 2, 0]
    clock.now_s += RENEWED_S
    assert reads.in_time(30, 0.0) == 30, "nobody knows how long it takes"
