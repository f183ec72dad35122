"""Which contents that the device loses, and no copy needs, are saved for the cache, and which of them first."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from typing import TypeAlias

from kvpolicy.caching.base import CachingPolicy
from kvpolicy.caching.by_hints import Hinted
from kvpolicy.caching.tree import Node
from kvpolicy.host_store.contents import HostBlock

Placed: TypeAlias = tuple[Node, HostBlock]
"""A block of a chain that may be cached."""


class CacheAdmission:
    """Asked of every content that the cache could take; its owner sets what it goes by. Everything is admitted, and
    nothing is handed on, before that."""

    def __init__(self) -> None:
        self.takes_saves: Callable[[], bool] = lambda: True
        """Whether more may be saved for the cache now, by what waits to be saved."""
        self.takes_pins = self.takes_saves
        """Whether what is pinned may be, where others may not."""
        self.worth_saving: Callable[[int], bool] = lambda blocks: True
        """Whether blocks of a chain of so many blocks are saved for the cache: where saving and loading all of them
        would cost more than computing them, none is."""
        self.worth_keeping: Callable[[int], bool] = lambda blocks: True
        """Whether those that a copy needed, and that are in slots already, stay for the cache."""
        self.worth_handing_on: Callable[[Hashable, int], bool] = lambda key, blocks: False
        """Whether a content is saved for a tier below, where the caching policy would rather keep what is there."""

        self.in_order: Callable[[Sequence[Hashable]], Sequence[Hashable]] | None = None
        """What is to be stored, those first that are to have room, each behind those that it continues; None: by their
        places in their prompts."""

    def admitted(self, blocks: Iterable[HostBlock], cache: CachingPolicy) -> list[Placed]:
        """Those of the blocks that are saved for the cache if there is room."""
        worth = [(block.node, block) for block in blocks if block.node and self.worth_saving(block.node.reach)]
        return self._not_to_miss(worth, cache) if worth and not self.takes_saves() else worth

    def in_turn(self, wanted: Iterable[Placed], held: Container[Hashable]) -> list[Placed]:
        """These in the order in which they get slots: first what hints hold back, and then by :attr:`in_order`."""
        placed = sorted(wanted, key=lambda item: (item[0].key not in held, item[0].position))
        if self.in_order is not None:
            order = self.in_order([node.key for node, _ in placed if node.key not in held])
            place = {key: at for at, key in enumerate(order)}
            placed.sort(key=lambda item: place.get(item[0].key, -1))
        return placed

    def handed_on(self, left_out: Iterable[Placed]) -> tuple[list[Placed], list[Placed]]:
        """Of what the caching policy would leave out: what is saved for a tier below, and what is not."""
        handed_on: list[Placed] = []
        refused: list[Placed] = []
        for node, block in left_out:
            (handed_on if self.worth_handing_on(node.key, node.reach) else refused).append((node, block))
        return handed_on, refused

    def _not_to_miss(self, worth: list[Placed], cache: CachingPolicy) -> list[Placed]:
        """Those of these that are saved although too much waits to be saved: what is pinned, unless far too much does;
        and whatever waits, what blocks continue that are in slots, or come to them now, and are of no use without it.
        The device loses the end of a prompt first."""
        if not isinstance(cache, Hinted):
            return []
        pins = self.takes_pins()
        continued: set[Hashable] = set()
        taken = []
        for node, block in sorted(worth, key=lambda item: item[0].position, reverse=True):
            if node.key in continued or cache.is_needed(node.key, pins):
                taken.append((node, block))
                if node.parent is not None:
                    continued.add(node.parent.key)
        taken.reverse()
        return taken
