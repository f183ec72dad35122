"""The resolution at which a server that records for weeks stores numbers: what is below it is noise, and takes most of
the room.

Times and durations are stored in steps of 2**-22 s, a quarter of a microsecond: clocks are read between other
instructions. What was predicted or is expected (prices, blocks that survive) is stored with the 24 bits of a single
precision number. Probabilities, counts and ids are stored as they are.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

CLOCK_STEPS_PER_S = float(1 << 22)
EXPECTED = ("hit_blocks", "save_blocks", "absence_tokens", "hit_tokens")
"""Columns beside the prices that hold expected amounts."""
PRICES = "costs"


def coarse(table: pa.Table) -> pa.Table:
    """The table with its numbers at this resolution."""
    for index, name in enumerate(table.column_names):
        column = table.column(index)
        if name == PRICES:
            column = pa.chunked_array([_prices(chunk) for chunk in column.chunks], column.type)
        elif pa.types.is_float64(column.type) and (name.endswith("_s") or name in EXPECTED):
            column = pa.chunked_array([_rounded(chunk, name in EXPECTED) for chunk in column.chunks], column.type)
        else:
            continue
        table = table.set_column(index, table.schema.field(index), column)
    return table


def _rounded(values: pa.Array, single: bool) -> pa.Array:
    numbers = np.asarray(values.fill_null(0.0), np.float64)
    if single:
        with np.errstate(over="ignore", under="ignore"):
            coarser = numbers.astype(np.float32).astype(np.float64)
        numbers = np.where(np.isfinite(coarser), coarser, numbers)
    else:
        numbers = np.round(numbers * CLOCK_STEPS_PER_S) / CLOCK_STEPS_PER_S
    return pa.array(numbers, pa.float64(), mask=np.asarray(values.is_null()))


def _prices(lists: pa.ListArray) -> pa.Array:
    records = lists.flatten()
    fields = [
        _rounded(records.field(i), single=True) if pa.types.is_float64(field.type) else records.field(i)
        for i, field in enumerate(records.type)
    ]
    ends = np.concatenate([[0], np.cumsum(np.asarray(lists.value_lengths()))]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(ends), pa.StructArray.from_arrays(fields, fields=list(records.type)))
