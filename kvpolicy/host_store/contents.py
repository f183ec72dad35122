"""The records of host memory: contents of KV blocks, and the copies that need them."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

from kvpolicy.caching.tree import Node


@dataclass(slots=True, eq=False)
class HostBlock:
    """The content of one KV block that at least one copy needs, or that is cached or watched for the cache."""

    key: Hashable | None
    """The engine's hash of the block's tokens and of all before them, with what else decides the content: adapter,
    cache salt. None for a content that no other request can have."""
    place: Any
    """Where it was on the device when it was last seen there, a block id or a simulator's block; it is there while it
    is watched."""
    holders: list[Any]
    """Copies that need it, of a class made from :class:`HostCopy`, oldest first."""
    slot: int | None = None
    """Its place in host memory; None while only the device has it."""
    saved_by: int = 0
    """Number of the save that brings it to its slot; 0 before one is made."""
    node: Node | None = None
    """Its place among the chains of blocks; None where it is not for the cache."""

    @property
    def owner(self) -> Any:
        """The copy that its save is accounted to."""
        return self.holders[0]

    @property
    def cached(self) -> bool:
        """Whether it has a slot that no copy needs."""
        return not self.holders and self.key is not None and self.slot is not None


@dataclass(slots=True, eq=False)
class HostCopy:
    """What a request needs to go on without computing it: it was preempted, or another request had the same."""

    tokens: int
    """Tokens whose KV the blocks hold."""
    number: int = 0
    """Rises in the order in which an engine makes copies."""
    blocks: list[HostBlock] = field(default_factory=list)
    loading: bool = False
    """Whether a load is reading its slots: they cannot be given up."""
    gain_per_block: float | None = None
    """Predicted engine seconds that it saves over a recompute, per slot that it was expected to need when it was made;
    None without predictions."""

    @property
    def rank(self) -> tuple[float, int]:
        """See :func:`rank_of`."""
        return rank_of(self.tokens, self.gain_per_block)


def rank_of(tokens: int, gain_per_block: float | None) -> tuple[float, int]:
    """What decides which copy is given up where slots are short, the lowest first: the predicted gain per slot, and
    among copies without one, which rank below all others, the number of tokens."""
    return -inf if gain_per_block is None else gain_per_block, tokens


def by_owner(blocks: Iterable[HostBlock], cache: Any = None) -> list[tuple[Any, list[HostBlock]]]:
    """Copies in the order of their numbers, each with those of the blocks whose save is accounted to it. Blocks that
    are not needed any more are left out.

    ``cache``: a copy that saves of cached contents are accounted to, without which they are left out.
    """
    needed: dict[Any, list[HostBlock]] = {}
    for block in blocks:
        if block.holders:
            needed.setdefault(block.owner, []).append(block)
        elif block.cached and cache is not None:
            needed.setdefault(cache, []).append(block)
    return sorted(needed.items(), key=lambda item: item[0].number)


class Protected:
    """Keys of contents that may not be evicted: copies need them, or they are ``needed``."""

    def __init__(self, by_key: Mapping[Hashable, HostBlock], needed: Container[Hashable]) -> None:
        self._by_key, self._needed = by_key, needed

    def __contains__(self, key: object) -> bool:
        block = self._by_key.get(key)
        return block is None or not block.cached or key in self._needed


@dataclass(slots=True)
class CacheCounts:
    """What became of contents that no copy needed, in blocks since the start."""

    stored: int = 0
    """Saved because the device lost them."""
    refused: int = 0
    """Not saved: not worth a save and a load, or copies need all slots."""
    evicted: int = 0
    """Left their slots, to copies or to other contents."""
    spoiled: int = 0
    """Are not found any more, as a save or a load of them failed; those that copies needed included."""


class Copies:
    """Copies in the order in which they were made, given up by rank, the lowest first (see :func:`rank_of`). Those that
    are being loaded are not."""

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
