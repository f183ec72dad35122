"""The life of saved copies; failures in a row suspend swapping for a while, and the log gets one warning a minute."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import pytest

from kvpolicy.events import DIRECTIONS
from kvpolicy_vllm.plugin.host_copies import (
    FIRST_SUSPENSION_S,
    MAX_FAILURES_IN_A_ROW,
    MAX_SUSPENSION_S,
    WARNING_EVERY_S,
    CopyBook,
    CopyHealth,
)
from kvpolicy_vllm.plugin.messages import Job, Transfer


def ack(copy_id: int, direction: Any, ok: bool = True) -> Transfer:
    return Transfer(copy_id, direction, ok, 100, 1, 100, False, 0, 0.0, 1.0, 2.0)


def nobody(block_ids: Iterable[int]) -> set[int]:
    return set()


class TestCopies:
    def test_a_whole_life(self) -> None:
        book = CopyBook(slots=4, ranks=1, block_bytes=100)
        copy = book.save("r", "p", 40, (7, 8, 9))
        assert book.pool.used == 3 and book.queued_bytes("save") == 300
        jobs = book.take_jobs(0, idle=False, taken_of=nobody)
        assert jobs.saves == (Job(copy.copy_id, "r", (7, 8, 9), copy.slots),)
        assert [settled.ok for settled in book.acknowledge([ack(copy.copy_id, "save")])] == [True]
        assert book.queued_bytes("save") == 0
        assert book.loadable_tokens("r", 100, 16) == 24
        book.begin_load("r", 1, (1, 2), 24)
        assert book.loadable_tokens("r", 100, 0) == 0
        assert book.take_jobs(1, idle=False, taken_of=nobody).loads == (Job(copy.copy_id, "r", (1, 2), copy.slots[1:]),)
        assert book.pool.used == 3
        book.acknowledge([ack(copy.copy_id, "load")])
        assert book.pool.used == 0 and len(book) == 0

    def test_blocks_are_named_that_a_step_overwrites_until_their_save_is_confirmed(self) -> None:
        book = CopyBook(slots=8, ranks=1, block_bytes=100)
        first = book.save("r", "p", 48, (6, 7, 8, 9))
        assert book.take_jobs(0, False, {8, 5}.intersection).overwritten == {8}
        second = book.save("s", "q", 20, (3, 4))
        assert book.take_jobs(1, False, {3, 8, 9}.intersection).overwritten == {3, 9}, "a block is named once"
        book.acknowledge([ack(first.copy_id, "save")])
        assert book.take_jobs(2, False, {6, 9}.intersection).overwritten == set()
        assert book.take_jobs(3, False, nobody) is book.take_jobs(4, False, nobody), "no message where there is no work"
        book.forget("s")
        jobs = book.take_jobs(5, False, {3, 4}.intersection)
        assert jobs.dropped == (second.copy_id,) and not jobs.overwritten, (
            "what nobody wants any more may be overwritten"
        )

    def test_copies_are_under_way_until_all_ranks_reported_their_end(self) -> None:
        """A forgotten save goes on reading the device's memory, which an engine that sleeps gives up."""
        book = CopyBook(slots=4, ranks=2, block_bytes=100)
        copy = book.save("r", "p", 10, (1,))
        assert not book.under_way
        book.take_jobs(0, idle=False, taken_of=nobody)
        book.forget("r")
        assert book.under_way and book.acknowledge([ack(copy.copy_id, "save")]) == []
        assert book.under_way and book.acknowledge([ack(copy.copy_id, "save", ok=False)]) == []
        assert not book.under_way
        copy = book.save("s", "p", 10, (1,))
        book.take_jobs(1, idle=False, taken_of=nobody)
        book.acknowledge([ack(copy.copy_id, "save")] * 2)
        book.begin_load("s", 0, (2,), 10)
        assert book.under_way
        book.acknowledge([ack(copy.copy_id, "load")] * 2)
        assert not book.under_way

    def test_all_ranks_must_finish(self) -> None:
        book = CopyBook(slots=4, ranks=2, block_bytes=100)
        copy = book.save("r", "p", 10, (1,))
        book.take_jobs(0, idle=False, taken_of=nobody)
        assert book.acknowledge([ack(copy.copy_id, "save")]) == []
        assert [settled.ok for settled in book.acknowledge([ack(copy.copy_id, "save", ok=False)])] == [False]
        assert book.of("r") is None and book.pool.used == 0

    def test_a_forgotten_load_keeps_its_slots_until_it_is_done(self) -> None:
        book = CopyBook(slots=1, ranks=1, block_bytes=100)
        copy = book.save("r", "p", 10, (1,))
        book.take_jobs(0, idle=False, taken_of=nobody)
        book.begin_load("r", 0, (2,), 10)
        book.forget("r")
        assert book.of("r") is None and book.pool.free == 0
        book.acknowledge([ack(copy.copy_id, "load")])
        assert book.pool.free == 1

    def test_a_save_that_is_forgotten_before_it_is_handed_over_is_not_made(self) -> None:
        book = CopyBook(slots=1, ranks=1, block_bytes=100)
        book.save("r", "p", 10, (1,))
        book.forget("r")
        assert book.take_jobs(0, idle=False, taken_of=nobody).saves == ()

    def test_a_request_that_comes_back_gets_another_generation(self) -> None:
        book = CopyBook(slots=4, ranks=1, block_bytes=100)
        first = book.save("r", "p1", 10, (1,))
        book.take_jobs(0, idle=False, taken_of=nobody)
        book.forget("r")
        second = book.save("r", "p2", 12, (1,))
        assert second.copy_id != first.copy_id
        assert book.acknowledge([ack(first.copy_id, "save", ok=False)]) == []
        assert book.of("r") is second

    def test_a_load_that_begins_before_its_save_is_handed_over_keeps_its_slots(self) -> None:
        book = CopyBook(slots=1, ranks=1, block_bytes=100)
        copy = book.save("r", "p", 10, (1,))
        book.begin_load("r", 0, (2,), 10)
        jobs = book.take_jobs(0, idle=False, taken_of=nobody)
        assert [job.copy_id for job in jobs.saves] == [job.copy_id for job in jobs.loads] == [copy.copy_id]
        book.forget("r")
        assert book.pool.free == 0
        book.acknowledge([ack(copy.copy_id, "save"), ack(copy.copy_id, "load")])
        assert book.pool.free == 1


