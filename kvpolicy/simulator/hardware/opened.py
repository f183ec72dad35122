"""Files of measured times as they were given, found again by their layout."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpolicy.simulator.hardware.layouts import WHOLE, Rows
from kvpolicy.simulator.hardware.operator_tables import Table, TableError, read_table, rows_of

Floats = NDArray[np.float64]


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
