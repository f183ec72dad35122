"""A caching policy that gives up nothing for newcomers, and the block that was used last where it has to."""

from __future__ import annotations

from collections.abc import Container, Sequence

from kvpolicy.caching import Lru
from kvpolicy.caching.base import Key


class Reluctant(Lru):
    name = "reluctant"

    def __init__(self, capacity: int = 0) -> None:
        super().__init__(capacity)

    def use(self, before: tuple[int, ...] | None, prompt: int, position: int) -> tuple[int, ...]:
        return -prompt, -position

    def make_room(self, count: int, protected: Container[Key], newcomers: Sequence[Key]) -> list[Key]:
        return []
