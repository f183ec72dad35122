"""Device blocks that are held back from other requests until what a preempted request had in them is saved.

On vLLM's model runner v2, a step clears the blocks that it gives to requests with states, and copies states into them,
before it calls a connector. A victim's block that the same step gives away would be saved too late. There the blocks of
each save are held, beside whoever else has them, until every worker has confirmed it; meanwhile the connector says that
blocks are about to come free, and vLLM lets the request that lacks them wait a step instead of preempting the next.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from kvpolicy.host_store import HostBlock

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def overwrites_before_saves(config: VllmConfig, kv_cache: KVCacheConfig) -> bool:
    """Whether a step clears new blocks, or copies states into them, before a connector can save what was there."""
    clears = getattr(kv_cache, "needs_kv_cache_zeroing", False)  # not in all versions, nor is the model runner v2
    return bool(clears and getattr(config, "use_v2_model_runner", False))


class PinnedBlocks:
    """The blocks of unfinished saves. ``pool``: vLLM's block pool."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._held: dict[HostBlock, Any] = {}

    @property
    def any(self) -> bool:
        """Whether blocks are held that will come free."""
        return bool(self._held)

    def hold(self, saves: Iterable[HostBlock]) -> None:
        """Hold the blocks that are about to be saved, each of which is still held by the request that loses it."""
        for save in saves:
            if save not in self._held:
                block = self._held[save] = self._pool.blocks[save.place]
                self._pool.touch([block])

    def release_others(self, unfinished: Collection[HostBlock]) -> None:
        """Give back the blocks of all saves but the unfinished ones."""
        done = [save for save in self._held if save not in unfinished]
        if done:
            self._pool.free_blocks([self._held.pop(save) for save in reversed(done)])
