"""Rows of Arrow tables as JSON text, built column by column. The text is the same as row by row, but much faster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import isfinite
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

BATCH_ROWS = 16_384
"""Rows whose text is in memory at once."""

_ENCODE = json.JSONEncoder(sort_keys=True).encode
_ESCAPED = r"[^ !#-\[\]-~]"
"""Characters that JSON escapes: quotes, backslashes, control characters and everything outside ASCII."""


Part: TypeAlias = Any
"""An array with one text per row, or a str that is the same in all rows."""


def row_texts(table: pa.Table) -> Iterator[memoryview]:
    """The concatenated text of all rows, in chunks. Each row is a JSON object with sorted keys.

    The text equals ``json.JSONEncoder(sort_keys=True).encode`` of each row of ``to_pylist()``.
    """
    for batch in table.to_batches(max_chunksize=BATCH_ROWS):
        if not batch.num_rows:
            continue
        text = _joined(_object({name: batch.column(i) for i, name in enumerate(batch.schema.names)}), batch.num_rows)
        offsets = np.frombuffer(text.buffers()[1], np.int32)[text.offset : text.offset + len(text) + 1]
        yield memoryview(text.buffers()[2])[offsets[0] : offsets[-1]]


def _object(columns: dict[str, pa.Array]) -> list[Part]:
    parts: list[Part] = ["{"]
    for i, name in enumerate(sorted(columns)):
        parts += [f"{', ' if i else ''}{_ENCODE(name)}: ", *_parts(columns[name])]
    return [*parts, "}"]


def _parts(values: pa.Array) -> list[Part]:
    """The parts of each value's JSON text."""
    kind = values.type
    if not len(values) or values.null_count == len(values):
        return ["null"]
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind):
        span = pc.min_max(values)
        if not values.null_count and span["min"] == span["max"]:
            return [_ENCODE(span["min"].as_py())]
        return [_or_null(pc.cast(values, pa.string()))]
    if pa.types.is_float64(kind):
        return _reals(values)
    if pa.types.is_string(kind) and not pc.any(pc.match_substring_regex(values, _ESCAPED)).as_py():
        return ['"', values, '"'] if not values.null_count else [_or_null(_joined(['"', values, '"'], len(values)))]
    if pa.types.is_list(kind):
        return _lists(values)
    if pa.types.is_struct(kind) and not values.null_count:
        return _object(dict(zip([field.name for field in kind], values.flatten(), strict=True)))
    return [pa.array(list(map(_ENCODE, values.to_pylist())), pa.string())]


def _or_null(texts: pa.Array) -> pa.Array:
    return pc.fill_null(texts, "null") if texts.null_count else texts


def _joined(parts: list[Part], rows: int) -> pa.Array:
    """One text per row. Adjacent parts that are the same in all rows are merged first."""
    merged: list[Part] = []
    for part in parts:
        if isinstance(part, str) and merged and isinstance(merged[-1], str):
            merged[-1] += part
        else:
            merged.append(part)
    if len(merged) == 1 and isinstance(merged[0], str):
        return pa.array([merged[0]] * rows, pa.string())
    scalars = [pa.scalar(part) if isinstance(part, str) else part for part in merged]
    return pc.binary_join_element_wise(*scalars, "")


def _reals(values: pa.Array) -> list[Part]:
    """Python's digits, computed once per distinct value. Values are compared by their bits, because 0 equals -0 and NaN
    equals nothing."""
    bits = np.asarray(pc.fill_null(values, 0.0), np.float64).view(np.int64)
    coded = pc.dictionary_encode(pa.array(bits))
    distinct = np.asarray(coded.dictionary, np.int64).view(np.float64).tolist()
    digits = [repr(value) if isfinite(value) else _ENCODE(value) for value in distinct]
    if len(digits) == 1 and not values.null_count:
        return [digits[0]]
    texts = pa.array(digits, pa.string()).take(coded.indices)
    return [pc.if_else(pc.is_null(values), "null", texts) if values.null_count else texts]


def _lists(values: pa.Array) -> list[Part]:
    counts = np.asarray(pc.fill_null(pc.list_value_length(values), 0), np.int64)
    if not counts.any() and not values.null_count:
        return ["[]"]
    ends = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    flat = values.flatten()
    joined = pc.binary_join(pa.ListArray.from_arrays(pa.array(ends), _joined(_parts(flat), len(flat))), ", ")
    if not values.null_count:
        return ["[", joined, "]"]
    return [pc.if_else(pc.is_null(values), "null", _joined(["[", joined, "]"], len(joined)))]
