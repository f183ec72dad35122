"""The blocks of a request in a live engine, over all of its block tables, as a measured window counts them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvpolicy_vllm.bench.states import State, waiting_prompt_tokens


class RequestBlocks:
    """Counts blocks in one engine. ``scheduler``: kvpolicy's."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler, self._tables = scheduler, scheduler.kvpolicy.tables
        sizes = (int(scheduler.block_size),) if self._tables is None else self._tables.block_sizes
        self.count = len(sizes)
        """Block tables of a request."""
        self.block_size = min(sizes)
        """Tokens in a block; of tables with blocks of several sizes, in the smallest."""

    def of(self, request: Any) -> list[int]:
        """The blocks that the request holds."""
        tables = self._scheduler.kv_cache_manager.get_blocks(request.request_id).blocks
        return [int(block.block_id) for table in tables for block in table if not block.is_null]

    def lacking(self, request: Any) -> int:
        """Blocks that the request's next token needs and that it lacks."""
        tokens = int(request.num_computed_tokens) + 1
        if self._tables is not None:
            return int(self._tables.lacking_blocks(self._scheduler, request.request_id, tokens))
        return max(0, -(-tokens // self.block_size) - len(self.of(request)))

    def to_readmit(self, request: Any) -> int:
        """Upper bound of the blocks that the request needs at once when it comes back.

        Where a table holds a window or states, a recompute takes more for a moment than the request held before.
        """
        if self._tables is None:
            return 0
        return int(self._tables.max_held_blocks(int(request.num_tokens)))

    def reachable(self, state: State, model_tokens: int) -> State:
        """The state as far as an engine with several block tables can be brought into it.

        There a request finds no tokens of another one, nor of itself in host memory, unless each group has them: none
        are shared or stored beforehand. Requests that would not wait, since they need little memory, are left out.
        """
        if self._tables is None:
            return state
        free = self.count * (state.victim_blocks + state.growth_blocks) + state.spare_blocks
        waits = waiting_prompt_tokens(model_tokens) // self.block_size > free
        return replace(state, shared_blocks=0, stored=False, waiting=state.waiting if waits else 0)
