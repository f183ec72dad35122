"""Traces: what an engine or a simulator did, as a folder of Parquet part files.

    TRACE/CORE/header.json
    TRACE/CORE/decisions/part-000000.parquet      likewise the other tables of kvpolicy.trace.schemas

There is one ``CORE`` sub-folder per engine core, so that several servers can write into one trace. Part files are
renamed into place when they are complete. Unknown columns are preserved. A missing column, a wrong type or an empty
value in a required column raises a :class:`TraceError` that names file, column and row. Columns that were added later
(:data:`~kvpolicy.trace.schemas.LATER_COLUMNS`, :data:`~kvpolicy.trace.schemas.EMPTY_COLUMNS`) are filled in where an
older trace lacks them; those of
:data:`~kvpolicy.trace.schemas.ABSENT_COLUMNS` stay absent.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from kvpolicy import shelf
from kvpolicy.fields import refuse_no_paths
from kvpolicy.trace.digest import row_texts
from kvpolicy.trace.header import LATER_NAMES, Header
from kvpolicy.trace.parts import (
    Part,
    TraceError,
    make_folder,
    open_private,
    opened,
    parquet_options,
    part_path,
    parts_of,
    refuse_links,
)
from kvpolicy.trace.schemas import (
    ABSENT_COLUMNS,
    ALLOWED_WORDS,
    EMPTY_COLUMNS,
    LATER_COLUMNS,
    LATER_FIELDS,
    SCHEMAS,
)


@dataclass(frozen=True, slots=True)
class Trace:
    """Tables of one or several engine cores, in memory. Each table has a column ``core`` in addition to its schema."""

    headers: Mapping[str, Header]
    """Headers by core."""
    tables: Mapping[str, pa.Table]
    begin_s: Mapping[str, float] = field(default_factory=dict)
    """When a window of time began, by core and on its clock; empty of a whole trace. See :meth:`arrivals`."""

    def arrivals(self) -> pa.Table:
        """The rows of ``requests`` to count. A window also has those that arrived before it and were served in it."""
        requests = self.table("requests")
        for core, begin_s in self.begin_s.items():
            inside = pc.or_(pc.not_equal(requests["core"], core), pc.greater_equal(requests["arrival_s"], begin_s))
            requests = requests.filter(inside)
        return requests

    def table(self, name: str) -> pa.Table:
        """A table, empty if nothing was recorded for it. Raises KeyError for an unknown name."""
        schema = SCHEMAS[name]
        recorded = self.tables.get(name)
        return with_core(schema.empty_table(), "") if recorded is None else recorded

    def rows(self, name: str, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """The table's rows, or only some columns of them, which is much cheaper if the others hold lists."""
        table = self.table(name)
        rows: list[dict[str, Any]] = (table if columns is None else table.select(list(columns))).to_pylist()
        return rows

    def step_weights(self) -> pa.ChunkedArray:
        """How many steps each row of ``steps`` stands for: 1, or more where a server recorded a share of them."""
        return weights_of(self.table("steps"))

    def refuse_sampled(self, what: str) -> None:
        """Raise TraceError where only a share of the steps was recorded. ``what`` needs all of them."""
        steps = self.table("steps")
        if "weight" in steps.column_names and (pc.max(self.step_weights()).as_py() or 1) > 1:
            raise TraceError(
                f"table steps: {what} needs every step, and the server recorded a share of them: record with "
                "--trace-steps 1"
            )

    def digest(self) -> str:
        """SHA-256 over headers and tables, independent of the split into part files."""
        state = hashlib.sha256()
        for core in sorted(self.headers):
            values = asdict(self.headers[core])
            known = {name: value for name, value in values.items() if value is not None or name not in LATER_NAMES}
            state.update(json.dumps(known, sort_keys=True).encode())
        for name in sorted(SCHEMAS):
            table = self.table(name)
            empty = [
                column
                for column in EMPTY_COLUMNS.get(name, ())
                if column in table.column_names and table[column].null_count == table.num_rows
            ]
            for text in row_texts(table.drop_columns(empty)):
                state.update(text)
        return state.hexdigest()

    def write(self, folder: Path) -> None:
        """Write one part file per table and core. Raises FileExistsError if the folder is not empty."""
        if folder.exists() and any(folder.iterdir()):
            raise FileExistsError(f"{folder}: exists and is not empty")
        for core, header in self.headers.items():
            header.write(folder / core)
            for name, table in self.tables.items():
                core_table = table.filter(pc.equal(table["core"], core)).drop_columns(["core"])
                if core_table.num_rows:
                    write_part(folder / core, name, 0, core_table)


