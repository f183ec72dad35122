"""Requests of a measured run, one a row, as LLMServingSim's benchmark writes them, for replay and comparison.

Columns: ``input_toks``, ``output_toks``, ``client_arrival_s``; with measured times also ``scheduled_ts``,
``first_token_ts`` and ``last_token_ts``, all in seconds from one origin. Optional, and empty where a request has none:
``class``, ``priority``, ``ttft_deadline_s`` and ``tpot_deadline_s``, as in table ``requests`` of a trace.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv

from kvpolicy.arrays import Flags, Floats, Ints
from kvpolicy.errors import KVPolicyError
from kvpolicy.workload import Request, Workload
from kvpolicy.workload.files import EXACT
from kvpolicy.workload.requests import MARKS

COUNTS = ("input_toks", "output_toks")
ARRIVAL = "client_arrival_s"
STAMPS = ("scheduled_ts", "first_token_ts", "last_token_ts")
CLASS, PRIORITY = "class", "priority"
DEADLINES = ("ttft_deadline_s", "tpot_deadline_s")


class RequestsError(KVPolicyError):
    """A file of requests that cannot be replayed; the message names file, row and column."""


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """Measured times of each request, in the order of the workload; seconds from its origin."""

    workload: Workload
    scheduled_s: Floats
    first_token_s: Floats
    last_token_s: Floats

    @property
    def arrival_s(self) -> Floats:
        return np.array([request.arrival_s for request in self.workload], np.float64)

    @property
    def output_tokens(self) -> Floats:
        return np.array([request.output_tokens for request in self.workload], np.float64)


def measured_requests(path: Path | str) -> Workload:
    """The requests of a measured run, by arrival; they share no prefixes. Raises :class:`RequestsError`."""
    file = Path(path)
    table = _table(file)
    return _workload(file, table, _columns(file, table, (*COUNTS, ARRIVAL)))


def measured_run(path: Path | str) -> MeasuredRun:
    """The requests with their measured times. Raises :class:`RequestsError`, also for times out of order."""
    file = Path(path)
    table = _table(file)
    columns = _columns(file, table, (*COUNTS, ARRIVAL, *STAMPS))
    for earlier, later in pairwise(STAMPS):
        _refuse(file, columns[later] < columns[earlier], later, columns[later], f"no earlier than {earlier}")
    return MeasuredRun(_workload(file, table, columns), *(columns[name][_order(columns)] for name in STAMPS))


def _order(columns: dict[str, Floats]) -> Ints:
    """Row numbers by arrival: a log may be in the order in which requests ended."""
    return np.argsort(columns[ARRIVAL], kind="stable")


def _workload(file: Path, table: pa.Table, by_name: dict[str, Floats]) -> Workload:
    order = _order(by_name)
    columns = (by_name[name][order].tolist() for name in (ARRIVAL, *COUNTS))
    marks = _marks(file, table)
    requests = tuple(
        Request(arrival, int(prompt), int(output), **marks[row])
        for arrival, prompt, output, row in zip(*columns, order.tolist(), strict=True)
    )
    return Workload(file.name.partition(".")[0], requests, seed=0, source=file.name)


def _marks(file: Path, table: pa.Table) -> list[dict[str, Any]]:
    """Class, priority and deadlines of each row, as fields of its request; the columns that are missing set none."""
    marks: list[dict[str, Any]] = [{} for _ in range(table.num_rows)]
    if CLASS in table.column_names:
        for row, name in enumerate(table[CLASS].to_pylist()):
            marks[row] |= {"class_name": name} if name else {}
    if PRIORITY in table.column_names:
        values = _filled(file, PRIORITY, table[PRIORITY], 0.0)
        _refuse(file, (values != np.floor(values)) | (np.abs(values) >= EXACT), PRIORITY, values, "a whole number")
        for row, value in enumerate(values.tolist()):
            marks[row]["priority"] = int(value)
    for name in set(DEADLINES) & {*table.column_names}:
        values = _filled(file, name, table[name], np.inf)
        _refuse(file, values <= 0, name, values, "a number above 0, or empty")
        for row, value in enumerate(values.tolist()):
            marks[row][MARKS[name]] = value if np.isfinite(value) else None
    return marks


MAX_CSV_BYTES = 1 << 30


def _table(file: Path) -> pa.Table:
    as_text = pyarrow.csv.ConvertOptions(column_types={CLASS: pa.string()})
    try:
        if file.stat().st_size > MAX_CSV_BYTES:
            raise RequestsError(f"{file}: is larger than {MAX_CSV_BYTES:,} bytes, which is the most that is read")
        table = pyarrow.csv.read_csv(file, convert_options=as_text)
        names = table.column_names
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise RequestsError(f"{file}: cannot be read: {error}") from error
    for name in names:
        if names.count(name) > 1:
            raise RequestsError(f"{file}: column {name} is there twice, should be there once")
    return table


def _columns(file: Path, table: pa.Table, names: tuple[str, ...]) -> dict[str, Floats]:
    missing = [name for name in names if name not in table.column_names]
    if missing:
        raise RequestsError(f"{file}: no column {missing[0]}; there are {', '.join(table.column_names)}")
    columns = {name: _numbers(file, name, table[name]) for name in names}
    for name in COUNTS:
        values = columns[name]
        _refuse(file, (values < 1) | (values != np.floor(values)), name, values, "a whole number of 1 or more")
    return columns


def _filled(file: Path, name: str, column: pa.ChunkedArray, empty: float) -> Floats:
    """The column's numbers, with ``empty`` where a cell is empty."""
    if pa.types.is_null(column.type):
        return np.full(len(column), empty)
    values = _as_floats(file, name, column, empty)
    _refuse(file, ~np.isfinite(values) & (values != empty), name, values, "a number, or empty")
    return values


def _as_floats(file: Path, name: str, column: pa.ChunkedArray, empty: float) -> Floats:
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        raise RequestsError(f"{file}: column {name} is {column.type}, should hold numbers")
    return np.asarray(column.cast(pa.float64()).fill_null(empty).to_numpy(), np.float64)


def _numbers(file: Path, name: str, column: pa.ChunkedArray) -> Floats:
    values = _as_floats(file, name, column, float("nan"))
    _refuse(file, ~np.isfinite(values) | (values < 0), name, values, "a number, 0 or above")
    return values


def _refuse(file: Path, bad: Flags, name: str, values: Floats, should: str) -> None:
    if bad.any():
        row = int(np.argmax(bad))
        raise RequestsError(f"{file}, row {row}: {name} is {float(values[row])!r}, should be {should}")
