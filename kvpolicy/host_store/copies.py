"""The copies that need contents in host memory, and which of them are given up where slots are short."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterator

from kvpolicy.host_store.contents import HostBlock, HostCopy


class Copies:
    """Copies in the order in which they were made, given up by rank, the lowest first (see
    :func:`kvpolicy.host_store.contents.rank_of`). Those that are being loaded are not."""

    def __init__(self) -> None:
        self._copies: dict[HostCopy, None] = {}

    def __iter__(self) -> Iterator[HostCopy]:
        return iter(self._copies)

    def __len__(self) -> int:
        return len(self._copies)

    def add(self, copy: HostCopy) -> None:
        self._copies[copy] = None

    def remove(self, copy: HostCopy) -> bool:
        """Whether it was among them."""
        return self._copies.pop(copy, self) is None

    def slots_below(self, rank: tuple[float, int], own: Container[Hashable]) -> int:
        """Slots that only copies of a lower rank use, save those of contents with a key among ``own``. O(blocks of
        these copies): a block counts where all copies that need it are of a lower rank."""
        below = {copy for copy in self._copies if copy.rank < rank and not copy.loading}
        return sum(
            block.slot is not None and (block.key is None or block.key not in own) and below.issuperset(block.holders)
            for block in {block: None for copy in below for block in copy.blocks}
        )

    def next_given_up(self, block: HostBlock) -> HostCopy | None:
        """The copy of the lowest rank that uses slots or needs the block; None where there is none."""
        copies = (
            copy
            for copy in self._copies
            if not copy.loading and (copy in block.holders or any(one.slot is not None for one in copy.blocks))
        )
        return min(copies, key=lambda copy: copy.rank, default=None)
