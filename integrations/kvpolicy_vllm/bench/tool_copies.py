"""Copies of the tool's own, under way while a victim is preempted, or in host memory before it is.

They belong to no request and no preemption. :mod:`kvpolicy.attribution.tool_effects` says what becomes of what they add
to steps.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from kvpolicy_vllm.plugin.host_copies import Copy, CopyBook


class ToolCopies:
    """The tool's copies in one window. ``pool``: vLLM's block pool."""

    def __init__(self, copies: CopyBook, pool: Any) -> None:
        self._copies = copies
        self._pool = pool
        self._kept: list[Copy] = []
        self._to_load: Copy | None = None
        self.blocks: list[Any] = []
        """Device blocks that are saved and loaded into. No request has them, so that no step waits for a save."""

    def take_blocks(self, count: int) -> None:
        """Take the window's device blocks. Call while enough are free."""
        if count:
            self.blocks = self._pool.get_new_blocks(count)

    def store(self, contents: Sequence[tuple[Hashable, int]]) -> None:
        """Queue a save of a running request's full blocks, by their hashes: a later swap finds them in host memory."""
        self._kept.append(self._copies.save_for_tool(contents))

    def prepare_load(self, count: int) -> None:
        """Queue the save of what :meth:`begin` is to load: ``count`` blocks, or what leaves host memory for others."""
        if ids := self._ids(count):
            self._to_load = self._copies.save_for_tool([(None, block_id) for block_id in ids])
            self._kept.append(self._to_load)

    def begin(self, save_count: int) -> None:
        """Queue a save of ``save_count`` blocks, as far as host memory has room for others, and the prepared load."""
        if ids := self._ids(save_count):
            self._kept.append(self._copies.save_for_tool([(None, block_id) for block_id in ids]))
        if self._to_load is not None:
            self._copies.load_for_tool(self._to_load, tuple(self._ids(len(self._to_load.blocks))))
            self._to_load = None

    def _ids(self, count: int) -> list[int]:
        """The first ``count`` blocks, and no more than a fourth of host memory holds."""
        return [int(block.block_id) for block in self.blocks[: min(count, self._copies.pool.total // 4)]]

    def clear(self) -> None:
        """Give everything back. Call after all copies have ended."""
        for copy in self._kept:
            self._copies.pool.release(copy)
        self._pool.free_blocks(self.blocks)
        self._kept, self._to_load, self.blocks = [], None, []
