"""Finding a block's pieces in memory, and the order and times of copies, with and without a simulated link."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from kvpolicy.hardware.link import SimulatedLink
from kvpolicy_vllm.plugin.copiers.base import IDLE_NAP_S, segments_of, unique_segments
from kvpolicy_vllm.plugin.copiers.indexing import IndexingCopier
from kvpolicy_vllm.plugin.messages import Job


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
    assert clock.now == 2.5
    copier.load(Job(1, "a", (2, 3), (0, 1)))
    copier.save(Job(2, "b", (4,), (2,)))
    assert clock.now == 4.0 and copier.poll() == []
    copier.load(Job(2, "b", (5,), (2,)))
    clock.sleep(1.0)
    assert [done.job.request_id for done in copier.poll()] == ["a"]
    clock.sleep(1.5)
    assert [done.job.request_id for done in copier.poll()] == ["b"]
    load = copier.transfers[-1]
    assert (load.submit_s, load.start_s, load.end_s, load.queued_bytes) == (4.0, 5.0, 6.5, 2000)


def test_an_idle_engine_naps_while_only_the_device_knows() -> None:
    """Without a simulated link nobody can tell when a load ends: a nap each time it is asked for, none when busy."""
    clock, there = Clock(), []

    class Slow(IndexingCopier):
        def copied_in(self, job: Job) -> bool:
            return bool(there)

    copier = Slow([torch.ones(8, 250)], 8, False, None, clock, clock.sleep)
    copier.save(Job(1, "a", (0,), (0,)))
    copier.load(Job(1, "a", (3,), (0,)))
    assert copier.poll() == [] and clock.now == 0.0
    assert copier.poll(idle=True) == [] and clock.now == IDLE_NAP_S
    there.append(True)
    assert [done.ok for done in copier.poll(idle=True)] == [True] and clock.now == IDLE_NAP_S


def test_a_copy_that_was_dropped_cannot_be_loaded() -> None:
    copier = IndexingCopier([torch.ones(8, 250)], 8, False, None)
    copier.save(Job(1, "a", (0,), (0,)))
    copier.drop([1])
    copier.load(Job(1, "a", (3,), (0,)))
    assert [done.ok for done in copier.poll()] == [False]
