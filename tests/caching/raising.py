"""A caching policy that fails whenever it is to give something up."""

from __future__ import annotations

from collections.abc import Container

from kvpolicy.caching import Lru
from kvpolicy.caching.base import Key


class Raising(Lru):
    name = "raising"

    def __init__(self) -> None:
        super().__init__(0)

    def evict(self, count: int, protected: Container[Key]) -> list[Key]:
        raise ValueError("made up")
