"""The base class of caching policies: which blocks a tier of bounded size keeps.

A block is known by its content, and its content includes all tokens before it. So the blocks of a prompt are a chain,
each the parent of the next, and all chains together are trees. A block is of use only where all blocks before it are
there: a hit is a chain's leading blocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Hashable, Iterable, Sequence
from typing import TypeVar

Key = Hashable
Chain = Sequence[Key]
"""The blocks of a prompt, its first one first, none of them twice."""
OneKey = TypeVar("OneKey", bound=Key, covariant=True)


class Part(tuple[OneKey, ...]):
    """Blocks that follow each other in a prompt, the first of which is its block ``first``: passed for the whole where
    that would be long."""

    first: int

    def __new__(cls, keys: Iterable[OneKey], first: int = 0) -> Part[OneKey]:
        part = super().__new__(cls, keys)
        part.first = first
        return part


class CachingPolicy(ABC):
    """Knows the blocks that are there, at most ``capacity``, and chooses which of them to give up.

    Its owner calls :meth:`asked` for every prompt, :meth:`extended` where a request has generated blocks beyond its
    prompt, and, whenever it has blocks to store, :meth:`evict` for as many as there is no room for, then
    :meth:`stored`. Blocks may be stored long after they were asked for.
    """

    name: str

    def __init__(self, capacity: int = 0) -> None:
        self.capacity = capacity
        """Number of blocks there may be; whoever owns a policy that was loaded by a module path sets it before the
        first call."""

    @abstractmethod
    def __contains__(self, key: Key) -> bool: ...

    @abstractmethod
    def __len__(self) -> int:
        """Number of blocks that are there."""

    def hits(self, chain: Chain) -> int:
        """Number of leading blocks that are there."""
        count = 0
        for key in chain:
            if key not in self:
                break
            count += 1
        return count

    @abstractmethod
    def asked(self, chain: Chain, hits: int) -> None:
        """A request has this prompt, whose first ``hits`` blocks are there."""

    def extended(self, chain: Chain, asked: int) -> None:  # noqa: B027  # most policies have nothing to learn from it
        """A request whose prompt was asked for, and had the first ``asked`` blocks of this chain, has generated what
        the others hold. May be called again as the request goes on."""

    @abstractmethod
    def stored(self, chain: Chain, missing: Sequence[int]) -> None:
        """The blocks of the prompt with these indices, which were not there, are there from now on. In files the chain
        may be a :class:`Part` of it, in which the indices are."""

    @abstractmethod
    def evict(self, count: int, protected: Container[Key]) -> list[Key]:
        """Give up ``count`` blocks, none of them ``protected``; fewer where there are not as many."""

    def make_room(self, count: int, protected: Container[Key], newcomers: Sequence[Key]) -> list[Key]:
        """Give up ``count`` blocks, or fewer, for others: fewer where a policy would rather keep what is there.

        ``newcomers``: what is to be stored, each behind those that it continues; the last ones are left out where room
        is short.
        """
        return self.evict(count, protected)

    def _replacing(self, count: int, newcomers: Sequence[Key]) -> Sequence[Key]:
        """Those of the newcomers for which ``count`` blocks are given up: the first ones take what room there is."""
        first = min(max(0, len(newcomers) - count), max(0, self.capacity - len(self)))
        return newcomers[first : first + count]

    def hold_began(self, key: Key) -> None:  # noqa: B027  # what is held is among the protected ones besides
        """Every eviction will have this block, there or not, among its ``protected`` ones, until :meth:`hold_ended`. So
        a policy may set it aside, instead of passing over it at each of them. It is told once, whatever holds the
        block: hints, copies of preempted requests, loads, or several of these."""

    def hold_ended(self, key: Key) -> None:  # noqa: B027
        """This block, there or not, may be given up again, in its turn: nothing holds it any more."""

    @abstractmethod
    def lost(self, key: Key) -> None:
        """A block that was there is gone, whatever the policy would have chosen."""
