"""Tables of measured operator times, read into columns that a regressor can be fitted to.

A file's layout is recognised by its columns, never by its name, so that other devices' files in the same layouts work.
One file yields one table per operator in it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from kvpolicy.arrays import Floats, Ints
from kvpolicy.errors import KVPolicyError
from kvpolicy.simulator.hardware.layouts import LAYOUTS, WHOLE, Layout, Rows, Times

ENDINGS = (".parquet", ".csv", ".csv.gz")


class TableError(KVPolicyError):
    """A table of times that cannot be read; the message names the file, and the row where there is one."""


@dataclass(frozen=True, slots=True)
class Table:
    """One operator's measured times."""

    file: str
    operator: str
    layout: str
    times: Times
    seconds: Floats
    groups: Ints
    """Equal for repeats of one measured point."""
    rows_in_file: int
    left_out: tuple[str, ...]
    """What was filtered, for a person."""

    @property
    def x(self) -> Floats:
        """Features, shape (rows, columns)."""
        return np.column_stack(list(self.times.features.values()))

    @property
    def plain(self) -> Floats:
        """The measured settings as they stand in the file: what models without physics see."""
        return np.column_stack(list(self.times.settings.values()))

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.times.features)

    def __len__(self) -> int:
        return len(self.seconds)

    def noise(self) -> float | None:
        """Mean distance of a repeat from its point's mean, relative; None where no point was measured twice.

        No model of these settings can be expected to miss by less.
        """
        counts = np.bincount(self.groups)
        mean = np.bincount(self.groups, self.seconds) / np.maximum(counts, 1)
        repeated = counts[self.groups] > 1
        if not repeated.any():
            return None
        # The mean of n holds 1/n of the row itself.
        unbiased = np.sqrt(counts / np.maximum(counts - 1, 1))[self.groups]
        return float((np.abs(self.seconds / mean[self.groups] - 1) * unbiased)[repeated].mean())


def tables_in(folder: Path) -> tuple[list[Table], list[str]]:
    """All tables in a folder, by file name, and why other files were passed over.

    Raises :class:`TableError` for a file in a known layout with a time that cannot be, or no table at all.
    """
    if not folder.is_dir():
        raise TableError(f"{folder}: is not a folder")
    found: list[Table] = []
    passed_over = []
    for file in sorted(folder.iterdir()):
        if not file.name.endswith(ENDINGS):
            continue
        layout, rows = _recognised(file)
        if layout is None:
            passed_over.append(f"{file.name}: not in a known layout; its columns are {', '.join(rows.names)}")
        else:
            found += _tables(file, layout, rows)
    if not found:
        raise TableError(f"{folder}: holds no table in a known layout ({', '.join(one.name for one in LAYOUTS)})")
    return found, passed_over


def read_table(file: Path) -> list[Table]:
    """The tables in one file. Raises :class:`TableError` for an unknown layout too."""
    layout, rows = rows_of(file)
    return list(_tables(file, layout, rows))


def rows_of(file: Path) -> tuple[Layout, Rows]:
    """A file's layout and columns as they stand in it. Raises :class:`TableError` for an unknown layout too."""
    layout, rows = _recognised(file)
    if layout is None:
        raise TableError(f"{file}: not in a known layout; its columns are {', '.join(rows.names)}")
    return layout, rows


def _recognised(file: Path) -> tuple[Layout | None, Rows]:
    try:
        table = _read(file)
    except (pa.ArrowException, OSError) as error:
        raise TableError(f"{file}: cannot be read: {error}") from error
    rows = Rows(str(file), table)
    return next((layout for layout in LAYOUTS if layout.needs <= set(rows.names)), None), rows


def _read(file: Path) -> pa.Table:
    if file.name.endswith(".parquet"):
        return pyarrow.parquet.read_table(file)
    # An empty cell is a time that was not measured; "nan" is one that went wrong.
    return pyarrow.csv.read_csv(file, convert_options=pyarrow.csv.ConvertOptions(null_values=[""]))


def _tables(file: Path, layout: Layout, rows: Rows) -> Iterator[Table]:
    for name in sorted(layout.needs & layout.counts):
        _refuse(file, name, rows.number(name), "0 or above", below=0.0)
    for part in layout.parts(rows):
        measured = rows.number(part.time)
        if part.seconds is not None:
            measured = np.where(np.isfinite(measured) & (measured > 0), part.seconds, measured)
        absent = rows.absent(part.time)
        if absent.any() and not layout.times_may_be_absent:
            raise TableError(f"{file}, row {int(np.argmax(absent))}: {part.time} is missing, should be a time above 0")
        _refuse(file, part.time, np.where(absent, 1.0, measured), "a time above 0")
        chosen = part.rows & ~absent
        left_out = list(part.left_out)
        if absent[part.rows].any():
            left_out.append(f"{int(absent[part.rows].sum())} rows without {part.time}")
        if not chosen.any():
            continue
        times = part.times.of(chosen)
        settings = np.column_stack(list(times.settings.values()))
        groups = np.unique(settings, axis=0, return_inverse=True)[1].ravel()
        yield Table(
            file.name, part.operator, layout.name, times, measured[chosen] * layout.seconds_per_unit,
            groups, len(measured), tuple(left_out),
        )  # fmt: skip


