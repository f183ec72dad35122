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
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from kvpolicy import shelf
from kvpolicy.errors import KVPolicyError
from kvpolicy.extensions import names_module
from kvpolicy.fields import refuse_no_paths
from kvpolicy.hardware import EngineSpec
from kvpolicy.hardware.link import header_link
from kvpolicy.trace.digest import row_texts
from kvpolicy.trace.schemas import (
    ABSENT_COLUMNS,
    ALLOWED_WORDS,
    EMPTY_COLUMNS,
    LATER_COLUMNS,
    LATER_FIELDS,
    SCHEMA_VERSION,
    SCHEMAS,
)

LATER_NAMES = ("order", "order_digest")
"""Fields that headers of older versions lack. A header without them has the digest that it had then."""


class TraceError(KVPolicyError):
    """A trace is invalid; the message names the file and the expected value."""


@dataclass(frozen=True, slots=True)
class Header:
    """Engine, machine and settings that one engine core's part of a trace was recorded on."""

    run_id: str
    source: str
    """``profile``, ``production`` or ``simulation``."""
    created: str
    """ISO 8601, UTC."""
    engine: str
    """Engine and version, as ``vllm 0.32.0``."""
    hardware: Mapping[str, Any]
    """See :func:`kvpolicy.hardware.describe`."""
    geometry: Mapping[str, Any]
    """See :class:`kvpolicy.hardware.Geometry`."""
    block_size: int
    block_bytes: int
    device_blocks: int
    host_blocks: int
    policy: str
    link: Mapping[str, Any] = field(default_factory=lambda: header_link(None))
    """``{"kind": "native"}`` or ``{"kind": "simulated", "bytes_per_s": ..., "latency_s": ...}``."""
    seed: int = 0
    noise: Mapping[str, Any] = field(default_factory=dict)
    """Profiles only: variation of identical undisturbed windows, and how it was handled."""
    notes: str = ""
    token_budget: int | None = None
    """Maximum tokens of a step (``max_num_batched_tokens``); None in headers of versions that did not record it."""
    draw_seed: int | None = None
    """Seed of the policy's random draws in this engine core; None if nothing was drawn or it was not recorded."""
    order: str | None = None
    """Label of the order of service; None in headers of versions that did not record it."""
    order_digest: str | None = None
    """See :attr:`kvpolicy.order.Order.digest`; None as above."""
    schema_version: int = SCHEMA_VERSION

    @classmethod
    def recorded_on(
        cls,
        spec: EngineSpec,
        *,
        run_id: str,
        source: str,
        created: str,
        engine: str,
        device_blocks: int,
        host_blocks: int,
        policy: str,
    ) -> Header:
        """A header with the required fields; set the others with ``replace``.

        Raises TraceError for an engine without ``block_bytes``.
        """
        if spec.block_bytes is None:
            raise TraceError(f"header of {run_id}: the engine's block_bytes are missing")
        return cls(
            run_id=run_id,
            source=source,
            created=created,
            engine=engine,
            hardware=dict(spec.hardware),
            geometry=dict(spec.geometry),
            block_size=spec.block_size,
            block_bytes=spec.block_bytes,
            device_blocks=device_blocks,
            host_blocks=host_blocks,
            policy=policy,
            link=dict(spec.link or header_link(None)),
            token_budget=spec.token_budget,
        )

    @property
    def engine_spec(self) -> EngineSpec:
        """The engine that a cost model is checked against."""
        return EngineSpec(
            self.block_size,
            self.token_budget,
            pinned=None,  # in the rows of table transfers
            block_bytes=self.block_bytes,
            geometry=self.geometry,
            hardware=self.hardware,
            link=self.link,
        )

    def write(self, core: Path) -> None:
        core.mkdir(parents=True, exist_ok=True)
        scratch = core / f".header.{os.getpid()}"
        scratch.write_text(json.dumps(asdict(self), indent=2, sort_keys=True) + "\n")
        scratch.replace(core / "header.json")

    @classmethod
    def read(cls, path: Path) -> Header:
        try:
            values = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise TraceError(f"{path}: not a readable trace header: {error}") from error
        if not isinstance(values, dict) or "schema_version" not in values:
            raise TraceError(f"{path}: field schema_version is missing: not a kvpolicy trace header")
        if values["schema_version"] != SCHEMA_VERSION:
            version = values["schema_version"]
            raise TraceError(f"{path}: schema_version is {version}, this kvpolicy reads {SCHEMA_VERSION}")
        names = {f.name for f in fields(cls)}
        missing = sorted(names - values.keys() - {"token_budget", "draw_seed", *LATER_NAMES})
        if missing:
            raise TraceError(f"{path}: field {missing[0]} is missing")
        for name in ("block_size", "block_bytes"):
            if type(values[name]) is not int or values[name] < 1:
                raise TraceError(f"{path}: field {name} is {values[name]!r}, should be a whole number above 0")
        for name, subfield in (("link", "kind"), ("hardware", "device")):
            if not isinstance(values[name], dict) or subfield not in values[name]:
                raise TraceError(f"{path}: field {name}.{subfield} is missing")
        if not isinstance(values["policy"], str) or names_module(values["policy"]):
            raise TraceError(
                f"{path}: field policy is {values['policy']!r}, should be a policy's name, and never a module to run"
            )
        budget = values.setdefault("token_budget", None)
        if budget is not None and (type(budget) is not int or budget < 1):
            raise TraceError(f"{path}: field token_budget is {budget!r}, should be a whole number above 0, or null")
        draw_seed = values.setdefault("draw_seed", None)
        if draw_seed is not None and type(draw_seed) is not int:
            raise TraceError(f"{path}: field draw_seed is {draw_seed!r}, should be a whole number, or null")
        for name in LATER_NAMES:
            if not isinstance(values.setdefault(name, None), str | None):
                raise TraceError(f"{path}: field {name} is {values[name]!r}, should be a text, or null")
        return cls(**{name: values[name] for name in names})


