"""Folders of blocks that no process owns: what servers that have ended left, or the second one of two that ran at once.
They count towards the bound of a tier in the same directory, and make room for it.
"""

from __future__ import annotations

import fcntl
import os
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import NamedTuple

from kvpolicy.tiers.block_format import FOLDERS
from kvpolicy.tiers.owned_folder import LOCK, READ_FOLDER, WRITING, blocks_in, entries_in, try_flock, unlock

CLAIMED_S = 300.0
"""No folder is cleared in the first five minutes after it was found: the other ranks and cores of a server, other
servers that start at the same time, and one that is started again, may not have claimed theirs before."""
ASK_AGAIN_S = 1.0
"""Meanwhile it is looked so often, where room is short, which have been claimed."""
LOOK_AGAIN_S = 120.0
"""It is looked so often which folders processes have left since."""
Attempt = Callable[[Callable[[], None]], str]
"""Does something, and returns why it failed; empty where it did not."""
Task = Callable[[Attempt], None]


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

    def clear(self, ends: Callable[[], bool] = lambda: False) -> bool:
        """Remove its block files and what was being written; False where a process has claimed it meanwhile, or where
        it ``ends`` before all are. Raises OSError where something cannot be removed, once all else is."""
        with _shared(self.path) as locked:
            if locked is None:
                return False
            failed: OSError | None = None
            for folder, file, _ in _files_in(locked.folder):
                if ends():
                    return False
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


Look = Callable[[Collection[IdleFolder]], Sequence[IdleFolder]]
"""Finds folders. Those that it is given, and that nobody has owned since, are the same, and are not counted again."""


class IdleFolders:
    """The folders that a tier found when it was opened, at ``opened_s`` of its clock, and those that processes have
    left since. Their bytes count as long as they are neither claimed nor cleared."""

    def __init__(self, found: Sequence[IdleFolder], opened_s: float, look: Look) -> None:
        self._look = look
        self._clears_s = dict.fromkeys(found, opened_s + CLAIMED_S)
        """Of each one when it may be cleared, the one used longest ago first."""
        self._asks_s = -inf
        """When it may be looked again which have been claimed."""
        self._looks_s = opened_s + LOOK_AGAIN_S
        self._looked_early = False
        """Whether it was looked before that, as the disk was full."""
        self._busy = self._looking = False
        self._done: deque[tuple[Sequence[IdleFolder], bool, int]] = deque()
        """Those that count no more: whether they were cleared, and the bytes that could not be removed."""
        self._looked: deque[tuple[Collection[IdleFolder], Sequence[IdleFolder]]] = deque()
        """Those that were known when it was looked for others, and what was found."""
        self._stuck: dict[IdleFolder, int] = {}
        """Those that could not be cleared, with the bytes that are left."""
        self._ended = False

    @property
    def any(self) -> bool:
        """Whether there are some that may make room."""
        return bool(self._clears_s)

    def may_be_claimed(self, now_s: float) -> bool:
        """Whether there are some, and it is too early to clear them."""
        return self.any and now_s < min(self._clears_s.values())

    @property
    def used_bytes(self) -> int:
        """Of all of them, and of those that could not be cleared."""
        return sum(folder.used_bytes for folder in self._clears_s) + sum(self._stuck.values())

    def end(self) -> None:
        """Clear no further files, whatever is being cleared."""
        self._ended = True

    def next_task(self, now_s: float) -> Task | None:
        """What makes room, to be done in the background; None where it is being done, or was done a moment ago.

        The folder that was used longest ago is cleared. As long as all may be claimed, it is looked instead which have
        been.
        """
        folders = tuple(self._clears_s)
        if not folders or self._busy or now_s < self._asks_s:
            return None
        self._busy = True
        for folder, clears_s in self._clears_s.items():
            if now_s >= clears_s:
                return partial(self._clear, folder)
        self._asks_s = now_s + ASK_AGAIN_S
        return lambda attempt: self._done.append(([one for one in folders if one.is_owned()], False, 0))

    def next_look(self, now_s: float, full: bool) -> Task | None:
        """What finds folders that processes have left since, to be done in the background; None where it is being done,
        or it is too early. ``full``: whether the disk is, so that it is looked before the time, once."""
        is_due = now_s >= self._looks_s
        if self._looking or not (is_due or (full and not self._looked_early)):
            return None
        self._looking, self._looked_early = True, not is_due
        if is_due:
            self._looks_s = now_s + LOOK_AGAIN_S
        return partial(self._look_again, frozenset(self._clears_s), (*self._clears_s, *self._stuck))

    def settle(self, now_s: float) -> int:
        """Take over what was done in the background; return how many were cleared."""
        number = 0
        while self._done:
            done, cleared, left_bytes = self._done.popleft()
            for folder in done:
                self._clears_s.pop(folder, None)
            if left_bytes:
                self._stuck[done[0]] = left_bytes
            self._busy = False
            number += cleared
        while self._looked:
            self._found(*self._looked.popleft(), now_s)
            self._looking = False
        return number

    def _found(self, known: Collection[IdleFolder], found: Sequence[IdleFolder], now_s: float) -> None:
        """What was known and is not found was claimed. What was known and is not any more was cleared meanwhile."""
        self._stuck = {folder: left_bytes for folder, left_bytes in self._stuck.items() if folder in found}
        new = [folder for folder in found if folder not in known and folder not in self._stuck]
        kept = {folder: clears_s for folder, clears_s in self._clears_s.items() if folder in found}
        clears_s = kept | dict.fromkeys(new, now_s + CLAIMED_S)
        self._clears_s = {folder: clears_s[folder] for folder in sorted(clears_s, key=lambda folder: folder.used_s)}

    def _clear(self, folder: IdleFolder, attempt: Attempt) -> None:
        cleared: list[bool] = []
        failed = attempt(lambda: cleared.append(folder.clear(lambda: self._ended)))
        self._done.append(([folder], cleared == [True], folder.left_bytes() if failed else 0))

    def _look_again(self, known: Collection[IdleFolder], before: Sequence[IdleFolder], attempt: Attempt) -> None:
        found = [before]
        attempt(lambda: found.append(self._look(known)))
        self._looked.append((known, found[-1]))


