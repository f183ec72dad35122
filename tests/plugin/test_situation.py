"""What a request loses with its blocks, over a scheduler that is made up. What else a situation says is tested over
vLLM's scheduler, in `tests/vllm/test_controller.py` and `tests/vllm/test_same_schedule.py`; what can be loaded back, in
`tests/plugin/test_block_tables.py`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvpolicy.host_store import HostCopy, HostStore
from kvpolicy_vllm.plugin.situation import contents_of


def scheduler(hashes: list[str | None], clears: bool = False, **more: Any) -> Any:
    blocks = [SimpleNamespace(block_id=number, block_hash=value) for number, value in enumerate(hashes)]
    manager = SimpleNamespace(get_blocks=lambda name: SimpleNamespace(blocks=[blocks]))
    return SimpleNamespace(kv_cache_manager=manager, needs_kv_cache_zeroing=clears, **more)


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


@pytest.mark.parametrize(
    ("drafter", "kept", "kept_later"),
    [
        ({"use_eagle": False, "use_eagle_block_drop": False}, ["a", "b", "c"], ["a", "b", "c"]),
        ({"use_eagle_block_drop": True}, ["a", None, "c"], [None, None, "c"]),
        ({"use_eagle": True, "use_eagle_block_drop": False}, ["a", None, "c"], [None, None, "c"]),
    ],
    ids=["none", "blocks dropped", "blocks not dropped"],
)
def test_what_a_drafter_keeps_of_the_token_behind_a_block_is_not_shared_by_its_hash(
    drafter: dict[str, bool], kept: list[Any], kept_later: list[Any]
) -> None:
    """A block of the device that two requests hold is one content; two of equal tokens are not, nor is one that came to
    a place whose content is in host memory."""
    store = HostStore(8)
    store.add(HostCopy(32), [("a", 0), ("b", 7)])
    situation: Any = SimpleNamespace(held_blocks=3, computed_tokens=48, block_size=16)
    loses = scheduler(["a", "b", "c"], **drafter)
    assert contents_of("r", situation, loses, store, False) == [*zip(kept, [0, 1, 2], strict=True)]
    store.lost([0])
    assert contents_of("r", situation, loses, store, False) == [*zip(kept_later, [0, 1, 2], strict=True)]
