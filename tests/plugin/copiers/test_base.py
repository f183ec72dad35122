"""Finding a block's pieces in memory, and the order and times of copies, with and without a simulated link."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

pytest.importorskip("torch")

import torch

from kvpolicy.hardware.link import SimulatedLink
from kvpolicy_vllm.plugin.copiers.base import IDLE_NAP_S, CopyError, Span, segments_of, unique_segments
from kvpolicy_vllm.plugin.copiers.indexing import IndexingCopier
from kvpolicy_vllm.plugin.messages import NO_SLOT, Job
from tests.plugin.copiers.segments import made_segments


@pytest.mark.parametrize(("shape", "permuted"), [((6, 4, 8, 16), (0, 1, 2, 3)), ((2, 6, 8, 4, 16), (0, 1, 2, 3, 4))])
def test_segments_find_every_byte_of_a_block(shape: tuple[int, ...], permuted: tuple[int, ...]) -> None:
    """Blocks outermost, or keys and values apart: the segments of block 3 hold its bytes and no others."""
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape).permute(permuted)
    segments = segments_of(tensor, 6)
    dim = shape.index(6)
    ours = torch.cat([segment[3] for segment in segments]).sort().values
    assert torch.equal(ours, tensor.select(dim, 3).reshape(-1).sort().values)


def test_shared_tensors_are_copied_once() -> None:
    tensor = torch.zeros(6, 4, 8)
    assert len(unique_segments({"a": tensor, "b": tensor, "c": torch.zeros(6, 4, 8)}, 6)) == 2


def test_no_dimension_for_the_blocks() -> None:
    with pytest.raises(ValueError, match="has no 7 blocks"):
        segments_of(torch.zeros(6, 4), 7)


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_the_simulated_link_serves_one_transfer_at_a_time() -> None:
    clock = Clock()
    copier = IndexingCopier([torch.ones(8, 250)], 8, False, SimulatedLink(1000.0, 0.5), clock, clock.sleep)
    copier.save(Job(1, "a", (0, 1), (0, 1)))  # 2 blocks of 1000 bytes: 0.5 s + 2 s
    assert clock.now == 0.0, "no step waits for it"
    copier.load(Job(1, "a", (2, 3), (0, 1)))  # begins when its save has ended
    copier.save(Job(2, "b", (4,), (2,)))  # 1.5 s, after the first
    assert copier.poll() == [] and copier.transfers == []
    clock.sleep(2.5)
    assert copier.poll() == [] and [transfer.direction for transfer in copier.transfers] == ["save"]
    copier.load(Job(2, "b", (5,), (2,)))
    clock.sleep(2.4)
    assert copier.poll() == [] and [transfer.direction for transfer in copier.transfers] == ["save", "save"]
    clock.sleep(0.1)
    assert [done.job.request_id for done in copier.poll()] == ["a"]
    clock.sleep(1.5)
    assert [done.job.request_id for done in copier.poll()] == ["b"]
    told = [(t.submit_s, t.start_s, t.end_s, t.queued_bytes) for t in copier.transfers]
    saves, loads = [(0.0, 0.0, 2.5, 0), (0.0, 2.5, 4.0, 2000)], [(0.0, 2.5, 5.0, 0), (2.5, 5.0, 6.5, 2000)]
    assert told == [*saves, *loads]


def test_what_is_saved_is_what_was_there_when_the_step_began() -> None:
    device = torch.ones(8, 4)
    copier = IndexingCopier([device], 8, False, SimulatedLink(1e-3, 0.5))
    copier.save(Job(1, "a", (0, 1), (5, 3)), frozenset({1}))
    device[:2] = 2.0
    assert (copier.host_segments[0][[5, 3]] == 1.0).all()


@pytest.mark.parametrize("slots", [(2, 3, 4, 5, 6, 7), (9, 2, 15, 4, 3, 0)])
def test_indexed_blocks_come_back_and_touch_no_other(slots: tuple[int, ...]) -> None:
    """Slots in a row and scattered ones; blocks in a row, in any order, and at both ends of the memory."""
    segments = made_segments((torch.bfloat16, torch.float32))
    copier = IndexingCopier(segments, 16, False, None)
    job, back = Job(1, "r", (23, 19, 4, 3, 17, 0), slots), Job(1, "r", (7, 8, 9, 1, 0, 23), slots)
    before = [segment.clone() for segment in segments]
    for host in copier.host_segments:
        host.zero_()
    copier.save(job)
    for host, was in zip(copier.host_segments, before, strict=True):
        assert torch.equal(host[list(slots)], was[list(job.block_ids)])
        assert not host[[slot for slot in range(16) if slot not in slots]].any()
    copier.load(back)
    assert [done.ok for done in copier.poll()] == [True]
    for segment, was in zip(segments, before, strict=True):
        expected = was.clone()
        expected[list(back.block_ids)] = was[list(job.block_ids)]
        assert torch.equal(segment, expected)


@pytest.mark.parametrize(("blocks", "slots"), [((0, 1), (7, 8)), ((7, 8), (0, 1))])
def test_a_block_or_slot_beyond_the_memory_is_a_failed_save(blocks: tuple[int, ...], slots: tuple[int, ...]) -> None:
    copier = IndexingCopier([torch.ones(8, 4)], 8, False, None)
    copier.save(Job(1, "a", blocks, slots))
    assert [transfer.ok for transfer in copier.transfers] == [False]
    assert copier.host_segments[0].shape == (8, 4)


def test_overwritten_blocks_come_first_and_later_ones_are_finished() -> None:
    jobs: list[tuple[Job, int]] = []
    finished: list[int] = []

    class Recording(IndexingCopier):
        def copy_out(self, job: Job, urgent: int) -> None:
            jobs.append((job, urgent))

        def save_span(self, job: Job, called_s: float) -> Span | None:
            return None

        def finish_copies_out(self, copy_ids: Iterable[int]) -> None:
            finished.extend(copy_ids)

    copier = Recording([torch.ones(8, 4)], 8, False, None)
    copier.save(Job(1, "a", (4, 6, 2, 7), (0, 1, 2, 3)), frozenset({2, 6, 5}))
    assert jobs == [(Job(1, "a", (6, 2, 4, 7), (1, 2, 0, 3)), 2)]
    copier.save(Job(2, "b", (3,), (4,)), frozenset())
    assert jobs[1] == (Job(2, "b", (3,), (4,)), 0)
    copier.finish(frozenset({1, 5, 6}))
    assert finished == [], "block 6 was read when its save began"
    copier.finish(frozenset({3}))
    copier.finish(frozenset({7, 3}))
    copier.finish(frozenset({4, 3}))
    assert finished == [2, 1], "nothing is waited for twice"


def test_a_load_that_ended_is_reported_after_its_save() -> None:
    """The save ends between being asked about and the load's being asked about."""

    class Ending(IndexingCopier):
        asked = 0

        def save_span(self, job: Job, called_s: float) -> Span | None:
            self.asked += 1
            return None if self.asked < 3 else (0.0, called_s)

    copier = Ending([torch.ones(8, 4)], 8, False, None)
    copier.save(Job(1, "a", (0, 1), (0, 1)))
    copier.load(Job(1, "a", (2, 3), (0, 1)))
    assert [done.job.request_id for done in copier.poll()] == ["a"]
    assert [transfer.direction for transfer in copier.transfers] == ["save", "load"]


