"""Folders of blocks that no process owns: what servers that have ended left, or the second one of two that ran at once.
They count towards the bound of a tier that opens in the same directory, and make room for it.
"""

from __future__ import annotations

import fcntl
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path

from kvpolicy.tiers.block_format import FOLDERS
from kvpolicy.tiers.owned_folder import LOCK, READ_FOLDER, WRITING, blocks_in, entries_in, try_flock

CLAIMED_S = 300.0
"""No folder is cleared in the first five minutes: the other ranks and cores of a server, and other servers that start
at the same time, may not have claimed theirs before."""
ASK_AGAIN_S = 1.0
"""Meanwhile it is looked so often, where room is short, which have been claimed."""
Attempt = Callable[[Callable[[], None]], str]
"""Does something, and returns why it failed; empty where it did not."""


@dataclass(frozen=True, slots=True)
class IdleFolder:
    """A folder that no process owns."""

    path: Path
    used_bytes: int
    """Of its block files, and of what was being written."""
    used_s: float
    """When it was claimed or left last; seconds since the epoch."""

    def is_owned(self) -> bool:
        """Whether a process has claimed it meanwhile, or it is gone."""
        try:
            return _left_s(self.path) is None
        except FileNotFoundError:
            return True
        except OSError:
            return False

    def clear(self) -> bool:
        """Remove its block files and what was being written; False where a process has claimed it meanwhile. Raises
        OSError where something cannot be removed, once all else is."""
        with _shared(self.path) as locked:
            if locked is None:
                return False
            failed: OSError | None = None
            for folder, file, _ in _files_in(locked[0]):
                try:
                    os.unlink(file, dir_fd=folder)
                except FileNotFoundError:  # another process clears it, too
                    continue
                except OSError as error:
                    failed = error
            if failed is not None:
                raise failed
        return True

    def left_bytes(self) -> int:
        """Its bytes now; those that were found last where they cannot be counted."""
        try:
            return _used_bytes(self.path)
        except FileNotFoundError:
            return 0
        except OSError:
            return self.used_bytes


class IdleFolders:
    """The folders that a tier found when it was opened, at ``opened_s`` of its clock. Their bytes count as long as they
    are neither claimed nor cleared."""

    def __init__(self, found: Sequence[IdleFolder], opened_s: float) -> None:
        self._idle, self._clears_s = [*found], opened_s + CLAIMED_S
        self._asks_s = -inf
        """When it may be looked again which have been claimed."""
        self._busy = False
        self._done: deque[tuple[Sequence[IdleFolder], bool, int]] = deque()
        """Those that count no more: whether they were cleared, and the bytes that could not be removed."""
        self._stuck_bytes = 0

    @property
    def any(self) -> bool:
        """Whether there are some that may make room."""
        return bool(self._idle)

    def may_be_claimed(self, now_s: float) -> bool:
        """Whether there are some, and it is too early to clear them."""
        return self.any and now_s < self._clears_s

    @property
    def used_bytes(self) -> int:
        """Of all of them, and of those that could not be cleared."""
        return sum(folder.used_bytes for folder in self._idle) + self._stuck_bytes

    def next_task(self, now_s: float) -> Callable[[Attempt], None] | None:
        """What makes room, to be done in the background; None where it is being done, or was done a moment ago.

        The folder that was used longest ago is cleared. As long as others may be claimed, it is looked instead which
        have been.
        """
        folders = tuple(self._idle)
        if not folders or self._busy or now_s < self._asks_s:
            return None
        self._busy = True
        if now_s >= self._clears_s:
            return lambda attempt: self._clear(folders[0], attempt)
        self._asks_s = now_s + ASK_AGAIN_S
        return lambda attempt: self._done.append(([one for one in folders if one.is_owned()], False, 0))

    def settle(self) -> int:
        """Take over what was done in the background; return how many were cleared."""
        number = 0
        while self._done:
            done, cleared, left_bytes = self._done.popleft()
            self._idle = [folder for folder in self._idle if folder not in done]
            self._stuck_bytes += left_bytes
            self._busy = False
            number += cleared
        return number

    def _clear(self, folder: IdleFolder, attempt: Attempt) -> None:
        cleared: list[bool] = []
        failed = attempt(lambda: cleared.append(folder.clear()))
        self._done.append(([folder], cleared == [True], folder.left_bytes() if failed else 0))


def idle_folders(directory: Path, apart_from: Path) -> list[IdleFolder]:
    """The folders of all namespaces that no process owns and that hold something, the one used longest ago first.

    One without files makes no room. It is not removed either: a process that is about to claim it has opened it.
    None is locked while its files are counted, which takes seconds where there are many: other processes may claim it
    meanwhile, such as the other ranks of this server, and it is left out then.
    """
    found = []
    for path in directory.glob(f"{'[0-9a-f]' * 40}/*"):
        if path == apart_from:
            continue
        with suppress(OSError):
            used_s = _left_s(path)
            if used_s is None:
                continue
            folder = IdleFolder(path, _used_bytes(path), used_s)
            if folder.used_bytes and not folder.is_owned():
                found.append(folder)
    return sorted(found, key=lambda folder: folder.used_s)


def _left_s(path: Path) -> float | None:
    """When a folder was claimed or left last, seconds since the epoch; None where a process owns it. Raises OSError
    where it is no folder of blocks."""
    with _shared(path) as locked:
        return None if locked is None else os.fstat(locked[1]).st_mtime


@contextmanager
def _shared(path: Path) -> Iterator[tuple[int, int] | None]:
    """Descriptors of a folder and of its lock, which is shared; None where a process owns it. Raises OSError where it
    is no folder of blocks."""
    folder = os.open(path, READ_FOLDER)
    try:
        lock = os.open(LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        try:
            yield (folder, lock) if try_flock(lock, fcntl.LOCK_SH) else None
        finally:
            os.close(lock)
    finally:
        os.close(folder)


def _used_bytes(path: Path) -> int:
    folder = os.open(path, READ_FOLDER)
    try:
        return sum(found.st_size for _, _, found in _files_in(folder))
    finally:
        os.close(folder)


def _files_in(folder: int) -> Iterator[tuple[int, str, os.stat_result]]:
    """Block files of a folder of blocks, and what was being written: of each the folder that it is in, its name, and
    what the system says of it."""
    for inner in (*FOLDERS, WRITING):
        with suppress(FileNotFoundError):
            opened = os.open(inner, READ_FOLDER, dir_fd=folder)
            try:
                blocks = ((name.file, found) for name, found in blocks_in(opened, inner))
                for name, found in [*(entries_in(opened) if inner == WRITING else blocks)]:
                    yield opened, name, found  # who may remove it
            finally:
                os.close(opened)
