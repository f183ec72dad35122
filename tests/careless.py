"""A caching policy whose code fails, for servers that must go on all the same: each method does in turn what it should,
and at times raises or gives up what it may not."""

from __future__ import annotations

import random
from collections.abc import Container, Sequence

from kvpolicy.caching import Lru
from kvpolicy.caching.base import Chain, Key


class Careless(Lru):
    """``lru`` at first."""

    name = "careless"

    def __init__(self) -> None:
        super().__init__(0)
        self._rng = random.Random(1)

    def asked(self, chain: Chain, hits: int) -> None:
        if self._rng.random() < 0.02:
            raise ValueError("made up")
        super().asked(chain, hits)

    def stored(self, chain: Chain, missing: Sequence[int]) -> None:
        super().stored(chain, missing)
        if self._rng.random() < 0.001:
            raise ValueError("made up")

    def evict(self, count: int, protected: Container[Key]) -> list[Key]:
        if self._rng.random() < 0.05:
            return ["never there"]
        return super().evict(count, protected)
