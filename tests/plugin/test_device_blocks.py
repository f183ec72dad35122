"""What a step takes from others, and what a request loses, over a scheduler that is made up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvpolicy.host_store import HostCopy, HostStore
from kvpolicy_vllm.plugin.device_blocks import given_away
from kvpolicy_vllm.plugin.situation import contents_of


def scheduler(hashes: list[str | None], clears: bool = False) -> Any:
    blocks = [SimpleNamespace(block_id=number, block_hash=value) for number, value in enumerate(hashes)]
    manager = SimpleNamespace(get_blocks=lambda name: SimpleNamespace(blocks=[blocks]))
    return SimpleNamespace(kv_cache_manager=manager, needs_kv_cache_zeroing=clears, blocks=blocks)


def test_blocks_are_given_away_that_were_watched_and_hold_something_else() -> None:
    store = HostStore(8)
    store.add(HostCopy(40), [("a", 0), ("b", 1), ("c", 2), ("d", 3)])
    output = SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(block_ids=([0, 1, 4],))],
        scheduled_cached_reqs=SimpleNamespace(new_block_ids=[None, ([2],)]),
    )
    blocks = scheduler(["a", None, "x", "y", "z"]).blocks
    assert [*given_away(output, [3], store, blocks)] == [3, 1, 2], "a was hit, and nobody watches the last one"


@pytest.mark.parametrize(
    ("clears", "measured", "kept"),
    [(False, False, ["a", "b", None]), (True, False, [None, None, None]), (False, True, [None, "b", None])],
)
def test_a_request_loses_its_blocks_by_hash_where_they_stay(clears: bool, measured: bool, kept: list[Any]) -> None:
    """Those of a block that is not full count for nothing; a tool has one of the others in host memory."""
    store = HostStore(8)
    if measured:
        store.add(HostCopy(16), [("b", 7)])
        store.lost([7])
    situation: Any = SimpleNamespace(held_blocks=3, computed_tokens=40, block_size=16)
    found = contents_of("r", situation, scheduler(["a", "b", "early"], clears), store, measured)
    assert found == [*zip(kept, [0, 1, 2], strict=True)]
