"""One host pool for several ranks: one saves, the others load what it saved, and only what it saved."""

from __future__ import annotations

import fcntl
import gc
import multiprocessing
import threading
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from kvpolicy_vllm.plugin.copiers.base import CopyError
from kvpolicy_vllm.plugin.copiers.indexing import IndexingCopier
from kvpolicy_vllm.plugin.copiers.pool_of_ranks import SAVER, SharedPool
from kvpolicy_vllm.plugin.messages import Job

SLOTS, WIDTH = 6, 10
OPENED = Path("/proc/self/fd")


class Late(IndexingCopier):
    """Its saves end when they are told to."""

    held = False

    def save_span(self, job: Job, called_s: float) -> Any:
        return None if self.held else super().save_span(job, called_s)


class Failing(IndexingCopier):
    def copy_out(self, job: Job, urgent: int) -> None:
        raise CopyError("made to fail")


def two_ranks(saver: type[IndexingCopier] = Late) -> tuple[Any, Any]:
    """Copiers of two ranks with the same KV, in one process: the second opens what the first has made."""
    devices = [torch.arange(8.0 * WIDTH).view(8, WIDTH), torch.full((8, WIDTH), -1.0)]
    told: list[Any] = []

    def remember(what: Any) -> Any:
        told.append(what)
        if what is not None:
            pools.append(SharedPool(SLOTS, WIDTH * 4, SAVER + 1, lambda _: what))
        return what

    pools: list[SharedPool] = []
    pools.insert(0, SharedPool(SLOTS, WIDTH * 4, SAVER, remember))
    return (
        saver([devices[0]], SLOTS, False, None, shared=pools[0]),
        IndexingCopier([devices[1]], SLOTS, False, None, shared=pools[1]),
    )


def test_one_saves_and_the_other_loads_it() -> None:
    one, other = two_ranks()
    save, load = Job(1, "r", (2, 5), (0, 3)), Job(2, "r", (6, 1), (0, 3), saved_by=1)
    for copier in (one, other):
        copier.save(save)
        copier.load(load)
        assert [(done.job, done.ok) for done in copier.poll()] == [(load, True)]
    assert other.device_segments[0][[6, 1]].equal(one.device_segments[0][[2, 5]])
    saves = [next(transfer for transfer in copier.transfers if transfer.direction == "save") for copier in (one, other)]
    assert [transfer.bytes for transfer in saves] == [2 * WIDTH * 4, 0], "the second copies nothing"
    assert all(transfer.ok for transfer in saves)


def waiting_load() -> tuple[Any, Any, Job]:
    """The ranks' copiers, and a load of the second that waits for a save of the first."""
    one, other = two_ranks()
    one.held = True
    save, load = Job(1, "r", (2,), (0,)), Job(2, "r", (6,), (0,), saved_by=1)
    one.save(save)
    other.save(save)
    other.load(load)
    return one, other, load


def test_a_load_waits_for_the_save_of_the_other_rank() -> None:
    one, other, load = waiting_load()
    assert not other.poll() and not other.poll()
    assert other.device_segments[0][6, 0] == -1.0, "nothing is read before"
    one.held = False
    one.poll()
    assert [(done.job, done.ok) for done in other.poll()] == [(load, True)]
    assert other.device_segments[0][6].equal(one.device_segments[0][2])


def test_a_slot_that_is_used_again_is_waited_for_anew() -> None:
    """Its earlier content is there until the new save ends, and is another one's."""
    one, other = two_ranks()
    for copier in (one, other):
        copier.save(Job(1, "r", (2,), (0,)))
    one.held = True
    again, load = Job(2, "s", (3,), (0,)), Job(3, "s", (6,), (0,), saved_by=2)
    one.save(again)
    other.save(again)
    other.load(load)
    assert not other.poll()
    one.held = False
    one.poll()
    assert [done.ok for done in other.poll()] == [True]
    assert other.device_segments[0][6].equal(one.device_segments[0][3])


@pytest.mark.parametrize("side", ["saver", "reader"])
def test_a_number_is_written_and_read_under_the_lock(side: str) -> None:
    """Which orders the blocks before it on every CPU: while one side has it, the other waits."""
    one, other = two_ranks()
    held_by, waits = (other.shared, one.shared) if side == "saver" else (one.shared, other.shared)
    asks = partial(waits.ended, [0], 1, True) if side == "saver" else partial(waits.has, [0], {0: 1})
    asking = threading.Thread(target=asks)
    with held_by._locked(fcntl.LOCK_EX):
        asking.start()
        asking.join(0.2)
        assert asking.is_alive()
    asking.join(10)
    assert not asking.is_alive()


def test_the_memory_is_closed_with_the_pool() -> None:
    before = len([*OPENED.iterdir()])
    pools = two_ranks()
    assert len([*OPENED.iterdir()]) > before
    del pools
    gc.collect()
    assert len([*OPENED.iterdir()]) == before


def test_a_save_that_fails_fails_the_loads_of_every_rank() -> None:
    one, other = two_ranks(Failing)
    for copier in (one, other):
        copier.save(Job(1, "r", (2,), (0,)))
        copier.load(Job(2, "r", (6,), (0,), saved_by=1))
        assert [done.ok for done in copier.poll()] == [False]


def test_what_nobody_was_told_to_save_is_not_loaded() -> None:
    _, other = two_ranks()
    other.load(Job(2, "r", (6,), (4,)))
    assert [done.ok for done in other.poll()] == [False]


def test_a_load_that_waits_fails_where_the_cache_is_registered_anew() -> None:
    _, other, load = waiting_load()
    leftover = other.give_up()
    assert leftover.failed_loads == [load]


def other_process(path_end: Connection) -> None:
    def tell_all(what: Any) -> Any:
        told = path_end.recv()
        path_end.send("have it")
        return told

    pool = SharedPool(SLOTS, WIDTH * 4, SAVER + 1, tell_all)
    path_end.recv()
    path_end.send((pool.arena[3].tolist(), pool.has([3], {3: 7}), pool.has([4], {4: 7})))


def test_two_processes_map_the_same_memory() -> None:
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=other_process, args=(there,))
    process.start()

    def tell_all(what: Any) -> Any:
        here.send(what)
        assert here.recv() == "have it"
        return what

    pool = SharedPool(SLOTS, WIDTH * 4, SAVER, tell_all)
    pool.arena[3] = torch.arange(WIDTH * 4, dtype=torch.uint8)
    pool.ended([3], 7, True)
    here.send("look")
    seen, ended, going_on = here.recv()
    process.join()
    assert seen == list(range(WIDTH * 4)) and ended is True and going_on is None
