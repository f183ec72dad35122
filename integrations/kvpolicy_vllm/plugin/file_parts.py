"""Which ranks have their parts of blocks in files, and which blocks all are to drop, as some rank lacks its part: part
of the index of files."""

from __future__ import annotations

from collections.abc import Container, Sequence

MAX_DROPS = 20_000
"""Blocks that a step tells the ranks to drop, at most. What exceeds that stays until each of them gives it up."""


class FileParts:
    """One per engine core. ``ranks``: how many workers keep files, each its part of every block. Blocks are named by
    the digests of their keys."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._of: dict[bytes, int] = {}
        """How many ranks have their parts of each block."""
        self._drops: dict[bytes, None] = {}
        """Blocks of which some rank has its part no more, and others may have theirs."""
        self._ready = self._with_files = 0
        """Ranks that have said all that an earlier server left, and those of them of which the last report named
        blocks."""
        self._new: set[bytes] = set()
        """Blocks there that were stored before all of them had."""
        self._was_reset = False

    @property
    def ready(self) -> bool:
        """Whether all ranks have said what an earlier server left."""
        return self._ready >= self._ranks

    def has(self, digest: bytes) -> bool:
        """Whether all ranks have their parts, so that the block can be loaded."""
        return self._of.get(digest, 0) >= self._ranks

    def found(self, digests: Sequence[bytes], is_last: bool) -> int | None:
        """A rank names blocks of which an earlier server left its parts; ``is_last``: that is all.

        Where all ranks have said all by this, return how many of these blocks can be loaded, else None.
        """
        for digest in digests:
            self._of[digest] = self._of.get(digest, 0) + 1
        if not is_last:
            return None
        self._ready += 1
        self._with_files += bool(digests)
        if self._ready != self._ranks:
            return None
        self._drop_incomplete()
        new, self._new = len(self._new), set()
        if self._was_reset:  # nothing that was left is found
            return 0
        return sum(ranks >= self._ranks for ranks in self._of.values()) - new

    def _drop_incomplete(self) -> None:
        """All ranks have said what an earlier server left: what not all of them have nobody can load. Unless one has
        nothing, as another process still has its folder, or there was a reset meanwhile, since which counts are not
        whole."""
        if self._was_reset or self._with_files < self._ranks:
            return
        for digest, ranks in self._of.items():
            if ranks < self._ranks:
                self.drop(digest)

    def stored(self, digest: bytes) -> None:
        """All ranks have their parts."""
        if not self.ready and self._of.get(digest, 0) < self._ranks:
            self._new.add(digest)
        self._of[digest] = self._ranks

    def lost(self, digest: bytes) -> None:
        """Nobody finds the block any more, whoever has parts of it."""
        self._of.pop(digest, None)
        self._new.discard(digest)

    def gone(self, digest: bytes) -> None:
        """A rank has its part no more."""
        self.lost(digest)
        self.drop(digest)

    def drop(self, digest: bytes) -> None:
        """Some rank lacks its part: the others are to drop theirs, if there are others."""
        if self._ranks > 1 and len(self._drops) < MAX_DROPS:
            self._drops[digest] = None

    def take_drops(self, busy: Container[bytes]) -> tuple[bytes, ...]:
        """What all ranks are to drop, of which some rank has said since the last call that it lacks its part: nobody
        can load it. Blocks that are ``busy``, being stored again or loaded, are left alone until that has ended."""
        if not self._drops:
            return ()
        drops = self._drops
        self._drops = {digest: None for digest in drops if digest in busy}
        wanted = [digest for digest in drops if digest not in busy and not self.has(digest)]
        for digest in wanted:
            self.lost(digest)
        return tuple(wanted)

    def forget(self) -> None:
        """Nothing that was stored is found any more."""
        self._of.clear()
        self._new.clear()
        self._was_reset = True