def _refuse(file: Path, name: str, values: Floats, should: str, below: float = np.nextafter(0.0, 1.0)) -> None:
    bad = ~np.isfinite(values) | (values < below)
    if bad.any():
        row = int(np.argmax(bad))
        raise TableError(f"{file}, row {row}: {name} is {float(values[row])!r}, should be {should}")


def subsampled(table: Table, max_rows: int, seed: int) -> Table:
    """At most about ``max_rows`` rows, whole points drawn at random under ``seed``; the longest tenth of all kept,
    as far as there is room."""
    if len(table) <= max_rows:
        return table
    points = int(table.groups.max()) + 1
    length = np.zeros(points)
    np.maximum.at(length, table.groups, table.times.length)
    wanted = int(points * max_rows / len(table))
    longest = np.argsort(-length, kind="stable")[: min(wanted, ceil(points / 10))]
    rest = np.random.default_rng(seed).permutation(np.setdiff1d(np.arange(points), longest))
    drawn = np.concatenate([longest, rest[: wanted - len(longest)]])
    chosen = np.isin(table.groups, drawn)
    times = table.times.of(chosen)
    return Table(
        table.file, table.operator, table.layout, times, table.seconds[chosen],
        np.unique(table.groups[chosen], return_inverse=True)[1], table.rows_in_file,
        (*table.left_out, f"{wanted} of {points} measured points drawn"),
    )  # fmt: skip


def bins_of(values: Floats, most: int) -> Ints:
    """Number of the quantile bin of each value; ties share a bin."""
    edges = np.unique(np.quantile(values, np.linspace(0, 1, most + 1)[1:-1]))
    return np.searchsorted(edges, values, side="right")


def select(table: Table, rows: Sequence[int] | Ints) -> tuple[Floats, Floats, Floats, Ints]:
    """(features, plain settings, seconds, groups) of some rows."""
    chosen = np.asarray(rows)
    return table.x[chosen], table.plain[chosen], table.seconds[chosen], table.groups[chosen]


@dataclass(frozen=True, slots=True)
class Opened:
    """One file."""

    file: Path
    layout: str
    rows: Rows
    tables: Mapping[str, Table]
    """By operator."""
    sha256: str

    def described(self, told: str) -> dict[str, Any]:
        """For the hardware model's list of inputs."""
        return {
            "file": self.file.name, "sha256": self.sha256, "layout": self.layout, "rows": len(self.rows), "told": told,
        }  # fmt: skip

    @property
    def device(self) -> str | None:
        """As the file names it; None where it does not."""
        if "device" not in self.rows.names:
            return None
        return ", ".join(sorted(set(self.rows.text("device").tolist())))


def opened(files: Sequence[Path]) -> list[Opened]:
    """Raises :class:`TableError` for an unknown layout, a time that cannot be, or two files that tell the same."""
    found: list[Opened] = []
    for file in files:
        layout, rows = rows_of(file)
        tables = {table.operator: table for table in read_table(file) if table.operator != WHOLE}
        found.append(Opened(file, layout.name, rows, tables, hashlib.sha256(file.read_bytes()).hexdigest()))
    for number, one in enumerate(found):
        for other in found[:number]:
            if other.layout == one.layout and set(other.tables) & set(one.tables):
                raise TableError(f"{one.file} and {other.file} tell the same ({one.layout}): give one of them")
    return found


def with_operator(files: Iterable[Opened], layout: str, operator: str | None = None) -> Opened | None:
    """The file in that layout, and with that operator in it; None where none was given."""
    return next((one for one in files if one.layout == layout and operator in (None, *one.tables)), None)


def medians(settings: Floats, seconds: Floats) -> tuple[Floats, Floats]:
    """Points measured (rows, columns), sorted, and the median time of each."""
    if not len(seconds):
        return settings, seconds
    points, number = np.unique(settings, axis=0, return_inverse=True)
    order = np.argsort(number.ravel(), kind="stable")
    starts = np.searchsorted(number.ravel()[order], np.arange(len(points)))
    times = [np.median(part) for part in np.split(seconds[order], starts[1:])]
    return points, np.array(times, np.float64)
