"""The trees that prompts' blocks form: each block with the one before it, shared by all who have it in their chain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload
from weakref import WeakValueDictionary

from kvpolicy.caching.base import Chain, Key


class Node:
    """A block of some chain. It lives as long as somebody holds it, or one that continues it."""

    __slots__ = ("__weakref__", "key", "parent", "position", "reach")

    def __init__(self, key: Key, parent: Node | None) -> None:
        self.key, self.parent = key, parent
        self.position: int = 0 if parent is None else parent.position + 1
        """Index in every chain that it is of."""
        self.reach = self.position + 1
        """Number of blocks of the longest chain that it was seen in."""

    @property
    def chain(self) -> Path:
        return Path(self)


class Path(Sequence[Key]):
    """The chain that ends with a node. O(1) to make; an element is found from the end."""

    __slots__ = ("_last",)

    def __init__(self, last: Node) -> None:
        self._last = last

    def __len__(self) -> int:
        return self._last.position + 1

    @property
    def reach(self) -> int:
        """Number of blocks of the longest chain that its last block was seen in."""
        return self._last.reach

    @overload
    def __getitem__(self, index: int) -> Key: ...

    @overload
    def __getitem__(self, index: slice) -> list[Key]: ...

    def __getitem__(self, index: int | slice) -> Key | list[Key]:
        node = self._last
        if index == node.position:  # what is asked for nearly always
            return node.key
        if isinstance(index, slice):
            return list(self)[index]
        blocks = node.position + 1
        wanted = index + blocks if index < 0 else index
        if not 0 <= wanted < blocks:
            raise IndexError(f"block {index} of a chain of {blocks}")
        while node.position > wanted:
            assert node.parent is not None
            node = node.parent
        return node.key

    def __iter__(self) -> Iterator[Key]:
        keys = list(reversed(self))
        return reversed(keys)

    def __reversed__(self) -> Iterator[Key]:
        node: Node | None = self._last
        while node is not None:
            yield node.key
            node = node.parent


def reach_of(chain: Chain) -> int:
    """Number of blocks of the longest chain that is known to begin with this one."""
    return chain.reach if isinstance(chain, Path) else len(chain)


class Tree:
    """All blocks that somebody holds. A key stands for the tokens of its block and of all before it, so it has the same
    place in every chain."""

    def __init__(self) -> None:
        self._nodes: WeakValueDictionary[Key, Node] = WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._nodes)

    def nodes(self, chain: Chain, first: int = 0) -> list[Node]:
        """The node of each block of a chain, from that index on. O(these blocks), of which only those that nobody holds
        are looked up: the last one that is there has all before it."""
        known, last = len(chain), None
        while known and (last := self._nodes.get(chain[known - 1])) is None:
            known -= 1
        _reach(last, len(chain))
        found = _up_to(last, first)
        for key in chain[known:]:
            last = self._nodes[key] = Node(key, last)
            last.reach = len(chain)
            if last.position >= first:
                found.append(last)
        return found


def _reach(last: Node | None, blocks: int) -> None:
    """A block was seen in a chain of so many blocks, and so were those before it, none of which reaches less far."""
    node = last
    while node is not None and node.reach < blocks:
        node.reach = blocks
        node = node.parent


def _up_to(last: Node | None, first: int) -> list[Node]:
    """The nodes of the chain that ends with this one, from that index on."""
    found, node = [], last
    while node is not None and node.position >= first:
        found.append(node)
        node = node.parent
    found.reverse()
    return found
