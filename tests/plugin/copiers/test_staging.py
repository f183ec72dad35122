"""Staged copies: blocks come back, neighbours stay, slots in a row go together."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from kvpolicy_vllm.plugin.copiers.arena import host_arena
from kvpolicy_vllm.plugin.copiers.staging import STAGED_BYTES, StagedCopier, Staging, runs_of
from kvpolicy_vllm.plugin.messages import Job
from tests.plugin.copiers.segments import made_segments


@pytest.mark.parametrize("max_bytes", [STAGED_BYTES, 1, 3000])
def test_staged_blocks_come_back_and_touch_no_other(max_bytes: int) -> None:
    """Through a buffer for all of them, for one, for a few; slots that follow each other and slots that do not."""
    segments = made_segments((torch.bfloat16, torch.float32, torch.bfloat16))
    copier = StagedCopier(segments, 16, False, None)
    copier.staging = Staging(segments, copier.arena, max_bytes)
    job = Job(1, "r", (3, 19, 1, 4, 17, 8), (2, 3, 4, 9, 8, 15))
    before = [segment.clone() for segment in segments]
    copier.save(job)
    for host, was in zip(copier.host_segments, before, strict=True):
        assert torch.equal(host[list(job.slots)], was[list(job.block_ids)])
    for segment in segments:
        segment[list(job.block_ids)] = 0
    copier.load(job)
    assert [done.ok for done in copier.poll()] == [True]
    assert all(torch.equal(segment, was) for segment, was in zip(segments, before, strict=True))


def test_slots_that_follow_each_other_go_together() -> None:
    assert list(runs_of((2, 3, 4, 9, 8))) == [(0, 2, 3), (3, 9, 1), (4, 8, 1)]
    assert list(runs_of(())) == []


def test_the_host_pool_begins_on_a_page_of_its_own() -> None:
    """Page-locking goes by whole pages; pools that shared one could not both be locked."""
    arenas = [host_arena(3, 1000) for _ in range(4)]
    assert all(arena.data_ptr() % 4096 == 0 for arena in arenas)
    assert len({arena.data_ptr() for arena in arenas}) == 4