def test_an_idle_engine_naps_while_only_the_device_knows() -> None:
    """Without a simulated link nobody can tell when a copy ends: a nap each time it is asked for, none when busy."""
    clock, there = Clock(), []

    class Slow(IndexingCopier):
        def copied_in(self, job: Job) -> bool:
            return bool(there)

        def save_span(self, job: Job, called_s: float) -> Span | None:
            return (0.0, called_s) if saved else None

    saved = [True]
    copier = Slow([torch.ones(8, 250)], 8, False, None, clock, clock.sleep)
    copier.save(Job(1, "a", (0,), (0,)))
    copier.load(Job(1, "a", (3,), (0,)))
    assert copier.poll() == [] and clock.now == 0.0
    assert copier.poll(idle=True) == [] and clock.now == IDLE_NAP_S
    there.append(True)
    assert [done.ok for done in copier.poll(idle=True)] == [True] and clock.now == IDLE_NAP_S
    saved.clear()
    copier.save(Job(2, "b", (0,), (0,)))
    assert copier.poll() == [] and clock.now == IDLE_NAP_S
    assert copier.poll(idle=True) == [] and clock.now == 2 * IDLE_NAP_S, "a save, too"


def test_only_slots_that_hold_a_whole_block_are_loaded() -> None:
    class Failing(IndexingCopier):
        failing = False

        def copy_out(self, job: Job, urgent: int) -> None:
            if self.failing:
                raise CopyError("made to fail")
            super().copy_out(job, urgent)

    copier = Failing([torch.ones(8, 250)], 8, False, None)
    copier.save(Job(1, "a", (0, 1), (0, 1)))
    copier.load(Job(2, "a", (3, 4), (1, 2)))
    copier.load(Job(3, "a", (3,), (NO_SLOT,)))
    copier.load(Job(4, "a", (3, 4), (0, 1)))
    assert {done.job.copy_id: done.ok for done in copier.poll()} == {2: False, 3: False, 4: True}
    copier.failing = True
    copier.save(Job(5, "b", (5,), (1,)))
    copier.load(Job(6, "a", (3,), (1,)))
    assert [done.ok for done in copier.poll()] == [False], "half a block may be there"
