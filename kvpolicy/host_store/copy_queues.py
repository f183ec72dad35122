"""Copies between device and host memory that are under way or wait for the link, and how long their saves take."""

from __future__ import annotations

from kvpolicy.events import Direction

RECENT_COPIES = 64
MAX_SAVE_BACKLOG_S = 1.0
"""Contents are saved for the cache while the saves before them end in so many seconds: who needs one of them waits for
those, and a link that is too slow for all of them carries those that it can."""
MAX_PIN_BACKLOG_S = 10.0
"""The same of what is pinned: whoever pins ever other prompts makes the others wait for no more than that."""


class RecentRate:
    """Seconds per byte, as a mean by bytes in which what was measured has a weight that falls by 1/64 with each one
    after it: a link or a disk that becomes slow is noticed however long it was fast."""

    def __init__(self) -> None:
        self._seconds = self._bytes = 0.0

    def add(self, seconds: float, moved_bytes: float) -> None:
        """So many bytes took so many seconds."""
        kept = 1 - 1 / RECENT_COPIES
        self._seconds = kept * self._seconds + seconds
        self._bytes = kept * self._bytes + moved_bytes

    def seconds(self, moved_bytes: float) -> float:
        """Expected seconds for so many bytes; 0 where nothing was measured."""
        return self._seconds / self._bytes * moved_bytes if self.known else 0.0

    @property
    def known(self) -> bool:
        """Whether anything was measured."""
        return self._bytes > 0

    def forget(self) -> None:
        self._seconds = self._bytes = 0.0


class CopyQueues:
    """Blocks of one rank that are being copied or wait for it, by direction. ``block_bytes``: bytes of a block."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._blocks: dict[Direction, int] = {"save": 0, "load": 0}
        self._saving = RecentRate()

    @property
    def blocks(self) -> int:
        """Blocks of both directions."""
        return sum(self._blocks.values())

    def add(self, direction: Direction, blocks: int) -> None:
        """So many blocks more, or fewer, are to be copied."""
        self._blocks[direction] += blocks

    def ended(self, direction: Direction, blocks: int, took_s: float | None = None) -> None:
        """A copy has ended, after as many seconds of its own on the link; None where that is not known."""
        self._blocks[direction] -= blocks
        if direction == "save" and took_s is not None:
            self._saving.add(took_s, blocks * self._block_bytes)

    def bytes(self, direction: Direction) -> int:
        return self._blocks[direction] * self._block_bytes

    @property
    def saving_s(self) -> float:
        """Expected seconds until all that waits to be saved is saved; 0 before any save has been timed."""
        return self._saving.seconds(self.bytes("save"))

    @property
    def takes_saves(self) -> bool:
        """Whether contents may be saved for the cache, as far as the saves before them are concerned: see
        :data:`MAX_SAVE_BACKLOG_S`. Before any save has been timed, where there is none before them."""
        if not self._saving.known:
            return not self._blocks["save"]
        return self.saving_s <= MAX_SAVE_BACKLOG_S

    @property
    def takes_pins(self) -> bool:
        """The same of what is pinned: see :data:`MAX_PIN_BACKLOG_S`. Before any save has been timed, always."""
        return self.saving_s <= MAX_PIN_BACKLOG_S