def idle_folders(directory: Path, apart_from: Path, known: Collection[IdleFolder] = ()) -> list[IdleFolder]:
    """The folders of all namespaces that no process owns and that hold something, the one used longest ago first.
    ``known``: folders that were found before; see :data:`Look`.

    One without files makes no room. It is not removed either: a process that is about to claim it has opened it.
    None is locked while its files are counted, which takes seconds where there are many: other processes may claim it
    meanwhile, such as the other ranks of this server, and it is left out then.
    """
    found, of_path = [], {folder.path: folder for folder in known}
    for path in directory.glob(f"{'[0-9a-f]' * 40}/[0-9]*"):
        if path == apart_from:
            continue
        with suppress(OSError):
            used_s = _left_s(path)
            if used_s is None:
                continue
            folder = of_path.get(path)
            if folder is None or folder.used_s != used_s:
                folder = IdleFolder(path, _used_bytes(path), used_s)
            if folder.used_bytes and not folder.is_owned():
                found.append(folder)
    return sorted(found, key=lambda folder: folder.used_s)


def _left_s(path: Path) -> float | None:
    """When a folder was claimed or left last, seconds since the epoch; None where a process owns it. Raises OSError
    where it is no folder of blocks."""
    with _shared(path) as locked:
        return None if locked is None else locked.left_s


class Shared(NamedTuple):
    """A folder that no process owns, or can claim as long as it is shared."""

    folder: int
    """Its descriptor."""
    left_s: float
    """When it was claimed or left last."""


@contextmanager
def _shared(path: Path) -> Iterator[Shared | None]:
    """A folder whose locks are shared; None where a process owns it. Raises OSError where it is no folder of blocks.
    One without its lock file, as where that was removed, is locked as well by those who own it."""
    with ExitStack() as opened:
        folder = _open(path)
        opened.callback(unlock, folder)
        lock, is_free = folder, try_flock(folder, fcntl.LOCK_SH)
        with suppress(FileNotFoundError):
            lock = os.open(LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            opened.callback(unlock, lock)
            is_free = is_free and try_flock(lock, fcntl.LOCK_SH)
        yield Shared(folder, os.fstat(lock).st_mtime) if is_free else None


def _open(path: Path) -> int:
    """Descriptor of a folder of blocks. Neither it nor the one that it is in may be a link."""
    outer = os.open(path.parent, READ_FOLDER)
    try:
        return os.open(path.name, READ_FOLDER, dir_fd=outer)
    finally:
        os.close(outer)


def _used_bytes(path: Path) -> int:
    folder = _open(path)
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