def failing(health: CopyHealth, count: int, now: float) -> None:
    for number in range(count):
        health.failed("save", f"save of copy {number} failed: disk on fire", now)


def test_swapping_is_suspended_after_failures_in_a_row_and_tried_again() -> None:
    health = CopyHealth()
    failing(health, MAX_FAILURES_IN_A_ROW - 1, 0.0)
    assert not health.suspended(0.0)
    failing(health, 1, 1.0)
    assert health.suspended(1.0) and health.suspended(1.0 + 0.99 * FIRST_SUSPENSION_S)
    assert not health.suspended(1.0 + FIRST_SUSPENSION_S)


def test_a_good_copy_ends_the_row() -> None:
    health = CopyHealth()
    for _ in range(3):
        failing(health, MAX_FAILURES_IN_A_ROW - 1, 0.0)
        health.succeeded("save")
    assert not health.suspended(0.0)


def test_one_failure_after_a_suspension_brings_the_next_twice_as_long() -> None:
    health = CopyHealth()
    failing(health, MAX_FAILURES_IN_A_ROW, 0.0)
    now, length = FIRST_SUSPENSION_S, FIRST_SUSPENSION_S
    for _ in range(10):
        assert not health.suspended(now)
        failing(health, 1, now)
        length = min(2 * length, MAX_SUSPENSION_S)
        assert health.suspended(now + 0.99 * length)
        now += length
    assert length == MAX_SUSPENSION_S
    for direction in DIRECTIONS:
        health.succeeded(direction)
    failing(health, MAX_FAILURES_IN_A_ROW, now)
    assert not health.suspended(now + FIRST_SUSPENSION_S)


def test_loads_that_fail_count_although_their_saves_are_made() -> None:
    health = CopyHealth()
    for number in range(MAX_FAILURES_IN_A_ROW):
        assert not health.suspended(0.0)
        health.succeeded("save")
        health.failed("load", f"load of copy {number} failed: gone", 0.0)
    assert health.suspended(0.0)
    health.succeeded("save")
    assert not health.suspended(FIRST_SUSPENSION_S)
    health.failed("load", "load of copy 9 failed: gone", FIRST_SUSPENSION_S)
    assert health.suspended(2.9 * FIRST_SUSPENSION_S), "no load has worked since, so this one is twice as long"


def test_copies_that_were_under_way_do_not_lengthen_a_suspension() -> None:
    health = CopyHealth()
    failing(health, 10 * MAX_FAILURES_IN_A_ROW, 0.0)
    assert not health.suspended(FIRST_SUSPENSION_S)


def test_one_warning_a_minute_says_how_many_failed(caplog: pytest.LogCaptureFixture) -> None:
    health = CopyHealth()
    with caplog.at_level(logging.WARNING):
        for second in range(int(WARNING_EVERY_S) + 1):
            health.failed("load", f"load of copy {second} failed: gone", float(second))
            health.succeeded("load")
    results = [record.getMessage() for record in caplog.records]
    assert len(results) == 2
    assert "load of copy 0 failed: gone" in results[0]
    assert "load of copy 60 failed: gone (and 59 more since the last warning)" in results[1]
