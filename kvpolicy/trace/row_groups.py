"""Row groups of a trace's tables by time and by preemption: what a trace of any length is read by.

The footer of a part file tells the lowest and highest value of each row group, so that those outside are not read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from kvpolicy.trace.parts import TraceError
from kvpolicy.trace.schemas import SCHEMAS
from kvpolicy.trace.table import MAX_RELISTS, core_folders, open_parts, read_rows, with_core

TIMES = {
    "decisions": "time_s", "outcomes": "closed_s", "steps": "start_s", "transfers": "start_s", "requests": "arrival_s",
    "displacements": "time_s",
}  # fmt: skip
"""The column by which :func:`scan` takes a part of a table."""


def scan(
    folder: Path | str,
    name: str,
    columns: Sequence[str] | None = None,
    between_s: tuple[float, float] | None = None,
    preemptions: Collection[str] | None = None,
) -> Iterator[pa.Table]:
    """Rows of one table of a trace of any length, a row group at a time, which is all that is in memory.

    ``columns``: the only ones to read; ``between_s``: of rows whose time (:data:`TIMES`) is in it, on the engine's own
    clock; ``preemptions``: of rows of these. Row groups in which there is none are not read. Each table has a column
    ``core``. Raises as :func:`read`; KeyError for a table without times, or without preemptions, where these are asked
    for.
    """
    time = None if between_s is None else TIMES[name]
    if preemptions is not None and "preemption_id" not in SCHEMAS[name].names:
        raise KeyError(f"table {name} has no preemption_id")
    needed = None
    if columns is not None:
        extra = [*([time] if time else []), *(["preemption_id"] if preemptions is not None else [])]
        needed = list(dict.fromkeys([*columns, *extra]))
    ids = None if preemptions is None else sorted(preemptions)
    for core in core_folders(Path(folder)):
        for table in core_rows(core, name, needed, between_s, ids):
            yield with_core(table if columns is None else table.select(list(columns)), core.name)


def core_rows(
    core: Path,
    name: str,
    columns: Sequence[str] | None = None,
    between_s: tuple[float, float] | None = None,
    ids: Sequence[str] | None = None,
) -> Iterator[pa.Table]:
    """As :func:`scan`, of one core's table, without a column ``core``. ``columns`` has those that rows are taken by;
    ``ids``: preemptions, sorted."""
    time = None if between_s is None else TIMES[name]
    bounds: dict[str, tuple[Any, Any]] = {}
    if time is not None and between_s is not None:
        bounds[time] = between_s
    if ids is not None:
        if not ids:
            return
        bounds["preemption_id"] = ids[0], ids[-1]
    for table in _rows_of_groups(core, name, columns, bounds):
        if time is not None and between_s is not None:
            inside = pc.and_(pc.greater_equal(table[time], between_s[0]), pc.less_equal(table[time], between_s[1]))
            table = table.filter(pc.fill_null(inside, False))
        if ids is not None:
            table = table.filter(pc.is_in(table["preemption_id"], pa.array(ids, pa.string())))
        if table.num_rows:
            yield table


def requests_served_after(core: Path, at_s: float, victims: Sequence[str]) -> Iterator[pa.Table]:
    """Rows of ``requests`` that arrived before ``at_s`` and had a token then or later, or are among ``victims``.

    Row groups whose requests all had their last token before are not read, although one of ``victims`` may be in them:
    one that ended without a token, in a group of others of its kind.
    """
    bounds = {"arrival_s": (-inf, at_s), "last_token_s": (at_s, inf)}
    for table in _rows_of_groups(core, "requests", None, bounds):
        later = pc.fill_null(pc.greater_equal(table["last_token_s"], at_s), False)
        wanted = pc.or_(later, pc.is_in(table["request"], pa.array(victims, pa.string())))
        table = table.filter(pc.and_(pc.less(table["arrival_s"], at_s), wanted))
        if table.num_rows:
            yield table


def _rows_of_groups(
    core: Path, name: str, columns: Sequence[str] | None, bounds: Mapping[str, tuple[Any, Any]]
) -> Iterator[pa.Table]:
    """The rows of each row group that may hold a row within ``bounds``, the lowest and highest value by column."""
    for path, file, seen in open_parts(core, name, columns):
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            skip, seen = min(seen, rows), seen - min(seen, rows)
            if skip < rows and _may_hold(file.metadata.row_group(group), bounds):
                yield read_rows(path, file, name, columns, group).slice(skip)


@dataclass(frozen=True, slots=True)
class Extent:
    """From when to when a core recorded, by its own clock."""

    first_s: float
    last_s: float
    last_path: Path
    """The file with the last row, which a server may merge or remove meanwhile."""


def extent_of(core: Path) -> Extent | None:
    """The extent of a core's rows, of footers where they tell it; None without rows."""
    first_s, last_s, last_path = inf, -inf, core
    for name, time in TIMES.items():
        for path, file, _ in open_parts(core, name, [time]):
            for group in range(file.num_row_groups):
                for lowest, highest in _bounds(path, file, name, time, group):
                    first_s = min(first_s, lowest)
                    if highest > last_s:
                        last_s, last_path = highest, path
    return Extent(first_s, last_s, last_path) if first_s <= last_s else None


def offset_by_files_s(core: Path, extent: Extent) -> float:
    """What is added to a core's clock for seconds since the epoch, where its last row is taken to be as old as its
    file. ``extent``: the core's, read again where a server has merged or removed that file meanwhile."""
    for _ in range(MAX_RELISTS):
        with suppress(FileNotFoundError):
            return extent.last_path.stat().st_mtime - extent.last_s
        extent = extent_of(core) or extent
    raise TraceError(f"{core}: its part files vanish faster than they are read")


def _bounds(path: Path, file: pq.ParquetFile, name: str, time: str, group: int) -> Iterator[tuple[float, float]]:
    """Lowest and highest time of a row group; nothing of one without times."""
    footer = file.metadata.row_group(group)
    for index in range(footer.num_columns):
        column = footer.column(index)
        if column.path_in_schema == time and column.statistics is not None and column.statistics.has_min_max:
            yield float(column.statistics.min), float(column.statistics.max)
            return
    found = pc.min_max(read_rows(path, file, name, [time], group)[time]).as_py()
    if found["min"] is not None:
        yield found["min"], found["max"]


def _may_hold(group: pq.RowGroupMetaData, bounds: Mapping[str, tuple[Any, Any]]) -> bool:
    """Whether a row group may hold a wanted row, by the lowest and highest values that its footer tells."""
    for index in range(group.num_columns):
        column = group.column(index)
        wanted = bounds.get(column.path_in_schema)
        statistics = column.statistics if wanted is not None else None
        if wanted is None or statistics is None or not statistics.has_min_max:
            continue
        if statistics.max < wanted[0] or statistics.min > wanted[1]:
            return False
    return True
