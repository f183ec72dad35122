"""What a request loses with its blocks, over a scheduler that is made up. What else a situation says is tested over
vLLM's scheduler, in `tests/vllm/test_controller.py` and `tests/vllm/test_same_schedule.py`; what can be loaded back, in
`tests/plugin/test_block_tables.py`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvpolicy.host_store import HostCopy, HostStore
from kvpolicy_vllm.plugin.situation import RunningView, contents_of, situation_of


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


@pytest.mark.parametrize(("drops", "saved"), [(False, 1.0), (True, 2.0)])
def test_what_is_a_drafting_victims_own_is_saved_although_it_is_expected_to_stay(drops: bool, saved: float) -> None:
    """Of three blocks two are expected to stay. One of these has a hash that stands for another content with a drafter:
    it is saved at once, beside the one that is lost."""
    store, loses = HostStore(8), scheduler(["a", "b", "c"], use_eagle_block_drop=drops, block_size=16, running=[])
    store.add(HostCopy(32), [("a", 0), ("b", 7)])
    loses.get_num_unfinished_requests = lambda: 1
    manager = loses.kv_cache_manager
    manager.block_pool = SimpleNamespace(get_num_free_blocks=lambda: 5, num_gpu_blocks=20)
    for block in manager.get_blocks("r").blocks[0]:
        block.ref_cnt = 1
    request = SimpleNamespace(
        request_id="r", num_computed_tokens=48, num_prompt_tokens=40, num_output_tokens=8, num_preemptions=0, priority=0
    )
    copies: Any = SimpleNamespace(pool=store, block_bytes=4096, segment_bytes=64, queued_bytes=lambda direction: 0)
    survival: Any = SimpleNamespace(hit_blocks=lambda *_: 2.0, absence_tokens=lambda cause: 100.0)
    found = situation_of(request, loses, RunningView(loses, request), "displaced", copies, survival, 0.0)
    assert (found.held_blocks, found.hit_blocks, found.save_blocks) == (3, 2.0, saved)
