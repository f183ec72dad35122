"""Row groups of a trace's tables by time and by preemption: what a trace of any length is read by.

The footer of a part file tells the lowest and highest value of each row group, so that those outside are not read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from kvpolicy.trace.schemas import SCHEMAS
from kvpolicy.trace.table import core_folders, open_parts, read_rows, with_core

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
    for path, file, seen in open_parts(core, name, columns):
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            skip, seen = min(seen, rows), seen - min(seen, rows)
            if skip == rows or not _may_hold(file.metadata.row_group(group), time, between_s, ids):
                continue
            table = read_rows(path, file, name, columns, group).slice(skip)
            if time is not None and between_s is not None:
                inside = pc.and_(pc.greater_equal(table[time], between_s[0]), pc.less_equal(table[time], between_s[1]))
                table = table.filter(pc.fill_null(inside, False))
            if ids is not None:
                table = table.filter(pc.is_in(table["preemption_id"], pa.array(ids, pa.string())))
            if table.num_rows:
                yield table


@dataclass(frozen=True, slots=True)
class Extent:
    """From when to when a core recorded, by its own clock."""

    first_s: float
    last_s: float
    written_s: float
    """When the file with the last row was written, seconds since the epoch."""


def extent_of(core: Path) -> Extent | None:
    """The extent of a core's rows, of footers where they tell it; None without rows."""
    first_s, last_s, written_s = inf, -inf, -inf
    for name, time in TIMES.items():
        for path, file, _ in open_parts(core, name, [time]):
            for group in range(file.num_row_groups):
                for lowest, highest in _bounds(path, file, name, time, group):
                    first_s = min(first_s, lowest)
                    if highest > last_s:
                        last_s, written_s = highest, path.stat().st_mtime
    return Extent(first_s, last_s, written_s) if first_s <= last_s else None


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


def _may_hold(
    group: pq.RowGroupMetaData, time: str | None, between_s: tuple[float, float] | None, ids: Sequence[str] | None
) -> bool:
    """Whether a row group may hold a wanted row, by the lowest and highest values that its footer tells."""
    for index in range(group.num_columns):
        column = group.column(index)
        wanted: Any = between_s if column.path_in_schema == time else None
        if column.path_in_schema == "preemption_id" and ids is not None:
            if not ids:
                return False
            wanted = (ids[0], ids[-1])
        statistics = column.statistics if wanted is not None else None
        if wanted is None or statistics is None or not statistics.has_min_max:
            continue
        if statistics.max < wanted[0] or statistics.min > wanted[1]:
            return False
    return True
