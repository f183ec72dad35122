"""Upkeep of a trace that is written for weeks: merges small part files, and removes the oldest ones.

The thread that writes a server's trace does both (:class:`Upkeep`); `kvpolicy compact` merges a trace from outside,
also one that is being written. Both hold a lock of the core's folder meanwhile. The rows, their order and the digest of
a trace are the same before and after a merge.

A merge of parts 0 to 31 writes ``part-000000-000031.parquet``, renames it into place and then removes the 32. Whatever
interrupts it, each row is read once: readers leave out parts that another one covers.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from kvpolicy.trace.header import Header
from kvpolicy.trace.parts import (
    Part,
    TraceError,
    all_parts,
    covered,
    open_private,
    opened,
    parquet_options,
    part_path,
    parts_of,
)
from kvpolicy.trace.schemas import SCHEMAS
from kvpolicy.trace.table import core_folders

MERGED_PARTS = 32
"""Parts of one size that are merged into one of the next."""
CLOSED_PARTS = MERGED_PARTS**2
"""A file that holds so many parts is closed: a server that writes one every two seconds closes one in 34 minutes."""
CLOSED_BYTES = 64 << 20
"""So is one of that size."""
GROUP_ROWS = 1 << 16
"""Maximum rows of a row group, which is what a merge holds in memory, and a reader at least."""
DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Size:
    """What a trace takes on disk."""

    files: int
    bytes: int


def size(folder: Path) -> Size:
    """Part files and headers of a trace, and their bytes."""
    sizes = [part_bytes for core in _cores(folder) for _, part_bytes, _ in _aged(core)]
    sizes += [header.stat().st_size for core in _cores(folder) if (header := core / "header.json").is_file()]
    return Size(len(sizes), sum(sizes))


# ---- merging ----


def compact(folder: Path | str) -> tuple[Size, Size]:
    """Merge the part files of a trace into few. Returns what it took before and takes now.

    Safe beside a server that writes it and beside readers. Raises TraceError for what is no trace and for a part file
    that is damaged; what was merged until then stays merged.
    """
    cores = core_folders(Path(folder))
    before = size(cores[0].parent)
    for core in cores:
        with locked(core):
            for name in SCHEMAS:
                _remove(covered(all_parts(core / name)))
                for run in list(_runs(parts_of(core / name))):
                    merge(core, name, run)
    return before, size(cores[0].parent)


def _runs(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Neighbouring parts of up to :data:`CLOSED_BYTES` together; parts of that size stay."""
    run: list[Part] = []
    total = 0
    for part in parts:
        part_bytes = part.path.stat().st_size
        if run and total + part_bytes > CLOSED_BYTES:
            yield run
            run, total = [], 0
        run.append(part)
        total += part_bytes
    if run:
        yield run


