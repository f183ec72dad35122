"""Tables of measured operator times, read into columns for fitting a regressor.

A file's layout is recognised by its columns, never by its name, so that files of other devices work too. A file yields
one table per operator.
"""

from __future__ import annotations

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
from kvpolicy.simulator.hardware.layout import Layout, Rows, Times
from kvpolicy.simulator.hardware.layouts import LAYOUTS, WHOLE
from kvpolicy.stored_tables import UnreadableTable, opened
from kvpolicy.stored_values import sha256_of

ENDINGS = (".parquet", ".csv", ".csv.gz")


class TableError(KVPolicyError):
    """An unreadable table of times; the message names the file, and the row where one is at fault."""


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
    """Rows that were filtered out, in words."""

    @property
    def x(self) -> Floats:
        """Features, shape (rows, columns)."""
        return np.column_stack(list(self.times.features.values()))

    @property
    def plain(self) -> Floats:
        """Measured settings as in the file: the input of models without physics."""
        return np.column_stack(list(self.times.settings.values()))

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.times.features)

    def __len__(self) -> int:
        return len(self.seconds)

    def noise(self) -> float | None:
        """Mean relative distance of a repeat from its point's mean; None where no point was measured twice.

        No model of these settings can be expected to have a lower error.
        """
        counts = np.bincount(self.groups)
        mean = np.bincount(self.groups, self.seconds) / np.maximum(counts, 1)
        repeated = counts[self.groups] > 1
        if not repeated.any():
            return None
        # The mean of n rows contains 1/n of the row itself.
        unbiased = np.sqrt(counts / np.maximum(counts - 1, 1))[self.groups]
        return float((np.abs(self.seconds / mean[self.groups] - 1) * unbiased)[repeated].mean())


def tables_in(folder: Path) -> tuple[list[Table], list[str]]:
    """All tables in a folder, by file name, and for each other file why it was skipped.

    Raises :class:`TableError` for an impossible time in a file of a known layout, or for no table at all.
    """
    if not folder.is_dir():
        raise TableError(f"{folder}: is not a folder")
    tables: list[Table] = []
    skipped = []
    for file in sorted(folder.iterdir()):
        if not file.name.endswith(ENDINGS):
            continue
        layout, rows = _recognise(file)
        if layout is None:
            skipped.append(f"{file.name}: not in a known layout; its columns are {', '.join(rows.names)}")
        else:
            tables += _tables(file, layout, rows)
    if not tables:
        raise TableError(f"{folder}: holds no table in a known layout ({', '.join(known.name for known in LAYOUTS)})")
    return tables, skipped


def read_table(file: Path) -> list[Table]:
    """The tables in one file. Raises :class:`TableError`, also for an unknown layout."""
    layout, rows = rows_of(file)
    return list(_tables(file, layout, rows))


def rows_of(file: Path) -> tuple[Layout, Rows]:
    """A file's layout and its columns. Raises :class:`TableError`, also for an unknown layout."""
    layout, rows = _recognise(file)
    if layout is None:
        raise TableError(f"{file}: not in a known layout; its columns are {', '.join(rows.names)}")
    return layout, rows


def columns_of(file: Path) -> Rows:
    """A file's columns, in whatever layout. Raises :class:`TableError` where it cannot be read."""
    try:
        return Rows(str(file), _read(file))
    except (pa.ArrowException, OSError, UnreadableTable, UnicodeDecodeError) as error:
        raise TableError(f"{file}: cannot be read: {error}") from error


def _recognise(file: Path) -> tuple[Layout | None, Rows]:
    rows = columns_of(file)
    return next((layout for layout in LAYOUTS if layout.needs <= set(rows.names)), None), rows


MAX_CSV_BYTES = 1 << 30


def _read(file: Path) -> pa.Table:
    if file.name.endswith(".parquet"):
        return opened(file).read()
    if file.stat().st_size > MAX_CSV_BYTES:
        raise TableError(f"{file}: is larger than {MAX_CSV_BYTES:,} bytes, which is the most that is read")
    # An empty cell is a time that was not measured; "nan" is a failed measurement.
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
    """At most about ``max_rows`` rows: the longest tenth of all points as far as it fits, and points drawn at random
    under ``seed``, each with all its rows."""
    if len(table) <= max_rows:
        return table
    points = int(table.groups.max()) + 1
    length = np.zeros(points)
    np.maximum.at(length, table.groups, table.times.length)
    drawn_points = int(points * max_rows / len(table))
    longest = np.argsort(-length, kind="stable")[: min(drawn_points, ceil(points / 10))]
    rest = np.random.default_rng(seed).permutation(np.setdiff1d(np.arange(points), longest))
    drawn = np.concatenate([longest, rest[: drawn_points - len(longest)]])
    chosen = np.isin(table.groups, drawn)
    times = table.times.of(chosen)
    return Table(
        table.file, table.operator, table.layout, times, table.seconds[chosen],
        np.unique(table.groups[chosen], return_inverse=True)[1], table.rows_in_file,
        (*table.left_out, f"{drawn_points} of {points} measured points drawn"),
    )  # fmt: skip


def quantile_bins(values: Floats, max_bins: int) -> Ints:
    """Number of the quantile bin of each value; ties share a bin."""
    edges = np.unique(np.quantile(values, np.linspace(0, 1, max_bins + 1)[1:-1]))
    return np.searchsorted(edges, values, side="right")


@dataclass(frozen=True, slots=True)
class TableFile:
    """A file of measured tables, read."""

    file: Path
    layout: str
    rows: Rows
    tables: Mapping[str, Table]
    """Tables by operator."""
    sha256: str

    def described(self, content: str) -> dict[str, Any]:
        """Entry of the hardware model's list of inputs. ``content``: what was taken from the file."""
        return {
            "file": self.file.name, "sha256": self.sha256, "layout": self.layout, "rows": len(self.rows),
            "told": content,
        }  # fmt: skip

    @property
    def device(self) -> str | None:
        """The device named in the file; None where there is none."""
        if "device" not in self.rows.names:
            return None
        return ", ".join(sorted(set(self.rows.text("device").tolist())))


def read_files(files: Sequence[Path]) -> list[TableFile]:
    """Read these files. Raises :class:`TableError` for an unknown layout, an impossible time, or an operator in two
    files of one layout."""
    table_files: list[TableFile] = []
    for file in files:
        layout, rows = rows_of(file)
        tables = {table.operator: table for table in read_table(file) if table.operator != WHOLE}
        table_files.append(TableFile(file, layout.name, rows, tables, sha256_of(file)))
    for number, later in enumerate(table_files):
        for earlier in table_files[:number]:
            if earlier.layout == later.layout and set(earlier.tables) & set(later.tables):
                raise TableError(
                    f"{later.file} and {earlier.file} hold the same operators ({later.layout}): give one of them"
                )
    return table_files


def with_operator(files: Iterable[TableFile], layout: str, operator: str | None = None) -> TableFile | None:
    """The file in this layout that has the operator; None where there is none."""
    return next(
        (table_file for table_file in files if table_file.layout == layout and operator in (None, *table_file.tables)),
        None,
    )


def medians(settings: Floats, seconds: Floats) -> tuple[Floats, Floats]:
    """Sorted measured points, shape (points, columns), and the median time of each."""
    if not len(seconds):
        return settings, seconds
    points, number = np.unique(settings, axis=0, return_inverse=True)
    order = np.argsort(number.ravel(), kind="stable")
    starts = np.searchsorted(number.ravel()[order], np.arange(len(points)))
    times = [np.median(part) for part in np.split(seconds[order], starts[1:])]
    return points, np.array(times, np.float64)
