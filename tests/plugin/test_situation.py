"""What a request loses with its blocks, over a scheduler that is made up. What else a situation says is tested over
vLLM's scheduler, in `tests/vllm/test_controller.py` and `tests/vllm/test_same_schedule.py`; what can be loaded back, in
`tests/plugin/test_block_tables.py`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvpolicy.host_store import HostCopy, HostStore
from kvpolicy_vllm.plugin.situation import contents_of


def scheduler(hashes: list[str | None], clears: bool = False) -> Any:
    blocks = [SimpleNamespace(block_id=number, block_hash=value) for number, value in enumerate(hashes)]
    manager = SimpleNamespace(get_blocks=lambda name: SimpleNamespace(blocks=[blocks]))
    return SimpleNamespace(kv_cache_manager=manager, needs_kv_cache_zeroing=clears)


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
