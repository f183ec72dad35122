"""Blocks that are held until they are saved, of vLLM's own block pool."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.block_pool import BlockPool

from kvpolicy_vllm.plugin.host_copies import CopyBook
from kvpolicy_vllm.plugin.messages import Job, Transfer
from kvpolicy_vllm.plugin.pinned_blocks import PinnedBlocks

BLOCKS, LOST = 8, 3


def ack(job: Job, ok: bool = True) -> list[Transfer]:
    return [Transfer(job.copy_id, "save", ok, 100, 1, 100, False, 0, 0.0, 1.0, 2.0)]


def all_of_them(block_ids: Iterable[int]) -> set[int]:
    return set(block_ids)


class Preempted:
    """A request of three blocks has lost them to the pool, and they are to be saved by two ranks."""

    def __init__(self) -> None:
        self.pool = BlockPool(BLOCKS, False, 16)
        self.book = CopyBook(slots=4, ranks=2, block_bytes=100)
        self.book.pinned = self.pinned = PinnedBlocks(self.pool)
        held = self.pool.get_new_blocks(LOST)
        self.book.keep("r", "p", 40, [(None, block.block_id) for block in held])
        self.pool.free_blocks(held)

    def send(self) -> Job:
        jobs = self.book.take_jobs(0, idle=False, taken_of=all_of_them)
        assert not jobs.overwritten, "no step can write to them"
        (save,) = jobs.saves
        return save

    def assert_held(self, held: bool) -> None:
        free = BLOCKS - 1 - (LOST if held else 0)  # one is vLLM's null block
        assert (self.pinned.any, self.pool.get_num_free_blocks()) == (held, free)


@pytest.mark.parametrize("ok", [True, False])
def test_until_every_rank_has_reported(ok: bool) -> None:
    preempted = Preempted()
    preempted.assert_held(True)
    save = preempted.send()
    preempted.book.acknowledge(ack(save))
    preempted.assert_held(True)
    preempted.book.acknowledge(ack(save, ok))
    preempted.assert_held(False)


def test_of_a_copy_that_is_forgotten_until_workers_have_read_them() -> None:
    preempted = Preempted()
    save = preempted.send()
    preempted.book.forget("r")
    preempted.book.take_jobs(1, idle=False, taken_of=all_of_them)
    preempted.assert_held(True)
    for _ in range(2):
        preempted.book.acknowledge(ack(save))
    preempted.assert_held(False)


def test_of_a_copy_that_is_forgotten_before_it_is_saved() -> None:
    preempted = Preempted()
    preempted.book.forget("r")
    assert not preempted.book.take_jobs(0, idle=False, taken_of=all_of_them).saves
    preempted.assert_held(False)


def test_nothing_after_a_reset() -> None:
    preempted = Preempted()
    save = preempted.send()
    preempted.book.forget_all()
    preempted.assert_held(False)
    for _ in range(2):
        preempted.book.acknowledge(ack(save))
    preempted.assert_held(False)
