"""Blocks of a request with one block table and with several, on a made-up scheduler."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvpolicy_vllm.bench.request_blocks import RequestBlocks
from kvpolicy_vllm.bench.states import State
from kvpolicy_vllm.plugin.block_tables import BlockTables

SIZE = 32
STATE = State("one", SIZE, "memory", 200, 4, (100, 100), 3, 2, shared_blocks=2, stored=True)


def scheduler_of(*tables: list[int | None]) -> Any:
    """One whose requests have these block tables; None is a null block."""
    blocks = [[SimpleNamespace(block_id=block or 0, is_null=block is None) for block in table] for table in tables]
    return SimpleNamespace(
        block_size=SIZE,
        kvpolicy=SimpleNamespace(tables=None if len(tables) == 1 else BlockTables((SIZE,) * len(tables))),
        kv_cache_manager=SimpleNamespace(get_blocks=lambda request_id: SimpleNamespace(blocks=blocks)),
    )


def request_of(computed: int) -> Any:
    return SimpleNamespace(request_id="r", num_computed_tokens=computed, num_tokens=computed + 1)


@pytest.mark.parametrize(("computed", "lacking"), [(95, 0), (96, 1), (97, 1)])
def test_one_table(computed: int, lacking: int) -> None:
    blocks = RequestBlocks(scheduler_of([7, 8, 9]))
    assert (blocks.count, blocks.block_size, blocks.of(request_of(computed))) == (1, SIZE, [7, 8, 9])
    assert blocks.lacking(request_of(computed)) == lacking
    assert blocks.to_readmit(request_of(computed)) == 0
    assert blocks.reachable(STATE, 1024) == STATE


def test_several_tables() -> None:
    """The window's first block is gone; null blocks count for a table's length, and are held by nobody."""
    blocks = RequestBlocks(scheduler_of([7, 8, 9], [None, 4, 5]))
    assert (blocks.count, blocks.of(request_of(95))) == (2, [7, 8, 9, 4, 5])
    assert (blocks.lacking(request_of(95)), blocks.lacking(request_of(96))) == (0, 2)
    assert blocks.to_readmit(request_of(96)) == 2 * 4, "a recompute takes whole tables for a moment"


@pytest.mark.parametrize(("model_tokens", "waiting"), [(512, 0), (1024, 3)])
def test_several_tables_bound_what_can_be_set_up(model_tokens: int, waiting: int) -> None:
    """2 x (9 blocks of the victim + 4 to grow) + 2 spare ones are free at most: 15 blocks can be had, 31 cannot."""
    blocks = RequestBlocks(scheduler_of([7], [4]))
    assert blocks.reachable(STATE, model_tokens) == replace(STATE, shared_blocks=0, stored=False, waiting=waiting)
