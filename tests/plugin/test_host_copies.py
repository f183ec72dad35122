"""The life of saved copies; failures in a row suspend swapping for a while, and the log gets one warning a minute."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from kvpolicy.events import DIRECTIONS, TOOL_COPY
from kvpolicy_vllm.plugin.host_copies import (
    FIRST_SUSPENSION_S,
    MAX_FAILURES_IN_A_ROW,
    MAX_SUSPENSION_S,
    WARNING_EVERY_S,
    Copy,
    CopyBook,
    CopyHealth,
)
from kvpolicy_vllm.plugin.messages import NO_REQUEST, NO_SLOT, Transfer


def ack(copy_id: int, direction: Any, ok: bool = True) -> Transfer:
    return Transfer(copy_id, direction, ok, 100, 1, 100, False, 0, 0.0, 1.0, 2.0)


def nobody(block_ids: Iterable[int]) -> set[int]:
    return set()


def unhashed(*block_ids: int) -> list[tuple[None, int]]:
    return [(None, block_id) for block_id in block_ids]


def slots_of(copy: Copy) -> tuple[int | None, ...]:
    return tuple(block.slot for block in copy.blocks)


class TestCopies:
    def test_a_whole_life(self) -> None:
        book = CopyBook(slots=4, ranks=1, block_bytes=100)
        copy = book.keep("r", "p", 40, unhashed(7, 8, 9))
        slots = slots_of(copy)
        assert book.pool.used == 3 and book.queued_bytes("save") == 300
        (save,) = book.take_jobs(0, idle=False, taken_of=nobody).saves
        assert (save.request_id, save.block_ids, save.slots, book.preemption_of(save)) == ("r", (7, 8, 9), slots, "p")
        assert [settled.ok for settled in book.acknowledge([ack(save.copy_id, "save")])] == [True]
        assert book.queued_bytes("save") == 0
        assert book.loadable_tokens("r", 100, 16) == 24
        book.begin_load("r", range(1, 3), (1, 2), 24)
        assert book.loadable_tokens("r", 100, 0) == 0 and book.queued_bytes("load") == 200
        (load,) = book.take_jobs(1, idle=False, taken_of=nobody).loads
        assert (load.request_id, load.block_ids, load.slots, load.saved_by) == ("r", (1, 2), slots[1:], save.copy_id)
        assert book.pool.used == 2, "what is not loaded is not needed"
        book.acknowledge([ack(load.copy_id, "load")])
        assert book.pool.used == 0 and book.of("r") is None and book.queued_bytes("load") == 0

    def test_blocks_that_survive_are_never_copied(self) -> None:
        book = CopyBook(slots=4, ranks=1, block_bytes=100)
        copy = book.keep("r", "p", 40, [("h1", 7), ("h2", 8), (None, 9)])
        (first,) = book.take_jobs(0, False, nobody).saves
        assert first.block_ids == (9,) and book.take_begun() == []
        book.lost([8, 3])
        (second,) = book.take_jobs(1, False, {8, 9}.intersection).saves
        assert second.block_ids == (8,), "when the device gives it away"
        assert book.take_jobs(2, False, {8}.intersection) is book.take_jobs(3, False, nobody), "named once"
        book.begin_load("r", range(1, 3), (4, 5), 24)
        (load,) = book.take_jobs(4, False, nobody).loads
        assert load.slots == slots_of(copy) and load.saved_by == second.copy_id and not book.pool.watched

    def test_a_copy_of_what_is_all_on_the_device_needs_no_save(self) -> None:
        book = CopyBook(slots=4, ranks=1, block_bytes=100)
        copy = book.keep("r", "p", 32, [("h1", 7), ("h2", 8)])
        assert book.take_jobs(0, False, nobody).saves == ()
        assert book.take_begun() == [copy] and book.take_begun() == []

    def test_what_several_requests_need_is_saved_once(self) -> None:
        book = CopyBook(slots=4, ranks=1, block_bytes=100)
        book.keep("r", "p1", 32, [("h1", 7), ("h2", 8)])
        book.keep("s", "p2", 32, [("h1", 7), ("h3", 9)])
        book.lost([7, 9])
        jobs = book.take_jobs(0, False, nobody).saves
        assert [(job.request_id, job.block_ids) for job in jobs] == [("r", (7,)), ("s", (9,))]
        book.forget("r")
        book.acknowledge([ack(jobs[0].copy_id, "save", ok=False)])
        assert book.of("s") is None and book.pool.used == 0, "it needed the block whose save failed"

    def test_a_copy_that_is_given_up_is_gone_and_reported(self) -> None:
        book = CopyBook(slots=2, ranks=1, block_bytes=100)
        short = book.keep("r", "p1", 16, unhashed(1))
        book.keep("s", "p2", 32, unhashed(2, 3))
        assert book.of("r") is None and book.take_given_up() == [short] and book.take_given_up() == []
        (job,) = book.take_jobs(0, False, nobody).saves
        assert job.request_id == "s" and book.queued_bytes("save") == 200

    def test_what_can_have_no_slot_is_sent_without_one(self) -> None:
        book = CopyBook(slots=1, ranks=1, block_bytes=100)
        book.keep("r", "p1", 16, unhashed(1))
        book.keep("s", "p2", 32, [("h", 2)])
        book.begin_load("r", range(0, 1), (5,), 16)
        book.begin_load("s", range(0, 1), (6,), 16)
        assert book.take_jobs(0, False, nobody).loads[1].slots == (NO_SLOT,), "the worker fails it"

    def test_nothing_is_found_by_its_hash_after_a_reset(self) -> None:
        book = CopyBook(slots=2, ranks=1, block_bytes=100)
        book.keep("r", "p1", 16, [("h", 1)])
        book.lost([1])
        book.begin_load("r", range(0, 1), (5,), 16)
        book.take_jobs(0, False, nobody)
        book.forget_all()
        book.keep("s", "p2", 16, [("h", 2)])
        assert book.pool.key_at(2) == "h"

    def test_blocks_are_named_that_a_step_overwrites_until_their_save_is_confirmed(self) -> None:
        book = CopyBook(slots=8, ranks=1, block_bytes=100)
        book.keep("r", "p", 48, unhashed(6, 7, 8, 9))
        first = book.take_jobs(0, False, {8, 5}.intersection)
        assert first.overwritten == {8}
        book.keep("s", "q", 20, unhashed(3, 4))
        assert book.take_jobs(1, False, {3, 8, 9}.intersection).overwritten == {3, 9}, "a block is named once"
        book.acknowledge([ack(first.saves[0].copy_id, "save")])
        assert book.take_jobs(2, False, {6, 9}.intersection).overwritten == set()
        assert book.take_jobs(3, False, nobody) is book.take_jobs(4, False, nobody), "no message where there is no work"
        book.forget("s")
        jobs = book.take_jobs(5, False, {3, 4}.intersection)
        assert not jobs.overwritten, "what nobody wants any more may be overwritten"

    def test_copies_are_under_way_until_all_ranks_reported_their_end(self) -> None:
        """A forgotten save goes on reading the device's memory, which an engine that sleeps gives up."""
        book = CopyBook(slots=4, ranks=2, block_bytes=100)
        book.keep("r", "p", 10, unhashed(1))
        assert not book.under_way
        (save,) = book.take_jobs(0, idle=False, taken_of=nobody).saves
        book.forget("r")
        assert book.under_way and book.acknowledge([ack(save.copy_id, "save")]) == []
        assert book.under_way
        (settled,) = book.acknowledge([ack(save.copy_id, "save", ok=False)])
        assert not book.under_way and settled.copy.preemption_id == "p"
        book.keep("s", "p", 10, unhashed(1))
        (save,) = book.take_jobs(1, idle=False, taken_of=nobody).saves
        book.acknowledge([ack(save.copy_id, "save")] * 2)
        book.begin_load("s", range(0, 1), (2,), 10)
        assert book.under_way
        (load,) = book.take_jobs(2, idle=False, taken_of=nobody).loads
        book.acknowledge([ack(load.copy_id, "load")] * 2)
        assert not book.under_way

    def test_a_tools_save_is_one_that_no_step_waits_for_and_no_request_knows(self) -> None:
        book = CopyBook(slots=8, ranks=1, block_bytes=100)
        copy = book.save_for_tool([(None, 6), ("h", 7)])
        assert book.queued_bytes("save") == 200 and book.take_begun() == []
        jobs = book.take_jobs(0, False, {6, 7}.intersection)
        (save,) = jobs.saves
        assert not jobs.overwritten, "its blocks are held, and nobody writes to them"
        assert (save.request_id, save.block_ids, book.preemption_of(save)) == (NO_REQUEST, (6, 7), TOOL_COPY)
        book.acknowledge([ack(save.copy_id, "save")])
        assert book.queued_bytes("save") == 0 and book.pool.stored(["h"]) == 1, "kept for copies that need it"
        victim = book.keep("r", "p", 40, [("h", 7), (None, 8)])
        (own,) = book.take_jobs(1, False, nobody).saves
        assert own.block_ids == (8,) and victim.blocks[0].slot == copy.blocks[1].slot
        book.pool.release(copy)
        assert book.pool.used == 2

    def test_a_tools_load_is_queued_and_ends_with_its_copy(self) -> None:
        book = CopyBook(slots=8, ranks=1, block_bytes=100)
        copy = book.save_for_tool(unhashed(6, 7))
        (save,) = book.take_jobs(0, False, nobody).saves
        book.acknowledge([ack(save.copy_id, "save")])
        book.load_for_tool(copy, (3, 4))
        assert book.queued_bytes("load") == 200 and book.under_way
        (load,) = book.take_jobs(1, False, nobody).loads
        assert (load.request_id, load.block_ids, load.saved_by) == (NO_REQUEST, (3, 4), save.copy_id)
        book.acknowledge([ack(load.copy_id, "load")])
        assert (book.queued_bytes("load"), book.pool.used, book.under_way) == (0, 0, False)

    def test_what_a_tool_failed_to_save_is_not_found(self) -> None:
        """A swap that found it would load what happens to be in its slots."""
        book = CopyBook(slots=8, ranks=1, block_bytes=100)
        copy = book.save_for_tool([("h", 7), (None, 8)])
        (save,) = book.take_jobs(0, False, nobody).saves
        book.acknowledge([ack(save.copy_id, "save", ok=False)])
        assert book.pool.stored(["h"]) == 0 and book.pool.used == 0
        book.pool.release(copy)

    def test_a_tools_copy_is_given_up_first(self) -> None:
        book = CopyBook(slots=3, ranks=1, block_bytes=100)
        book.save_for_tool(unhashed(6, 7))
        book.keep("r", "p", 1, unhashed(1, 2))
        assert book.of("r") is not None and book.take_given_up() == []

    def test_all_ranks_must_finish(self) -> None:
        book = CopyBook(slots=4, ranks=2, block_bytes=100)
        book.keep("r", "p", 10, unhashed(1))
        (save,) = book.take_jobs(0, idle=False, taken_of=nobody).saves
        assert book.acknowledge([ack(save.copy_id, "save")]) == []
        assert [settled.ok for settled in book.acknowledge([ack(save.copy_id, "save", ok=False)])] == [False]
        assert book.of("r") is None and book.pool.used == 0

    def test_a_save_takes_as_long_as_on_its_slowest_rank_and_one_that_fails_says_nothing(self) -> None:
        book = CopyBook(slots=40, ranks=2, block_bytes=100)

        def save(blocks: int, seconds: tuple[float, float], ok: bool = True) -> None:
            book.keep("r", "p", 10, unhashed(*range(blocks)))
            (job,) = book.take_jobs(0, idle=False, taken_of=nobody).saves
            book.acknowledge([replace(ack(job.copy_id, "save", ok), start_s=5.0, end_s=5.0 + one) for one in seconds])

        assert book.pool.admission.takes_saves()
        save(10, (1.0, 3.0))
        assert book.queues.saving_s == 0.0
        book.keep("s", "p", 10, unhashed(*range(3)))
        assert book.queues.saving_s == pytest.approx(0.9) and book.pool.admission.takes_saves()
        book.keep("t", "p", 10, unhashed(4))
        assert book.queues.saving_s == pytest.approx(1.2) and not book.pool.admission.takes_saves()
        for copy in ("s", "t"):
            book.forget(copy)
        book.take_jobs(0, idle=False, taken_of=nobody)
        save(10, (100.0, 100.0), ok=False)
        book.keep("s", "p", 10, unhashed(*range(3)))
        assert book.queues.saving_s == pytest.approx(0.9)

    def test_a_forgotten_load_keeps_its_slots_until_it_is_done(self) -> None:
        book = CopyBook(slots=1, ranks=1, block_bytes=100)
        book.keep("r", "p", 10, unhashed(1))
        book.take_jobs(0, idle=False, taken_of=nobody)
        book.begin_load("r", range(0, 1), (2,), 10)
        book.forget("r")
        assert book.of("r") is None and book.pool.free == 0
        (load,) = book.take_jobs(1, idle=False, taken_of=nobody).loads
        (settled,) = book.acknowledge([ack(load.copy_id, "load")])
        assert book.pool.free == 1 and settled.copy.orphan

    def test_a_save_that_is_forgotten_before_it_is_handed_over_is_not_made(self) -> None:
        book = CopyBook(slots=1, ranks=1, block_bytes=100)
        book.keep("r", "p", 10, unhashed(1))
        book.forget("r")
        assert book.take_jobs(0, idle=False, taken_of=nobody).saves == () and book.queued_bytes("save") == 0

    def test_a_request_that_comes_back_gets_another_copy(self) -> None:
        book = CopyBook(slots=4, ranks=1, block_bytes=100)
        book.keep("r", "p1", 10, unhashed(1))
        (first,) = book.take_jobs(0, idle=False, taken_of=nobody).saves
        book.forget("r")
        second = book.keep("r", "p2", 12, unhashed(1))
        book.acknowledge([ack(first.copy_id, "save", ok=False)])
        assert book.of("r") is second
        (save,) = book.take_jobs(1, idle=False, taken_of=nobody).saves
        assert save.copy_id > first.copy_id

    def test_a_load_that_begins_before_its_save_is_handed_over_keeps_its_slots(self) -> None:
        book = CopyBook(slots=1, ranks=1, block_bytes=100)
        book.keep("r", "p", 10, unhashed(1))
        book.begin_load("r", range(0, 1), (2,), 10)
        jobs = book.take_jobs(0, idle=False, taken_of=nobody)
        assert [job.saved_by for job in jobs.loads] == [job.copy_id for job in jobs.saves]
        book.forget("r")
        assert book.pool.free == 0
        book.acknowledge([ack(jobs.saves[0].copy_id, "save"), ack(jobs.loads[0].copy_id, "load")])
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