@dataclass(frozen=True, slots=True)
class Trace:
    """Tables of one or several engine cores, in memory. Each table has a column ``core`` in addition to its schema."""

    headers: Mapping[str, Header]
    """Headers by core."""
    tables: Mapping[str, pa.Table]

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
    """Write one part file, renamed into place when it is complete."""
    folder = core / name
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"part-{number:06d}.parquet"
    scratch = folder / f".part-{number:06d}.{os.getpid()}"
    pq.write_table(table, scratch, compression="zstd")
    scratch.replace(path)
    return path


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
        raise TraceError(f"{folder}: no */header.json inside: not a kvpolicy trace")
    for table in sorted(folder.glob("*/*/part-*.parquet")):
        if table.parent.parent not in cores and table.parent.name in SCHEMAS:
            raise TraceError(
                f"{table.parent.parent}: holds {table.parent.name} but no header.json; it was lost or moved"
            )
    return cores


def iter_parts(core: Path, name: str) -> Iterator[pa.Table]:
    """The checked part files of one core's table, in order."""
    for path in sorted((core / name).glob("part-*.parquet")):
        yield read_part(path, name)


def read_part(path: Path, name: str) -> pa.Table:
    """One part file, checked against the schema of table ``name``."""
    try:
        table = pq.read_table(path, partitioning=None)
    except (OSError, pa.ArrowException) as error:
        raise TraceError(f"{path}: damaged or not a Parquet file: {error}") from error
    table = _with_empty_columns(_with_later_columns(table, name), name)
    known = [column for column in SCHEMAS[name].names if not _may_lack(table, name, column)]
    for column in map(SCHEMAS[name].field, known):
        if column.name not in table.column_names:
            raise TraceError(f"{path}: column {column.name} is missing; {name} needs it as {column.type}")
        table = _completed(table, column, LATER_FIELDS.get((name, column.name), ()))
        found_type = table.schema.field(column.name).type
        if found_type != column.type and not _same_shape(found_type, column.type):
            raise TraceError(f"{path}: column {column.name} is {found_type}, should be {column.type}")
    _refuse_bad_values(str(path), name, table)
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


def _refuse_bad_values(where: str, name: str, table: pa.Table) -> None:
    for column in SCHEMAS[name]:
        if _may_lack(table, name, column.name):
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
