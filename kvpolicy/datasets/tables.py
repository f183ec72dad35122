"""Situations, windows and transfers of traces as columns. Records are created on access.

A million rows as Python records take gigabytes and minutes, and most rows are only counted, checked or sampled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from typing import Any, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from kvpolicy.arrays import Floats, Ints
from kvpolicy.events import KINDS, SITUATION_FIELDS, Kind, Option, Preemption
from kvpolicy.features import COLUMNS, feature_columns

Objects = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Sample:
    """One valid window: its situation, the executed option, and the cost."""

    situation: Preemption
    kind: Kind
    engine_s: float
    """Measured; noise can bring a small cost below 0."""
    core: str
    repeat: int
    preemption_id: str
    victim_delay_s: float | None = None
    others_delay_s: float | None = None
    hit_tokens: int = 0
    """Tokens that were found on the device at resume."""

    @property
    def option(self) -> Option:
        if self.kind == "recompute":
            return Option("recompute")
        return Option("swap", self.situation.computed_tokens, "host")


@dataclass(frozen=True, slots=True)
class TransferRecord:
    """One rank's part of a finished transfer."""

    core: str
    preemption_id: str
    direction: str
    size_bytes: int
    segments: int
    duration_s: float


def key(core: str, preemption_id: str) -> str:
    """A text that identifies a preemption over all cores. Its separator cannot occur in a core's folder name."""
    return f"{core}\0{preemption_id}"


def keys(core: pa.ChunkedArray, preemption_id: pa.ChunkedArray) -> pa.Array:
    """:func:`key` of each row."""
    joined = pc.binary_join_element_wise(core, preemption_id, "\0")
    return joined.combine_chunks() if isinstance(joined, pa.ChunkedArray) else joined


def reals(table: pa.Table, column: str) -> Floats:
    """A column as floats, with NaN for empty values."""
    return np.asarray(table[column].to_numpy(), np.float64)


def wholes(table: pa.Table, column: str) -> Ints:
    return np.asarray(table[column].to_numpy(), np.int64)


def coded(table: pa.Table, column: str) -> tuple[Ints, list[str]]:
    """Each row's code, and the texts by code, in alphabetical order."""
    codes = pc.dictionary_encode(table[column].combine_chunks())
    codes = codes.combine_chunks() if isinstance(codes, pa.ChunkedArray) else codes
    values = codes.dictionary.to_pylist()
    order = sorted(range(len(values)), key=values.__getitem__)
    rank = np.empty(len(values), np.int64)
    rank[order] = np.arange(len(values))
    return rank[np.asarray(codes.indices, np.int64)], [values[index] for index in order]


def texts(table: pa.Table, column: str) -> Objects:
    """A column of texts; equal texts share one object."""
    codes = pc.dictionary_encode(table[column].combine_chunks())
    codes = codes.combine_chunks() if isinstance(codes, pa.ChunkedArray) else codes
    return np.array(codes.dictionary.to_pylist(), object)[np.asarray(codes.indices, np.int64)]


class Situations(Sequence[Preemption]):
    """Situations from rows of the ``decisions`` table."""

    def __init__(self, table: pa.Table) -> None:
        self._columns = {
            name: texts(table, name) if pa.types.is_string(table.schema.field(name).type)
            # What is empty stays None.
            else np.array(table[name].to_pylist(), object) if table[name].null_count
            # Integers stay integers.
            else np.asarray(table[name].to_numpy())
            for name in SITUATION_FIELDS
        }  # fmt: skip
        self._length = int(table.num_rows)

    @classmethod
    def of(cls, situations: Sequence[Preemption]) -> Situations:
        if isinstance(situations, Situations):
            return situations
        return cls(
            pa.table({name: [getattr(situation, name) for situation in situations] for name in SITUATION_FIELDS})
        )

    def column(self, name: str) -> NDArray[Any]:
        return self._columns[name]

    def __len__(self) -> int:
        return self._length

    def between(self, start: int, stop: int) -> list[Preemption]:
        """Situations of rows ``start`` to ``stop``, which must exist."""
        return [Preemption(*row) for row in zip(*(c[start:stop].tolist() for c in self._columns.values()), strict=True)]

    @overload
    def __getitem__(self, index: int) -> Preemption: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Preemption]: ...

    def __getitem__(self, index: int | slice) -> Preemption | Sequence[Preemption]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        start = range(self._length)[index]
        return self.between(start, start + 1)[0]

    def features(self, kind: Kind) -> dict[str, Floats]:
        """See :func:`kvpolicy.features.feature_columns`."""
        return feature_columns({name: self._columns[name].astype(np.float64) for name in COLUMNS}, kind)


