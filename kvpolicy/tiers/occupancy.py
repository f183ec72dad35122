"""What takes room in a tier of files, within its bound, and which blocks are given up for others."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from math import inf

from kvpolicy.caching import CachingPolicy
from kvpolicy.tiers.block_format import NO_PARENT, BlockName
from kvpolicy.tiers.idle_folders import IdleFolders

EVICTS_AGAIN_S = 60.0
"""No block is given up so long after a file could not be removed or written, as on a disk that is read-only: nothing
would take its place."""


class Occupancy:
    """Of one tier. Blocks that are there or are being written take room, and the ``policy`` knows these; and so do
    files that are being removed or cannot be, and folders that no process owns, of whose bytes this tier counts its
    share where several ``processes`` have each a part of one bound. ``clock``: seconds. ``stuck``: files that could not
    be removed when the tier was opened."""

    def __init__(
        self,
        policy: CachingPolicy,
        idle: IdleFolders,
        file_bytes: int,
        clock: Callable[[], float],
        processes: int = 1,
        stuck: int = 0,
    ) -> None:
        self._policy, self._file_bytes, self._clock = policy, file_bytes, clock
        self._processes = processes
        self.idle = idle
        self._leaving: dict[bytes, BlockName] = {}
        """Blocks whose files are being removed, and are not gone for certain."""
        self._evicted: set[bytes] = set()
        """Those of them that were given up for others, and are there again where their files cannot be removed."""
        self._replaced: set[bytes] = set()
        """Those of them that a block takes the place of which waits to be written: its file is made when theirs is
        gone, so the two take room once."""
        self._outdated: deque[bytes] = deque()
        """Blocks that nobody will ask for again, among others that are not there any more."""
        self._stuck = stuck
        """Files that could not be removed. They take room until the tier is opened anew."""
        self._evicts_s = -inf
        """When blocks may be given up again."""

    @property
    def leaving(self) -> Sequence[BlockName]:
        """Blocks whose files are being removed."""
        return tuple(self._leaving.values())

    @property
    def other_files(self) -> int:
        """Files that take room beside those of blocks that are there or are being written."""
        return len(self._leaving) - len(self._replaced) + self._stuck

    @property
    def free(self) -> int:
        """Blocks that there is room for without giving up any; negative where there are too many."""
        idle = -(-self.idle.used_bytes // (self._processes * self._file_bytes))
        return self._policy.capacity - len(self._policy) - self.other_files - idle

    @property
    def room(self) -> int:
        """Blocks that a store may bring without giving up any.

        Folders that others may have yet to claim take room, but what they exceed the bound by is not made up for by
        blocks of this tier: ranks that start together would give up what they had for one another's folders. A new
        block takes the place of one of its own until then, and the bytes in the directory do not grow.
        """
        if not self.idle.may_be_claimed(self._clock()):
            return self.free
        return max(self.free, min(0, self._policy.capacity - len(self._policy) - self.other_files))

    def evict(self, wanted: int, protected: Container[bytes]) -> list[bytes]:
        """Give up blocks so that ``wanted`` further ones have room, none of the protected ones, and those first that
        nobody will ask for again. Where there are folders of processes that are gone, and that nobody is about to
        claim, they make room instead, later. Where all blocks would make no room, because what cannot be removed takes
        it, none is; nor for a while after one could not be removed or written."""
        room, now_s = self.room, self._clock()
        waits = self.idle.any and not self.idle.may_be_claimed(now_s)
        if wanted <= room or waits or now_s < self._evicts_s or room + len(self._policy) <= 0:
            return []
        evicted = self._take_outdated(wanted - room, protected)
        others = self._policy.evict(wanted - room - len(evicted), protected)
        return evicted + [digest for digest in others if isinstance(digest, bytes)]

    def _take_outdated(self, count: int, protected: Container[bytes]) -> list[bytes]:
        taken: list[bytes] = []
        passed_over = []
        while self._outdated and len(taken) < count:
            digest = self._outdated.popleft()
            if digest in protected:
                passed_over.append(digest)
            elif digest in self._policy:
                self._policy.lost(digest)
                taken.append(digest)
        self._outdated.extend(passed_over)
        return taken

    def outdate(self, digests: Iterable[bytes]) -> None:
        """Nobody will ask for these blocks again: they are given up before others."""
        self._outdated = deque(digests)

    def failed(self) -> None:
        """A block could not be written."""
        self._evicts_s = self._clock() + EVICTS_AGAIN_S

    def leave(self, names: Sequence[BlockName], evicted: bool = False) -> None:
        """The files of these blocks are to be removed. ``evicted``: since :meth:`evict` gave them up."""
        for name in names:
            self._leaving[name.key] = name
            if evicted:
                self._evicted.add(name.key)

    def replace(self, names: Sequence[BlockName]) -> None:
        """Each of these blocks that leave has one that takes its place."""
        self._replaced.update(name.key for name in names)

    def is_leaving(self, digest: bytes) -> bool:
        return digest in self._leaving

    def evicted(self, digest: bytes) -> BlockName | None:
        """A block that was given up for others and whose file may still be there; None for any other one."""
        return self._leaving[digest] if digest in self._evicted else None

    def drop(self, digest: bytes) -> bool:
        """A block is not to be there again. Whether it would have been, where its file cannot be removed."""
        was_evicted = digest in self._evicted
        self._evicted.discard(digest)
        return was_evicted

    def left(self, name: BlockName, gone: bool) -> bool:
        """The file of a block that leaves is gone, or cannot be removed. Whether the block was given up for others: it
        is there again in the second case, known to the policy."""
        self._leaving.pop(name.key, None)
        self._replaced.discard(name.key)
        was_evicted = self.drop(name.key)
        if gone:
            return was_evicted
        if was_evicted:
            self.failed()
            chain = [name.key] if name.parent == NO_PARENT else [name.parent, name.key]
            self._policy.stored(chain, [len(chain) - 1])
        else:
            self._stuck += 1
        return was_evicted
