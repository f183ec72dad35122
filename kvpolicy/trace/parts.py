"""Part files of a trace's tables: their names, in which order they are read, and how they are written and opened.

``part-000012.parquet`` is what was written at once, ``part-000000-000031.parquet`` what a merge made of parts 0 to 31
(:mod:`kvpolicy.trace.upkeep`). A part that another one covers was left behind by an interrupted merge; its rows are in
the other one, and it is not read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from kvpolicy import stored_tables
from kvpolicy.errors import KVPolicyError
from kvpolicy.stored_tables import UnreadableTable

PART_NAME = re.compile(r"part-(\d{1,15})(?:-(\d{1,15}))?\.parquet")
FILE_MODE = 0o600
FOLDER_MODE = 0o700


class TraceError(KVPolicyError):
    """A trace is invalid; the message names the file and the expected value."""


class TraceWarning(UserWarning):
    """What is known of a trace is less than was asked for; the message says what was taken in its place."""


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """A part file, which holds the rows of parts ``first`` to ``last``."""

    first: int
    last: int
    path: Path = field(compare=False)

    @property
    def merged(self) -> int:
        """Number of parts whose rows it holds."""
        return self.last - self.first + 1


def part_path(folder: Path, first: int, last: int | None = None) -> Path:
    return folder / f"part-{first:06d}{'' if last is None or last == first else f'-{last:06d}'}.parquet"


def all_parts(folder: Path) -> list[Part]:
    """The part files of a table, by their numbers, with those that others cover. Links are no part files."""
    parts = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                match = PART_NAME.fullmatch(entry.name)
                if match and entry.is_file(follow_symlinks=False):
                    first = int(match[1])
                    parts.append(Part(first, first if match[2] is None else int(match[2]), folder / entry.name))
    except FileNotFoundError:
        return []
    return sorted(parts)


def covered(parts: Iterable[Part]) -> list[Part]:
    """Those of the parts whose rows are in another of them."""
    return _split(parts)[1]


def parts_of(folder: Path) -> list[Part]:
    """The part files of a table that hold its rows, in order. Raises TraceError where two of them overlap."""
    return _split(all_parts(folder))[0]


def _split(parts: Iterable[Part]) -> tuple[list[Part], list[Part]]:
    rows_in: list[Part] = []
    left: list[Part] = []
    for part in sorted(parts, key=lambda part: (part.first, -part.last)):
        if part.last < part.first:
            raise TraceError(f"{part.path}: its numbers should ascend")
        if rows_in and part.last <= rows_in[-1].last:
            left.append(part)
        elif rows_in and part.first <= rows_in[-1].last:
            raise TraceError(f"{part.path}: shares parts with {rows_in[-1].path.name}, so rows are there twice")
        else:
            rows_in.append(part)
    return rows_in, left


def refuse_links(*paths: Path) -> None:
    """Raise TraceError for a link inside a trace: it might lead anywhere."""
    for path in paths:
        if path.is_symlink():
            raise TraceError(f"{path}: is a link; a trace holds its files itself")


def make_folder(folder: Path) -> None:
    """Make a folder of a trace, and the missing ones above it, for its owner alone."""
    if not folder.is_dir():
        if folder.parent != folder:
            make_folder(folder.parent)
        folder.mkdir(FOLDER_MODE, exist_ok=True)


def open_private(path: Path) -> Any:
    """A new file for its owner alone, to be written in bytes; replaces one of that name."""
    path.unlink(missing_ok=True)
    return os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, FILE_MODE), "wb")


# ---- how parts are encoded ----


def parquet_options(schema: pa.Schema) -> dict[str, Any]:
    """How a table is encoded: each column as it becomes smallest.

    Times are told apart by all of their bits, so these are grouped by their weight; ids ascend, so each is stored as
    what it adds to the one before.
    """
    dictionary: list[str] = []
    encoding: dict[str, str] = {}
    for path, kind in leaves(schema):
        name = path.rpartition(".")[2]
        if pa.types.is_floating(kind):
            encoding[path] = "BYTE_STREAM_SPLIT"
        elif pa.types.is_string(kind) and name in ("preemption_id", "decision_id", "overflow_id", "displacement_id"):
            encoding[path] = "DELTA_BYTE_ARRAY"
        elif pa.types.is_integer(kind) and name in ("step", "generation", "first_step", "last_step"):
            encoding[path] = "DELTA_BINARY_PACKED"
        else:
            dictionary.append(path)
    return {
        "compression": "zstd",
        "compression_level": 6,
        "use_dictionary": dictionary,
        "column_encoding": encoding,
        "write_statistics": True,
    }


def leaves(fields: Iterable[pa.Field], above: str = "") -> list[tuple[str, pa.DataType]]:
    """Path in Parquet and type of every column of values."""
    found: list[tuple[str, pa.DataType]] = []
    for one in fields:
        path, kind = f"{above}{one.name}", one.type
        while pa.types.is_list(kind):
            path, kind = f"{path}.list.element", kind.value_type
        found += leaves(kind, f"{path}.") if pa.types.is_struct(kind) else [(path, kind)]
    return found


def opened(path: Path, columns: Sequence[str] | None = None) -> pq.ParquetFile:
    """A part file, as :func:`kvpolicy.stored_tables.opened`, with what is wrong with it as a TraceError."""
    try:
        return stored_tables.opened(path, columns)
    except UnreadableTable as error:
        raise TraceError(str(error)) from error