def merge(core: Path, name: str, run: Sequence[Part]) -> Path | None:
    """Merge parts of a table, neighbours in ascending order, into one. Holds one row group in memory.

    The caller holds the core's lock. Raises TraceError for a damaged part, FileNotFoundError where one is gone; then
    nothing has changed.
    """
    if len(run) < 2:
        return None
    folder = core / name
    files = [opened(part.path) for part in run]
    try:
        schema = pa.unify_schemas([file.schema_arrow.remove_metadata() for file in files], promote_options="default")
    except pa.ArrowException as error:
        raise TraceError(f"{run[0].path} and the parts up to {run[-1].path.name} cannot be merged: {error}") from error
    scratch = folder / f".merge-{run[0].first:06d}.{os.getpid()}"
    path = part_path(folder, run[0].first, run[-1].last)
    try:
        with open_private(scratch) as out:
            with pq.ParquetWriter(out, schema, **parquet_options(schema)) as writer:
                for table in _grouped(run, files, schema):
                    writer.write_table(table, row_group_size=GROUP_ROWS)
            out.flush()
            os.fsync(out.fileno())
        newest = max(part.path.stat().st_mtime_ns for part in run)  # a file is as old as its newest row
        os.utime(scratch, ns=(newest, newest))
        scratch.replace(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
    _sync_folder(folder)
    _remove(run)
    return path


def _grouped(run: Sequence[Part], files: Sequence[pq.ParquetFile], schema: pa.Schema) -> Iterator[pa.Table]:
    """The rows of the files, in order, as tables of about :data:`GROUP_ROWS`."""
    waiting: list[pa.Table] = []
    rows = 0
    for part, file in zip(run, files, strict=True):
        try:
            for batch in file.iter_batches(batch_size=GROUP_ROWS):
                table = pa.concat_tables(
                    [schema.empty_table(), pa.Table.from_batches([batch])], promote_options="default"
                )
                waiting.append(table.select(schema.names))
                rows += batch.num_rows
                if rows >= GROUP_ROWS:
                    yield pa.concat_tables(waiting).combine_chunks()
                    waiting, rows = [], 0
        except (OSError, ValueError, pa.ArrowException) as error:
            raise TraceError(f"{part.path}: damaged or not a Parquet file: {error}") from error
    if waiting:
        yield pa.concat_tables(waiting).combine_chunks()


def _remove(parts: Sequence[Part]) -> None:
    for part in parts:
        part.path.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def locked(core: Path, wait: bool = True) -> Iterator[bool]:
    """Hold the lock of a core's folder, against other merges. Gives whether it is held, always true with ``wait``."""
    handle = os.open(core, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(handle)


# ---- a server's own upkeep ----


@dataclass(frozen=True, slots=True)
class Retention:
    """What a trace may keep; None: without a limit."""

    max_bytes: float | None = None
    max_age_s: float | None = None


class Upkeep:
    """Merges what one engine core has written, and holds a trace to its limits. Called by the writer's thread.

    ``core``: its folder, in the folder of the trace; ``clock``: seconds since the epoch, as files have them.
    """

    def __init__(self, core: Path, retention: Retention, clock: Callable[[], float] = time.time) -> None:
        self._core = core
        self._retention = retention
        self._clock = clock
        self._left_alone: set[Path] = set()
        """Damaged parts, which nothing is merged across."""

    def merge(self) -> None:
        """Merge what has become enough: runs of :data:`MERGED_PARTS` parts of one size. Leaves out what is damaged."""
        with locked(self._core, wait=False) as held:
            if not held:  # `kvpolicy compact` does it
                return
            for name in SCHEMAS:
                _remove(covered(all_parts(self._core / name)))
                while (run := self._due(parts_of(self._core / name))) is not None:
                    try:
                        merge(self._core, name, run)
                    except FileNotFoundError:
                        break
                    except TraceError:
                        self._left_alone.update(part.path for part in run)
                        raise

    def _due(self, parts: Sequence[Part]) -> list[Part] | None:
        run: list[Part] = []
        for part in parts:
            if part.merged >= CLOSED_PARTS or part.path in self._left_alone or _bytes(part) >= CLOSED_BYTES:
                run = []
                continue
            level = part.merged >= MERGED_PARTS
            if run and level != (run[-1].merged >= MERGED_PARTS):
                run = []
            run.append(part)
            if len(run) == MERGED_PARTS:
                return run
        return None

    def retain(self) -> Size:
        """Remove the oldest parts until the trace keeps its limits. Returns what it takes then.

        Nothing is removed but part files of tables in folders of engine cores whose header says that a server in
        production recorded them, and the folder of such a core once it is empty and nobody writes it.
        """
        folder = self._core.parent
        aged = sorted(
            (age_s, part.path, part_bytes)
            for core in _cores(folder)
            if core == self._core or _of_production(core)
            for part, part_bytes, age_s in _aged(core)
        )
        present = size(folder)
        files, total = present.files, present.bytes
        oldest_s = None if self._retention.max_age_s is None else self._clock() - self._retention.max_age_s
        for written_s, path, part_bytes in aged:
            over = self._retention.max_bytes is not None and total > self._retention.max_bytes
            if not over and (oldest_s is None or written_s >= oldest_s):
                break
            path.unlink(missing_ok=True)
            files, total = files - 1, total - part_bytes
        for core in _cores(folder):
            if core != self._core and _of_production(core):
                _remove_empty(core)
        return Size(files, total)


def _cores(folder: Path) -> list[Path]:
    """Folders of engine cores; links are none."""
    return sorted(
        header.parent
        for header in folder.glob("*/header.json")
        if not (header.is_symlink() or header.parent.is_symlink())
    )


def _of_production(core: Path) -> bool:
    try:
        return Header.read(core / "header.json").source == "production"
    except TraceError:
        return False


def _aged(core: Path) -> list[tuple[Part, int, float]]:
    """Parts of a core, with their bytes and when they were written."""
    aged = []
    for name in SCHEMAS:
        if (core / name).is_symlink():
            continue
        for part in all_parts(core / name):
            with suppress(FileNotFoundError):
                found = part.path.stat()
                aged.append((part, found.st_size, found.st_mtime))
    return aged


def _bytes(part: Part) -> int:
    try:
        return part.path.stat().st_size
    except FileNotFoundError:
        return 0


def hold_header(core: Path) -> int:
    """Mark a core as being written for as long as the process lives; returns the handle that does so."""
    handle = os.open(core / "header.json", os.O_RDONLY | os.O_CLOEXEC)
    fcntl.flock(handle, fcntl.LOCK_SH)
    return handle


def _remove_empty(core: Path) -> None:
    """Remove the folder of a core without part files that nobody writes; where anything else is in it, it stays."""
    if any(all_parts(core / name) for name in SCHEMAS) or not {path.name for path in core.iterdir()} <= {
        "header.json",
        *SCHEMAS,
    }:
        return
    with suppress(OSError):
        handle = os.open(core / "header.json", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for name in SCHEMAS:
                with suppress(FileNotFoundError):
                    (core / name).rmdir()
            (core / "header.json").unlink()
            core.rmdir()
        finally:
            os.close(handle)
