"""Copies of a tool's own: of blocks that it holds, on the plugin's book of copies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvpolicy_vllm.bench.tool_copies import ToolCopies
from kvpolicy_vllm.plugin.host_copies import CopyBook
from kvpolicy_vllm.plugin.messages import StepJobs, Transfer


class Pool:
    """Gives out blocks from number 10 on."""

    def __init__(self) -> None:
        self.freed: list[int] = []

    def get_new_blocks(self, count: int) -> list[Any]:
        return [SimpleNamespace(block_id=10 + number) for number in range(count)]

    def free_blocks(self, blocks: list[Any]) -> None:
        self.freed += [block.block_id for block in blocks]


def step(book: CopyBook, number: int) -> StepJobs:
    """A step whose jobs end in it."""
    jobs = book.take_jobs(number, False, set)
    done = [("save", job) for job in jobs.saves] + [("load", job) for job in jobs.loads]
    for direction, job in done:
        transfer: Any = Transfer(job.copy_id, direction, True, 100, 1, 100, False, 0, 0.0, 1.0, 2.0)  # type: ignore[arg-type]
        book.acknowledge([transfer])
    return jobs


def test_a_window_with_copies_queued_in_both_directions() -> None:
    book, pool = CopyBook(slots=40, ranks=1, block_bytes=100), Pool()
    copies = ToolCopies(book, pool)
    copies.take_blocks(4)
    copies.prepare_load(3)
    (prepared,) = step(book, 0).saves
    assert prepared.block_ids == (10, 11, 12) and not book.under_way
    copies.begin(2)
    assert (book.queued_bytes("save"), book.queued_bytes("load")) == (200, 300)
    jobs = step(book, 1)
    assert [job.block_ids for job in jobs.saves] == [(10, 11)] and jobs.loads[0].slots == prepared.slots
    copies.clear()
    assert book.pool.used == 0 and pool.freed == [10, 11, 12, 13] and copies.blocks == []
    copies.begin(2)
    assert book.queued_bytes("save") == 0, "nothing is left over for the next window"


def test_what_is_stored_is_found_until_the_window_ends() -> None:
    book = CopyBook(slots=8, ranks=1, block_bytes=100)
    copies = ToolCopies(book, Pool())
    copies.store([("h1", 3), ("h2", 4)])
    assert step(book, 0).saves[0].block_ids == (3, 4)
    assert book.pool.stored(["h1", "h2", "h3"]) == 2
    copies.clear()
    assert book.pool.stored(["h1", "h2"]) == 0


def test_a_small_host_memory_keeps_room_for_the_victim() -> None:
    book = CopyBook(slots=8, ranks=1, block_bytes=100)
    copies = ToolCopies(book, Pool())
    copies.take_blocks(6)
    copies.prepare_load(6)
    step(book, 0)
    copies.begin(6)
    assert book.pool.used == 4
