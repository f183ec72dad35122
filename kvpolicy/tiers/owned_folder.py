"""The folder that one process keeps its block files in, private, and locked as long as the process lives.

    DIRECTORY/<digest of the namespace>/<number>/   lock, manifest.json, writing/, 0/ to f/

The first process with a namespace locks number 0. A second one at the same time gets number 1, a folder of its own:
only one process writes to a folder or gives up its files, and each keeps to its own bound. The lock goes with the
process, however it ends. The next one finds the blocks, and removes from ``writing`` what was being written.

Who owns a folder locks it exclusively: the folder itself, which outlasts a `lock` that is removed from it, and then
that file, by which earlier versions and file systems without locks of folders go. Who counts or clears one that nobody
owns shares both: so a process that claims it meanwhile can tell, and waits instead of taking another number, under
which its blocks are not.

Files are opened relative to open folders and never through links, so nobody can put another folder in their place.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from kvpolicy.errors import InputError
from kvpolicy.tiers.block_format import FOLDERS, BlockName
from kvpolicy.tiers.faults import FULL
from kvpolicy.tiers.identity import namespace_digest

LOCK, MANIFEST, WRITING = "lock", "manifest.json", "writing"
MAX_PROCESSES = 64
"""That have folders for one namespace in one directory at the same time."""
MAX_MANIFEST_BYTES = 1 << 20
NAP_S, MAX_NAPS = 0.02, 500
"""How long a folder is waited for that others count or clear: ten seconds."""
NOT_OPEN = -1
READ_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_private(path: Path | str, inside: int | None = None) -> int:
    """Descriptor of a folder that only this user can change, made with mode 0700 where it does not exist.

    ``inside``: descriptor of the folder that ``path`` is in. Raises InputError for a link, for a folder of another
    user, and for one that others can write to; OSError where it cannot be made or opened.
    """
    with suppress(FileExistsError):
        os.mkdir(path, 0o700, dir_fd=inside)
    try:
        opened = os.open(path, READ_FOLDER, dir_fd=inside)
    except OSError as error:
        if stat.S_ISLNK(os.stat(path, dir_fd=inside, follow_symlinks=False).st_mode):
            raise InputError(f"{path} is a link; give the folder itself") from error
        raise
    found = os.fstat(opened)
    if found.st_uid == os.geteuid() and not found.st_mode & 0o022:
        return opened
    os.close(opened)
    if found.st_uid != os.geteuid():
        raise InputError(f"{path} belongs to user {found.st_uid}, not to {os.geteuid()}; give a folder of your own")
    raise InputError(f"{path} can be changed by other users (mode {found.st_mode & 0o777:o}); chmod it to 700")


def refuse_unsafe(directory: Path) -> None:
    """Make the directory, where it does not exist. Raises InputError and OSError as :func:`open_private`."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    os.close(open_private(directory))