def weights_of(steps: pa.Table) -> pa.ChunkedArray:
    """How many steps each row stands for."""
    if "weight" in steps.column_names:
        return pc.fill_null(steps["weight"], 1.0)
    return pa.chunked_array([pa.repeat(pa.scalar(1.0), steps.num_rows)])


def left_out_before(steps: pa.Table) -> pa.ChunkedArray:
    """How many steps right before each row were left out."""
    if "left_out" in steps.column_names:
        return pc.fill_null(steps["left_out"], 0)
    return pa.chunked_array([pa.repeat(pa.scalar(0, pa.int64()), steps.num_rows)])


def with_core(table: pa.Table, core: str) -> pa.Table:
    return table.append_column("core", pa.array([core] * table.num_rows, pa.string()))


def from_rows(name: str, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Arrow table from rows made by :mod:`kvpolicy.trace.rows`.

    Raises :class:`TraceError`, naming table, column and row, for an invalid value.
    """
    absent = {column for column in ABSENT_COLUMNS.get(name, ()) if not any(column in row for row in rows)}
    schema = pa.schema([column for column in SCHEMAS[name] if column.name not in absent])
    columns = []
    for column in schema:
        try:
            columns.append(pa.array([row[column.name] for row in rows], column.type))
        except KeyError:
            row_number = next(i for i, row in enumerate(rows) if column.name not in row)
            raise TraceError(f"table {name}, row {row_number}: {column.name} missing") from None
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
            row_number = next(i for i, row in enumerate(rows) if not _fits(row[column.name], column.type))
            raise TraceError(
                f"table {name}, row {row_number}, column {column.name}: wants {column.type}: {error}"
            ) from error
    table = pa.Table.from_arrays(columns, schema=schema)
    _refuse_bad_values(f"table {name}", name, table)
    return table


def _fits(value: Any, kind: pa.DataType) -> bool:
    try:
        pa.array([value], kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        return False
    return True


def write_part(core: Path, name: str, number: int, table: pa.Table) -> Path:
    """Write one part file, for its owner alone, renamed into place when it is complete."""
    folder = core / name
    make_folder(folder)
    path = part_path(folder, number)
    scratch = folder / f".part-{number:06d}.{os.getpid()}"
    with open_private(scratch) as file:
        pq.write_table(table, file, **parquet_options(table.schema))
    scratch.replace(path)
    return path


MAX_NAMED = 4
"""Sub-folders that are named where a folder is no trace and they are."""


def core_folders(folder: Path) -> list[Path]:
    """The engine cores' sub-folders of a trace, a folder or one that ships, by its name. Raises :class:`TraceError` if
    there are none."""
    folder = shelf.trace_folder(folder)
    if not folder.is_dir():
        raise TraceError(
            f"{folder}: no such folder; a trace is a folder written by `kvpolicy profile` or a server, or one that "
            f"ships: {', '.join(shelf.names('traces'))}"
        )
    cores = sorted(path.parent for path in folder.glob("*/header.json"))
    if not cores:
        inside = sorted({str(path.parents[1]) for path in folder.glob("*/*/header.json")})
        others = f" and {len(inside) - MAX_NAMED} others" if len(inside) > MAX_NAMED else ""
        named = f"; traces are in {', '.join(inside[:MAX_NAMED])}{others}: give one of these" if inside else ""
        raise TraceError(f"{folder}: no */header.json inside: not a kvpolicy trace{named}")
    for core in sorted(path for path in folder.iterdir() if path.is_dir() and path not in cores):
        for name in SCHEMAS:
            if any((core / name).glob("part-*.parquet")):
                raise TraceError(f"{core}: holds {name} but no header.json; it was lost or moved")
    for core in cores:
        refuse_links(core, core / "header.json", *(core / name for name in SCHEMAS))
    return cores


MAX_RELISTS = 100


def iter_parts(core: Path, name: str, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
    """The checked part files of one core's table, in order; only some columns of them, where ``columns`` are given.

    The trace may be written to and merged meanwhile.
    """
    for path, file, seen in open_parts(core, name, columns):
        yield read_rows(path, file, name, columns).slice(seen)


def open_parts(core: Path, name: str, columns: Sequence[str] | None) -> Iterator[tuple[Path, pq.ParquetFile, int]]:
    """The part files of one core's table, open, in order; and how many of the first rows of each were given already.

    That is so where a merge has taken away parts that were given, and what it made of them holds others, too.
    """
    given: list[tuple[Part, int]] = []
    for _ in range(MAX_RELISTS):
        for part in parts_of(core / name):
            if given and part.last <= given[-1][0].last:
                continue
            try:
                file = opened(part.path, columns)
            except FileNotFoundError:
                break
            seen = sum(rows for earlier, rows in given if earlier.first >= part.first)
            given.append((part, file.metadata.num_rows - seen))
            yield part.path, file, seen
        else:
            return
    raise TraceError(f"{core / name}: its part files vanish faster than they are read")


def read_part(path: Path, name: str, columns: Sequence[str] | None = None) -> pa.Table:
    """One part file, checked against the schema of table ``name``; only some of its columns, where they are given.

    Raises FileNotFoundError where it is gone.
    """
    return read_rows(path, opened(path, columns), name, columns)


def read_rows(
    path: Path, file: pq.ParquetFile, name: str, columns: Sequence[str] | None, group: int | None = None
) -> pa.Table:
    """The checked rows of an open part file, or of one of its row groups."""
    try:
        present = None if columns is None else [one for one in file.schema_arrow.names if one in columns]
        table = file.read(present) if group is None else file.read_row_group(group, present)
        names = set(table.column_names)  # which may be no text
    except (OSError, ValueError, pa.ArrowException) as error:
        raise TraceError(f"{path}: damaged or not a Parquet file: {error}") from error
    if len(names) < table.num_columns:
        raise TraceError(f"{path}: has a column twice: {', '.join(table.column_names)}")
    return checked(table, path, name, columns)


def checked(table: pa.Table, path: Path, name: str, columns: Sequence[str] | None = None) -> pa.Table:
    """Rows of a part file, with the columns that older traces lack. Raises TraceError for what does not fit."""
    table = _with_empty_columns(_with_later_columns(table, name), name) if columns is None else table
    known = [
        column
        for column in SCHEMAS[name].names
        if not _may_lack(table, name, column) and (columns is None or column in columns)
    ]
    for column in map(SCHEMAS[name].field, known):
        if column.name not in table.column_names:
            raise TraceError(f"{path}: column {column.name} is missing; {name} needs it as {column.type}")
        table = _completed(table, column, LATER_FIELDS.get((name, column.name), ()))
        found_type = table.schema.field(column.name).type
        if found_type != column.type and not _same_shape(found_type, column.type):
            raise TraceError(f"{path}: column {column.name} is {found_type}, should be {column.type}")
    _refuse_bad_values(str(path), name, table, known)
    unknown = [column for column in table.column_names if column not in known]
    return table.select([*known, *unknown])


def _may_lack(table: pa.Table, name: str, column: str) -> bool:
    """Whether the table lacks a column, and may."""
    return column not in table.column_names and column in ABSENT_COLUMNS.get(name, ())


def _with_later_columns(table: pa.Table, name: str) -> pa.Table:
    """Add the columns that the table lacks because it is older, with the values of those that had their meaning."""
    later = LATER_COLUMNS.get(name, {})
    if not later or not later.keys().isdisjoint(table.column_names) or not set(later.values()) <= {*table.column_names}:
        return table
    for column, source in later.items():
        if not pa.types.is_integer(table[source].type):
            return table
        table = table.append_column(column, pc.cast(table[source], SCHEMAS[name].field(column).type))
    return table


def _with_empty_columns(table: pa.Table, name: str) -> pa.Table:
    """Add the columns that the table lacks because it is older, empty."""
    for column in EMPTY_COLUMNS.get(name, ()):
        if column not in table.column_names:
            table = table.append_column(column, pa.nulls(table.num_rows, SCHEMAS[name].field(column).type))
    return table


def _completed(table: pa.Table, column: pa.Field, later: Sequence[str]) -> pa.Table:
    """Add the fields in ``later`` to a column of record lists, with empty values."""
    found_type = table.schema.field(column.name).type
    if not later or not pa.types.is_list(found_type) or table[column.name].null_count:
        return table
    fields = [field for field in column.type.value_type if field.name not in later]
    if found_type.value_type != pa.struct(fields):
        return table
    lists = table[column.name].combine_chunks()
    records = lists.flatten()
    values = [records.field(field.name) for field in fields]
    for name in later:
        fields.append(column.type.value_type.field(name))
        values.append(pa.nulls(len(records), fields[-1].type))
    ends = np.concatenate([[0], np.cumsum(lists.value_lengths())]).astype(np.int32)
    completed = pa.ListArray.from_arrays(pa.array(ends), pa.StructArray.from_arrays(values, fields=fields))
    return table.set_column(table.column_names.index(column.name), column.name, completed)


def _same_shape(found_type: pa.DataType, wanted_type: pa.DataType) -> bool:
    """Whether two types differ only in the names that Parquet gives to list items."""
    if pa.types.is_list(found_type) and pa.types.is_list(wanted_type):
        return bool(found_type.value_type == wanted_type.value_type)
    return False


def _refuse_bad_values(where: str, name: str, table: pa.Table, columns: Sequence[str] | None = None) -> None:
    for column in SCHEMAS[name]:
        if _may_lack(table, name, column.name) or (columns is not None and column.name not in columns):
            continue
        values = table[column.name]
        if not column.nullable and values.null_count:
            raise TraceError(f"{where}, row {_first_row(pc.is_null(values))}: {column.name} is empty")
        if pa.types.is_floating(column.type):
            bad = pc.invert(pc.is_finite(pc.fill_null(values, 0.0)))
            if pc.any(bad).as_py():
                raise TraceError(f"{where}, row {_first_row(bad)}: {column.name} is not a finite number")
        words = ALLOWED_WORDS.get((name, column.name))
        if words:
            bad = pc.invert(pc.is_in(values, pa.array(words)))
            if pc.any(bad).as_py():
                raise TraceError(f"{where}, row {_first_row(bad)}: {column.name} should be one of {', '.join(words)}")


def _first_row(mask: pa.ChunkedArray | pa.Array) -> int:
    return int(pc.index(mask, pa.scalar(True)).as_py())


def read(folder: Path | str, *more_folders: Path | str) -> Trace:
    """Read one or more traces into one. Raises :class:`TraceError` for anything missing or invalid,
    WrongValue for what is no path."""
    refuse_no_paths("folders", (folder, *more_folders))
    headers: dict[str, Header] = {}
    parts: dict[str, list[pa.Table]] = {name: [] for name in SCHEMAS}
    for core in [core for trace_folder in (folder, *more_folders) for core in core_folders(Path(trace_folder))]:
        if core.name in headers:
            raise TraceError(f"{core}: a core of this name is there already; is a trace given twice?")
        headers[core.name] = Header.read(core / "header.json")
        for name in SCHEMAS:
            parts[name] += [with_core(part, core.name) for part in iter_parts(core, name)]
    tables = {
        name: pa.concat_tables(tables_of_name, promote_options="default")
        for name, tables_of_name in parts.items()
        if tables_of_name
    }
    return Trace(headers, tables)
