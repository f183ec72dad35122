"""Reading of trace files line by line, gzip or plain, and the treatment of damaged rows."""

from __future__ import annotations

import csv
import gzip
import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from kvpolicy.errors import KVPolicyError
from kvpolicy.workload.requests import WorkloadError

GZIP = b"\x1f\x8b"

EXACT = 2**53
"""Whole numbers from here on are not exact as floating-point numbers, which some files contain."""
ID_LIMIT = 2**64
"""Ids of prefix blocks are below this."""


class DamagedRow(KVPolicyError):
    """An unreadable row; the message names the field and what would be right. Readers add file and line."""


class DamagedFile(WorkloadError):
    """A file that cannot be read any further."""


@dataclass(frozen=True, slots=True)
class Care:
    """How a reader treats a file with faults."""

    skip_damaged: bool = False
    """Skip damaged rows and count them; otherwise the first one raises :class:`WorkloadError`."""
    sort: bool = False
    """Sort requests by arrival, for which all are held in memory. Otherwise a row that arrives before the row above it
    counts as damaged."""


@dataclass(slots=True)
class Counts:
    """Counts of a file's rows, kept while they are read."""

    rows: int = 0
    """All rows but the header and blank lines; for sessions, their requests."""
    requests: int = 0
    damaged: int = 0
    empty: int = 0
    """Rows without prompt or output, left out where the format's publisher says that they are failed requests."""
    first_damage: str = ""
    """File, line and reason of the first damaged row."""

    def damage(self, care: Care, message: str) -> None:
        """Count a damaged row. Raises :class:`WorkloadError` unless damaged rows are skipped."""
        if not care.skip_damaged:
            raise WorkloadError(message)
        self.damaged += 1
        self.first_damage = self.first_damage or message


class FileSource:
    """Base of every :class:`kvpolicy.workload.Source` that reads one file."""

    def __init__(self, path: Path | str, care: Care | None, seed: int) -> None:
        self.path = Path(path)
        self.care = care or Care()
        self.seed = seed
        self.counts = Counts()
        """Counts of the latest iteration, so far."""

    @property
    def name(self) -> str:
        return self.path.name.removesuffix(".gz")


@contextmanager
def open_bytes(path: Path) -> Iterator[BinaryIO]:
    """The file's bytes, decompressed if they are gzip, whatever the name. Raises :class:`WorkloadError`."""
    try:
        raw = path.open("rb")
    except OSError as error:
        raise WorkloadError(f"{path}: cannot be read: {error.strerror}") from error
    with raw:
        yield cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if raw.peek(2)[:2] == GZIP else raw


def chunks(path: Path, size: int) -> Iterator[bytes]:
    """The file's bytes in chunks. Raises :class:`DamagedFile` where a gzip stream breaks off."""
    with open_bytes(path) as stream:
        try:
            while chunk := stream.read(size):
                yield chunk
        except (EOFError, OSError, zlib.error) as error:
            raise DamagedFile(f"{path}: cannot be read on: {error}") from error


MAX_LINE_BYTES = 1 << 26
"""Of one line: a session of an agent has some megabytes. A small gzip file may hold a line that fills the memory."""


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """Number (from 1) and text of each line that is not blank. Raises :class:`DamagedFile` where gzip breaks off."""
    number = 0
    with open_bytes(path) as stream:
        try:
            for number, raw in enumerate(iter(lambda: stream.readline(MAX_LINE_BYTES + 1), b""), 1):
                if len(raw) > MAX_LINE_BYTES:
                    raise DamagedFile(f"{path}, line {number}: does not end within {MAX_LINE_BYTES:,} bytes")
                # Invalid UTF-8 becomes a character that no number contains, so that the field's parser refuses the row.
                text = raw.decode("utf-8", errors="replace").strip()
                text = text.removeprefix("\ufeff") if number == 1 else text
                if text:
                    yield number, text
        except (EOFError, OSError, zlib.error) as error:
            raise DamagedFile(f"{path}, line {number + 1}: cannot be read on: {error}") from error


def cells(line: str) -> list[str]:
    """A CSV line's fields. Raises :class:`DamagedRow`."""
    if '"' not in line:
        return line.split(",")
    try:
        return next(csv.reader([line], strict=True))
    except (csv.Error, StopIteration) as error:
        raise DamagedRow(f"not a CSV row: {error}") from error


def names_of(header: str) -> list[str]:
    """The columns of a CSV header; none where the line is not CSV."""
    try:
        return [name.strip() for name in cells(header)]
    except DamagedRow:
        return []


def places(path: Path, header: str, wanted: Sequence[str]) -> dict[str, int]:
    """Position of each column. Raises :class:`WorkloadError`, naming a missing or repeated column."""
    names = names_of(header)
    for column in wanted:
        if names.count(column) != 1:
            problem = "is missing" if column not in names else "is there twice"
            raise WorkloadError(
                f"{path}, line 1: column {column} {problem}; the columns are {', '.join(names) or 'none'}"
            )
    return {name: place for place, name in enumerate(names)}


def whole(value: Any, field: str) -> int:
    """A whole number, as text or from JSON; 0 or more. Raises :class:`DamagedRow`."""
    if type(value) is int and 0 <= value < EXACT:
        return value
    if isinstance(value, str) and len(value) < 16 and value.isascii() and value.isdigit():
        return int(value)
    number = real(value, field)
    if number < 0 or not number.is_integer() or number >= EXACT:
        raise DamagedRow(f"{field} is {value!r}, should be a whole number, 0 or more")
    return int(number)


def tokens(value: Any, field: str) -> int:
    """A number of tokens, 1 or more. Raises :class:`DamagedRow`."""
    number = whole(value, field)
    if not number:
        raise DamagedRow(f"{field} is 0, should be 1 or more")
    return number


def real(value: Any, field: str) -> float:
    """A finite number, as text or from JSON. Raises :class:`DamagedRow`."""
    number = math.nan
    # Python reads 1_000 as a number, and true as 1; the formats do not.
    if type(value) in (int, float) or (type(value) is str and "_" not in value):
        with suppress(ValueError, OverflowError):
            number = float(value)
    if not math.isfinite(number):
        raise DamagedRow(f"{field} is {_short(value)}, should be a number")
    return number


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def record(line: str) -> Mapping[str, Any]:
    """A row that is a JSON object. Raises :class:`DamagedRow`."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DamagedRow(f"not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise DamagedRow(f"should be a JSON object, is {_short(fields)}")
    return fields


def member(fields: Mapping[str, Any], field: str) -> Any:
    """A field of a JSON object. Raises :class:`DamagedRow` where it is missing."""
    try:
        return fields[field]
    except KeyError:
        raise DamagedRow(f"{field} is missing; it has {', '.join(fields) or 'nothing'}") from None


def block_ids(value: Any, field: str) -> tuple[int, ...]:
    """Ids of prefix blocks. Raises :class:`DamagedRow`."""
    if not isinstance(value, list) or not all(type(block_id) is int and block_id >= 0 for block_id in value):
        raise DamagedRow(f"{field} is {_short(value)}, should be a list of whole numbers, 0 or more")
    if value and max(value) >= ID_LIMIT:
        raise DamagedRow(f"{field} holds {_short(max(value))}, should be under {ID_LIMIT}")
    return tuple(value)