class OwnedFolder:
    """Descriptors of a folder and of those in it, until :meth:`close`."""

    def __init__(self, path: Path, folder: int, lock: int) -> None:
        self.path = path
        """For messages: files are opened relative to the descriptors."""
        self.folder, self._lock = folder, lock
        self.writing = NOT_OPEN
        self.by_digit: dict[str, int] = {}

    @classmethod
    def claim(
        cls, directory: Path, namespace: Mapping[str, Any], block_bytes: int, number: int | None = None
    ) -> OwnedFolder:
        """Lock a folder for blocks of this namespace, without what was being written there and without blocks that the
        manifest does not vouch for: that of the number, where there is one and nobody owns it, else the first one that
        nobody owns.

        Raises InputError as :func:`open_private`, and where too many processes have folders; OSError where the
        directory cannot be read or written, or has no room for a folder that is not there yet.
        """
        try:
            return cls._claim(directory, namespace, block_bytes, number)
        except OSError as error:
            if error.errno not in FULL:
                raise
            what = f"{error.strerror}: no folder for blocks of this model can be made there; make room on the disk"
            raise OSError(error.errno, what, str(directory)) from error

    @classmethod
    def _claim(cls, directory: Path, namespace: Mapping[str, Any], block_bytes: int, number: int | None) -> OwnedFolder:
        directory.parent.mkdir(parents=True, exist_ok=True)
        digest = namespace_digest(namespace)
        outer = open_private(directory)
        try:
            inner = open_private(digest, outer)
        finally:
            os.close(outer)
        try:
            first = () if number is None else (number,)
            for wanted in (*first, *(other for other in range(MAX_PROCESSES) if other != number)):
                owned = cls._try_claim(directory / digest / str(wanted), inner)
                if owned is not None:
                    try:
                        owned._prepare({"version": 1, "block_bytes": block_bytes, "namespace": dict(namespace)})
                    except BaseException:
                        owned.close()
                        raise
                    return owned
        finally:
            os.close(inner)
        raise InputError(f"{directory}: {MAX_PROCESSES} processes keep blocks of this model there; give another folder")

    @property
    def number(self) -> int:
        return int(self.path.name)

    @classmethod
    def _try_claim(cls, path: Path, inside: int) -> OwnedFolder | None:
        """The folder, locked; None where another process owns it, or clears it for too long."""
        with ExitStack() as opened:
            folder = _locked(partial(open_private, path.name, inside), path.name, inside)
            if folder is None:
                return None
            opened.callback(unlock, folder)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            lock = _locked(partial(os.open, LOCK, flags, 0o600, dir_fd=folder), LOCK, folder)
            if lock is None:
                return None
            opened.callback(unlock, lock)
            with suppress(OSError):  # on a full disk, of some file systems
                os.utime(lock)
            opened.pop_all()
            return cls(path, folder, lock)

    def _prepare(self, manifest: Mapping[str, Any]) -> None:
        self.writing = open_private(WRITING, self.folder)
        for digit in FOLDERS:
            self.by_digit[digit] = open_private(digit, self.folder)
        self._remove_unfinished()
        if self._manifest() != json.loads(json.dumps(manifest)):
            self.clear()
            self._write_manifest(json.dumps(manifest, indent=1).encode())

    def _remove_unfinished(self) -> None:
        if self.writing == NOT_OPEN:
            return
        with os.scandir(self.writing) as entries:
            for entry in entries:
                os.unlink(entry.name, dir_fd=self.writing)

    def _manifest(self) -> Any:
        def opener(name: str, flags: int) -> int:
            return os.open(name, flags | os.O_NOFOLLOW, dir_fd=self.folder)

        try:
            with open(MANIFEST, "rb", opener=opener) as file:  # closes what is no file
                return json.loads(file.read(MAX_MANIFEST_BYTES))
        except (OSError, ValueError, RecursionError):
            return None

    def _write_manifest(self, text: bytes) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with os.fdopen(os.open(MANIFEST, flags, 0o600, dir_fd=self.writing), "wb") as file:
            file.write(text)
        os.rename(MANIFEST, MANIFEST, src_dir_fd=self.writing, dst_dir_fd=self.folder)

    def blocks(self) -> Iterator[tuple[BlockName, os.stat_result]]:
        """What is named as a block file. Others are left alone."""
        for digit, folder in self.by_digit.items():
            yield from blocks_in(folder, digit)

    def clear(self) -> None:
        """Remove all block files. Raises OSError where one cannot be removed."""
        for name, _ in list(self.blocks()):
            os.unlink(name.file, dir_fd=self.by_digit[name.folder])

    def close(self) -> None:
        """Remove what is left of unfinished files, and unlock the folder. Without effect when it is closed already: the
        numbers of its descriptors may be those of other files by then."""
        if self.folder == NOT_OPEN:
            return
        with suppress(OSError):
            os.utime(self._lock)
            self._remove_unfinished()
        inner, outer = (*self.by_digit.values(), self.writing), self.folder
        lock, self._lock = self._lock, NOT_OPEN
        self.folder = self.writing = NOT_OPEN
        self.by_digit = dict.fromkeys(self.by_digit, NOT_OPEN)
        for descriptor in inner:
            if descriptor != NOT_OPEN:
                os.close(descriptor)
        for locked in (lock, outer):
            unlock(locked)


def _locked(open_it: Callable[[], int], name: str, inside: int) -> int | None:
    """What is opened, locked exclusively; None where another process owns it. It is opened again where something else
    has that name ``inside`` by then, or nothing: that would be nobody's lock."""
    for _ in range(MAX_NAPS):
        opened = open_it()
        with ExitStack() as undo:
            undo.callback(unlock, opened)
            if not _takes_over(opened):
                return None
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(opened), os.stat(name, dir_fd=inside, follow_symlinks=False)):
                    undo.pop_all()
                    return opened
    return None


def _takes_over(lock: int) -> bool:
    """Lock it exclusively; False where another process has, or where others share it for too long."""
    for _ in range(MAX_NAPS):
        if try_flock(lock, fcntl.LOCK_EX):
            return True
        if not try_flock(lock, fcntl.LOCK_SH):
            return False
        fcntl.flock(lock, fcntl.LOCK_UN)
        time.sleep(NAP_S)
    return False


def unlock(lock: int) -> None:
    """Unlock and close it. Closing alone unlocks nothing where a process that was forked meanwhile has the descriptor,
    too."""
    with suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)


def try_flock(lock: int, how: int) -> bool:
    """Lock a file or a folder; False where another process has. Of a folder that cannot be locked, as on file systems
    of other machines, its lock file alone says who owns it."""
    try:
        fcntl.flock(lock, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        if not stat.S_ISDIR(os.fstat(lock).st_mode):
            raise
    return True


def blocks_in(folder: int, digit: str) -> Iterator[tuple[BlockName, os.stat_result]]:
    """What is named as a block file in the folder of that digit, links and the like too."""
    for file, found in entries_in(folder):
        name = BlockName.of_file(file)
        if name is not None and name.folder == digit:
            yield name, found


def entries_in(folder: int) -> Iterator[tuple[str, os.stat_result]]:
    """Names of all that is in a folder but other folders, and what the system says of it."""
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                found = entry.stat(follow_symlinks=False)
                if not stat.S_ISDIR(found.st_mode):
                    yield entry.name, found
