"""Which blocks of a request a copy needs, where layers keep different parts of what a request computed.

vLLM puts the layers of a model into groups, each with a block table of its own for every request. Where a layer attends
to a window, or keeps a state, the table has null blocks for what is needed no more. What is still needed follows from
the number of tokens and from vLLM's own rule for the group. Imports no vLLM: all is read from the scheduler object.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvpolicy.errors import KVPolicyError

LONG = 1 << 30
"""Tokens, more than any window."""
Position = tuple[int, int]
"""A group, and an index into its block table."""


class MissingBlock(KVPolicyError, RuntimeError):
    """A block that the request needs is not in its block table."""


@dataclass(frozen=True, slots=True)
class BlockTables:
    """The block tables of an engine. Where one holds every token's block, none of this is needed."""

    block_sizes: tuple[int, ...]
    """Tokens in a block, by group."""

    def growth_tokens(self, scheduler: Any) -> float:
        """Tokens that a long request computes for each block by which it grows.

        A group of windows or states gives a block back for each that it takes. Where all groups do, each block taken
        counts: shorter requests grow by that.
        """
        managers = scheduler.kv_cache_manager.coordinator.single_type_managers
        growing = [
            size
            for manager, size in zip(managers, self.block_sizes, strict=True)
            if manager.get_num_skipped_tokens(LONG) == 0
        ]
        return 1.0 / sum(1.0 / size for size in growing or self.block_sizes)

    def needed(self, scheduler: Any, request_id: str, tokens: int) -> dict[Position, Any]:
        """The blocks without which a request cannot go on after ``tokens`` computed tokens.

        Raises MissingBlock where one of them is null, or is not there.
        """
        tables = scheduler.kv_cache_manager.get_blocks(request_id).blocks
        found: dict[Position, Any] = {}
        for group, (table, positions) in enumerate(zip(tables, self._ranges(scheduler, tokens), strict=True)):
            for index in positions:
                if index >= len(table) or table[index].is_null:
                    raise MissingBlock(f"block {index} of group {group} is missing at {tokens} tokens")
                found[group, index] = table[index]
        return found

    def findable_tokens(self, scheduler: Any, request: Any) -> int:
        """Computed tokens that the request would find in the prefix cache at once: those for which every group has what
        it needs."""
        manager = scheduler.kv_cache_manager
        if not manager.enable_caching or request.skip_reading_prefix_cache:
            return 0
        most = min(request.num_computed_tokens, request.num_tokens - 1)
        return int(manager.coordinator.find_longest_cache_hit(request.block_hashes, most)[1])

    def to_load(
        self, scheduler: Any, block_ids: Sequence[Sequence[int]], local_tokens: int, tokens: int
    ) -> dict[Position, int]:
        """Device blocks to load into, for a request that goes on after ``tokens`` tokens of which the first
        ``local_tokens`` are on the device. ``block_ids``: its block tables."""
        return {
            (group, index): block_ids[group][index] for group, index in self._lacking(scheduler, local_tokens, tokens)
        }

    def load_blocks(self, scheduler: Any, local_tokens: int, tokens: int) -> int:
        """Number of blocks that :meth:`to_load` has."""
        return sum(1 for _ in self._lacking(scheduler, local_tokens, tokens))

    def max_held_blocks(self, tokens: int) -> int:
        """Upper bound of the blocks that a request holds before it has more than ``tokens`` tokens: all of them."""
        return sum(-(-(tokens + 1) // size) for size in self.block_sizes)

    def lacking_blocks(self, scheduler: Any, request_id: str, tokens: int) -> int:
        """Blocks that the request lacks for ``tokens`` tokens; an upper bound where it keeps states.

        Where caching is off, a group of states has one block for the whole request."""
        tables = scheduler.kv_cache_manager.get_blocks(request_id).blocks
        return sum(
            max(0, -(-tokens // size) - len(table)) for size, table in zip(self.block_sizes, tables, strict=True)
        )

    def _lacking(self, scheduler: Any, local_tokens: int, tokens: int) -> Iterator[Position]:
        """What a request needs after ``tokens`` tokens beside the blocks of the first ``local_tokens`` of them."""
        for group, positions in enumerate(self._ranges(scheduler, tokens)):
            first = local_tokens // self.block_sizes[group]
            yield from ((group, index) for index in positions if index >= first)

    def _ranges(self, scheduler: Any, tokens: int) -> list[range]:
        """The indices needed, by group."""
        managers = scheduler.kv_cache_manager.coordinator.single_type_managers
        return [
            range(max(0, manager.get_num_skipped_tokens(tokens)) // size, -(-tokens // size))
            for manager, size in zip(managers, self.block_sizes, strict=True)
        ]