class TransferTable(Sequence[TransferRecord]):
    """Finished transfers."""

    def __init__(self, table: pa.Table) -> None:
        """``table``: one column per field of :class:`TransferRecord`."""
        self._table = table
        self._keys = keys(table["core"], table["preemption_id"])

    @classmethod
    def of(cls, transfers: Sequence[TransferRecord]) -> TransferTable:
        if isinstance(transfers, TransferTable):
            return transfers
        columns = {}
        for name, kind in _TRANSFER_TYPES.items():
            columns[name] = pa.array([getattr(transfer, name) for transfer in transfers], kind)
        return cls(pa.table(columns))

    def __len__(self) -> int:
        return int(self._table.num_rows)

    @overload
    def __getitem__(self, index: int) -> TransferRecord: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[TransferRecord]: ...

    def __getitem__(self, index: int | slice) -> TransferRecord | Sequence[TransferRecord]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return next(iter(_move_records(self._table.slice(range(len(self))[index], 1))))

    def __iter__(self) -> Iterator[TransferRecord]:
        return iter(_move_records(self._table))

    def of_preemptions(self, wanted: Iterable[str]) -> TransferTable:
        """The transfers of preemptions with these keys, in this order."""
        return TransferTable(self._table.filter(pc.is_in(self._keys, value_set=pa.array(wanted, pa.string()))))

    def columns(self, direction: str) -> tuple[Floats, Floats, Floats]:
        """Bytes, segments and seconds of one direction."""
        transfers = self._table.filter(pc.equal(self._table["direction"], direction))
        return reals(transfers, "size_bytes"), reals(transfers, "segments"), reals(transfers, "duration_s")


_TRANSFER_TYPES = {
    "core": pa.string(), "preemption_id": pa.string(), "direction": pa.string(), "size_bytes": pa.int64(),
    "segments": pa.int64(), "duration_s": pa.float64(),
}  # fmt: skip


def _move_records(table: pa.Table) -> list[TransferRecord]:
    return [TransferRecord(*row) for row in zip(*(table[name].to_pylist() for name in _TRANSFER_TYPES), strict=True)]


class Windows:
    """Valid windows, grouped by state and ordered by option, repeat and core, which is the order of time."""

    def __init__(self, table: pa.Table) -> None:
        """``table``: rows of ``decisions`` with what was measured of each."""
        self._situations = Situations(table)
        self._core, self._id = texts(table, "core"), texts(table, "preemption_id")
        self._repeat = wholes(table, "repeat")
        self._engine_s = reals(table, "engine_s")
        self._hit_tokens = wholes(table, "local_hit_tokens")
        self._delays_s = reals(table, "victim_delay_s"), reals(table, "others_delay_s")

    def samples(self, kind: Kind, start: int, stop: int) -> tuple[Sample, ...]:
        rows = zip(
            self._situations.between(start, stop), [kind] * (stop - start), self.costs_s(start, stop),
            self._core[start:stop].tolist(), self._repeat[start:stop].tolist(), self._id[start:stop].tolist(),
            *([None if isnan(value) else value for value in delay[start:stop].tolist()] for delay in self._delays_s),
            self._hit_tokens[start:stop].tolist(),
            strict=True,
        )  # fmt: skip
        return tuple(Sample(*row) for row in rows)

    def costs_s(self, start: int, stop: int) -> list[float]:
        costs: list[float] = self._engine_s[start:stop].tolist()
        return costs

    def computed_tokens(self, start: int, stop: int) -> list[int]:
        tokens: list[int] = self._situations.column("computed_tokens")[start:stop].tolist()
        return tokens

    def cores(self, start: int, stop: int) -> frozenset[str]:
        return frozenset(self._core[start:stop].tolist())


class Arms(Mapping[Kind, tuple[Sample, ...]]):
    """One state's samples by option. Rows from the first to the second bound are recomputes, to the third swaps."""

    __slots__ = ("_bounds", "_samples", "_windows")

    def __init__(self, windows: Windows, bounds: tuple[int, int, int]) -> None:
        self._windows, self._bounds = windows, bounds
        self._samples: dict[Kind, tuple[Sample, ...]] = {}

    def __getitem__(self, kind: Kind) -> tuple[Sample, ...]:
        if kind not in self._samples:
            self._samples[kind] = self._windows.samples(kind, *self._span(kind))
        return self._samples[kind]

    def __iter__(self) -> Iterator[Kind]:
        return iter(KINDS)

    def __len__(self) -> int:
        return len(KINDS)

    def costs_s(self, kind: Kind) -> list[float]:
        return self._windows.costs_s(*self._span(kind))

    def computed_tokens(self) -> list[int]:
        return self._windows.computed_tokens(self._bounds[0], self._bounds[2])

    def cores(self) -> frozenset[str]:
        return self._windows.cores(self._bounds[0], self._bounds[2])

    def _span(self, kind: Kind) -> tuple[int, int]:
        index = KINDS.index(kind)
        return self._bounds[index], self._bounds[index + 1]
