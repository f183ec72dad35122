"""What a step takes from others, over blocks that are made up."""

from __future__ import annotations

from types import SimpleNamespace

from kvpolicy.host_store import HostCopy, HostStore
from kvpolicy_vllm.plugin.device_blocks import given_away


def test_blocks_are_given_away_that_were_watched_and_hold_something_else() -> None:
    store = HostStore(8)
    store.add(HostCopy(40), [("a", 0), ("b", 1), ("c", 2), ("d", 3)])
    output = SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(block_ids=([0, 1, 4],))],
        scheduled_cached_reqs=SimpleNamespace(new_block_ids=[None, ([2],)]),
    )
    blocks = [SimpleNamespace(block_hash=value) for value in ("a", None, "x", "y", "z")]
    assert [*given_away(output, [3], store, blocks)] == [3, 1, 2], "a was hit, and nobody watches the last one"
