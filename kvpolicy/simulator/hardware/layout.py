"""Parts of a layout of published operator timings: a file's columns, its operators, and what their times depend on.

The layouts themselves are in :mod:`kvpolicy.simulator.hardware.layouts`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from kvpolicy.arrays import Flags, Floats
from kvpolicy.errors import InputError
from kvpolicy.regression.ceilings import Ceilings


class Rows:
    """A file's columns."""

    def __init__(self, file: str, table: pa.Table) -> None:
        self.file = file
        self.names: tuple[str, ...] = tuple(table.column_names)
        self._table = table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def number(self, name: str) -> Floats:
        """A column as numbers, NaN where a cell is empty. Raises InputError, naming file and column, for text."""
        column = self._table[name]
        if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
            raise InputError(f"{self.file}: column {name} is {column.type}, should hold numbers")
        return np.asarray(pc.fill_null(column.cast(pa.float64()), float("nan")).to_numpy(), np.float64)

    def text(self, name: str) -> NDArray[np.str_]:
        """A column as texts. Raises InputError, naming file and column, for what is no text."""
        try:
            texts = self._table[name].cast(pa.string())
        except pa.ArrowException as error:
            raise InputError(f"{self.file}: column {name}: {error}") from error
        return np.array(texts.fill_null("").to_pylist(), dtype=np.str_)

    def absent(self, name: str) -> Flags:
        return np.asarray(pc.is_null(self._table[name]).to_numpy(), np.bool_)

    def codes(self, name: str) -> Floats:
        """A text column as numbers, in alphabetical order."""
        return np.unique(self.text(name), return_inverse=True)[1].astype(np.float64)


@dataclass(frozen=True, slots=True)
class Times:
    """Quantities that one operator's times depend on."""

    settings: Mapping[str, Floats]
    """Settings as in the file."""
    features: Mapping[str, Floats]
    """Settings and quantities derived from them: FLOPs, bytes, tiles."""
    length: Floats
    """Tokens along the axis of extrapolation."""
    load: Floats
    """Other load in the batch."""
    length_name: str
    physics: Ceilings

    def of(self, rows: Flags) -> Times:
        def select(columns: Mapping[str, Floats]) -> dict[str, Floats]:
            return {name: values[rows] for name, values in columns.items()}

        return Times(
            select(self.settings),
            select(self.features),
            self.length[rows],
            self.load[rows],
            self.length_name,
            self.physics,
        )


@dataclass(frozen=True, slots=True)
class Part:
    """One operator of a file: its rows, and the column that holds its time."""

    operator: str
    time: str
    rows: Flags
    times: Times
    """For all rows of the file."""
    left_out: tuple[str, ...] = ()
    seconds: Floats | None = None
    """Times in the file's unit, where they differ from the column."""


@dataclass(frozen=True, slots=True)
class Layout:
    """``needs``: columns by which a file is recognised. ``counts``: those that hold numbers, 0 or above."""

    name: str
    needs: frozenset[str]
    counts: frozenset[str]
    seconds_per_unit: float
    parts: Callable[[Rows], Iterator[Part]]
    times_may_be_absent: bool = False
