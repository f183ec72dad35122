"""The host pool is there from the start, and not in a core dump: read from what the kernel says of the pages."""

from __future__ import annotations

import mmap

import pytest

pytest.importorskip("torch")

import torch

from kvpolicy_vllm.plugin.copiers.arena import host_arena
from kvpolicy_vllm.plugin.copiers.indexing import IndexingCopier
from kvpolicy_vllm.plugin.copiers.pool_of_ranks import SharedPool
from kvpolicy_vllm.plugin.copiers.staging import StagedCopier
from tests.mappings import mapping_of, refuse_dumped
from tests.plugin.copiers.segments import made_segments

POOL_BYTES = 64 * mmap.PAGESIZE


def refuse_unguarded(memory: torch.Tensor) -> None:
    mapping = refuse_dumped(memory.data_ptr())
    assert int(mapping["Rss"].split()[0]) * 1024 >= memory.nbytes, "is not touched"
    assert not memory.any()


def test_an_arena() -> None:
    """What is page-locked afterwards, and what is not: pinning needs a GPU, and changes neither."""
    refuse_unguarded(host_arena(64, mmap.PAGESIZE))
    plain = torch.zeros(POOL_BYTES, dtype=torch.uint8)
    assert "dd" not in mapping_of(plain.data_ptr())["VmFlags"].split(), "or the test sees nothing"


@pytest.mark.parametrize("kind", [IndexingCopier, StagedCopier])
def test_the_pool_of_a_copier(kind: type[IndexingCopier]) -> None:
    copier = kind(made_segments((torch.float32, torch.bfloat16)), 2000, False, None)
    for segment in copier.host_segments:
        assert int(refuse_dumped(segment.data_ptr())["Rss"].split()[0]) > 0


def test_a_pool_that_ranks_share() -> None:
    pool = SharedPool(64, mmap.PAGESIZE, 0, lambda told: told)
    refuse_unguarded(pool.arena)
