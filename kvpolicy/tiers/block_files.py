"""Writes and reads block files, each whole or not at all: a temporary file, then a rename.

Nothing waits for the device (no fsync): after a loss of power a file may be damaged, which its checksum shows, or
missing. Both cost a recompute, as if the block had not been stored. Where the file system allows it, reads and writes
are direct, past the page cache, which would otherwise hold every block a second time.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count

import numpy as np
from numpy.typing import NDArray

from kvpolicy.tiers.base import Pieces
from kvpolicy.tiers.block_format import PAGE, BlockLayout, BlockName, Damaged, aligned_memory, is_aligned
from kvpolicy.tiers.faults import FULL
from kvpolicy.tiers.owned_folder import LOCK, OwnedFolder

MAX_VECTORS = 1000
"""Pieces of memory in one call of the system; it has a limit of 1,024."""
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
"""Never through a link, and without waiting where somebody put a pipe in the place of a file."""
WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
PROBE = "probe"
OUTDATED_NS = 0
"""Time of the last use of a block that only the process which has stored it could ask for; nanoseconds."""


class Scratch:
    """Memory that one thread reads and writes by."""

    def __init__(self, layout: BlockLayout) -> None:
        self._layout = layout
        self.header = aligned_memory(PAGE)
        self.padding = np.zeros(layout.padding, np.uint8)
        self._block: NDArray[np.uint8] | None = None

    @property
    def block(self) -> NDArray[np.uint8]:
        """A block filled up to whole pages, for pieces of memory that direct reads and writes do not take."""
        if self._block is None:
            self._block = aligned_memory(self._layout.file_bytes - PAGE)
        return self._block


class BlockFiles:
    """The block files of one folder. Methods may be called by several threads, each with a scratch of its own."""

    def __init__(self, folder: OwnedFolder, layout: BlockLayout) -> None:
        self._folder, self._layout = folder, layout
        self.direct = 0
        """The flag of direct reads and writes; 0 where they are buffered."""
        self.lasting = True
        """Whether another process may ask for what is written from now on. What it may not says so by its time."""
        self._numbers = count()

    def probe(self) -> bool:
        """Find out whether this file system allows direct reads and writes; False where it has no room to try that, so
        that it goes by whether a file can be opened for them. Raises OSError where nothing can be written for another
        reason."""
        page = aligned_memory(PAGE)
        for flag in (getattr(os, "O_DIRECT", 0), 0):
            try:
                with _opened(PROBE, WRITE | flag, self._folder.writing) as opened:
                    if os.writev(opened, [page.data]) < PAGE:
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                with _opened(PROBE, READ | flag, self._folder.writing) as opened:
                    if os.readv(opened, [page.data]) == PAGE:
                        self.direct = flag
                        return True
            except OSError as error:
                if error.errno in FULL:
                    self.direct = self._direct_flag()
                    return False
                if error.errno != errno.EINVAL or not flag:
                    raise
            finally:
                self._unlink_temporary(PROBE)
        return True

    def _direct_flag(self) -> int:
        """The one by which a file that is there can be opened."""
        flag = getattr(os, "O_DIRECT", 0)
        try:
            os.close(os.open(LOCK, READ | flag, dir_fd=self._folder.folder))
        except OSError:
            return 0
        return flag

    def write(self, name: BlockName, pieces: Pieces, scratch: Scratch) -> None:
        """Write the file of a block, in the place of an earlier one. Raises OSError, and leaves nothing behind then."""
        self._layout.write_header(scratch.header, name.key, pieces)
        temporary = str(next(self._numbers))
        try:
            with _opened(temporary, WRITE | self.direct, self._folder.writing) as opened:
                written = os.writev(opened, [part.data for part in (scratch.header, *self._to_write(pieces, scratch))])
                if written != self._layout.file_bytes:
                    raise OSError(errno.ENOSPC, f"{written} of {self._layout.file_bytes} bytes were written")
                if not self.lasting:
                    with suppress(OSError):  # as good a block without
                        os.utime(opened, ns=(OUTDATED_NS, OUTDATED_NS))
            into = self._folder.by_digit[name.folder]
            os.rename(temporary, name.file, src_dir_fd=self._folder.writing, dst_dir_fd=into)
        except OSError:
            self._unlink_temporary(temporary)
            raise

    def _to_write(self, pieces: Pieces, scratch: Scratch) -> Pieces:
        if self._takes(pieces):
            return [*pieces, scratch.padding] if self._layout.padding else pieces
        at = 0
        for piece in pieces:
            scratch.block[at : at + piece.nbytes] = piece
            at += piece.nbytes
        scratch.block[at:] = 0
        return [scratch.block]

    def read(self, name: BlockName, pieces: Pieces, scratch: Scratch) -> None:
        """Read a block into memory. Raises Damaged where the file does not hold it, and OSError as reading does."""
        fits = self._takes(pieces)
        try:
            self._fill(name, [scratch.header, *(pieces if fits else [scratch.block])])
        except OSError as error:
            if error.errno == errno.ELOOP:  # a link
                raise Damaged("foreign") from error
            raise
        if not fits:
            at = 0
            for piece in pieces:
                piece[:] = scratch.block[at : at + piece.nbytes]
                at += piece.nbytes
        self._layout.verify(scratch.header, name.key, pieces)

    def _fill(self, name: BlockName, memory: Pieces) -> None:
        wanted = sum(part.nbytes for part in memory)
        with _opened(name.file, READ | self.direct, self._folder.by_digit[name.folder]) as opened:
            found = os.fstat(opened)
            if not stat.S_ISREG(found.st_mode) or found.st_size > self._layout.file_bytes:
                raise Damaged("foreign")
            if found.st_size < self._layout.file_bytes or os.readv(opened, [part.data for part in memory]) < wanted:
                raise Damaged("truncated")

    def mark_used(self, name: BlockName) -> None:
        """Note the time of a use, by which blocks are ranked after a restart. Raises OSError."""
        if self.lasting:
            os.utime(name.file, dir_fd=self._folder.by_digit[name.folder], follow_symlinks=False)

    def remove(self, name: BlockName) -> None:
        """Remove the file of a block, if it is there. Raises OSError where it cannot be removed."""
        try:
            os.unlink(name.file, dir_fd=self._folder.by_digit[name.folder])
        except FileNotFoundError:
            return

    def blocks(self) -> Iterator[tuple[BlockName, os.stat_result]]:
        """The blocks that there are files of, whole or not."""
        return self._folder.blocks()

    def _takes(self, pieces: Pieces) -> bool:
        """Whether the system can read into these pieces, and write them, as they are."""
        return len(pieces) <= MAX_VECTORS and (not self.direct or is_aligned(pieces))

    def _unlink_temporary(self, name: str) -> None:
        try:
            os.unlink(name, dir_fd=self._folder.writing)
        except OSError:
            return  # it was never made, or the next process removes it


@contextmanager
def _opened(name: str, flags: int, folder: int) -> Iterator[int]:
    """A file that is open inside a ``with``. An error of closing a file that was written is one of the write."""
    descriptor = os.open(name, flags, 0o600, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
