"""Rows of Arrow tables as JSON text, made column by column: the same text as of row after row, many times as fast."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import isfinite

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

BATCH_ROWS = 16_384
"""Rows whose text is in memory at a time."""

_ENCODE = json.JSONEncoder(sort_keys=True).encode
_ESCAPED = r"[^ !#-\[\]-~]"
"""What JSON does not write as it is: quotes, backslashes, controls, and all that is no ASCII."""


def row_texts(table: pa.Table) -> Iterator[memoryview]:
    """The text of all rows, one right after the other, in pieces: each a JSON object with its keys sorted.

    Exactly what ``json.JSONEncoder(sort_keys=True).encode`` makes of each row of ``to_pylist()``.
    """
    for batch in table.to_batches(max_chunksize=BATCH_ROWS):
        columns = {name: batch.column(i) for i, name in enumerate(batch.schema.names)}
        text = _objects(columns, batch.num_rows)
        offsets = np.frombuffer(text.buffers()[1], np.int32)[text.offset : text.offset + len(text) + 1]
        if len(text):
            yield memoryview(text.buffers()[2])[offsets[0] : offsets[-1]]


def _objects(columns: dict[str, pa.Array], rows: int) -> pa.Array:
    parts: list[pa.Array | str] = []
    for i, name in enumerate(sorted(columns)):
        parts += [f"{', ' if i else '{'}{_ENCODE(name)}: ", _texts(columns[name])]
    if not parts:
        return pa.array(["{}"] * rows, pa.string())
    return _joined([*parts, "}"])


def _texts(values: pa.Array) -> pa.Array:
    """The JSON text of each value."""
    kind = values.type
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind):
        texts = pc.cast(values, pa.string())
    elif pa.types.is_float64(kind):
        texts = _reals(values)
    elif pa.types.is_string(kind) and not pc.any(pc.match_substring_regex(values, _ESCAPED)).as_py():
        texts = _joined(['"', values, '"'])
    elif pa.types.is_list(kind):
        texts = _lists(values)
    elif pa.types.is_struct(kind) and not values.null_count:
        fields = [field.name for field in kind]
        texts = _objects(dict(zip(fields, values.flatten(), strict=True)), len(values))
    else:
        return pa.array(list(map(_ENCODE, values.to_pylist())), pa.string())
    return pc.fill_null(texts, "null") if texts.null_count else texts


def _joined(parts: list[pa.Array | str]) -> pa.Array:
    return pc.binary_join_element_wise(*(pa.scalar(p) if isinstance(p, str) else p for p in parts), "")


def _reals(values: pa.Array) -> pa.Array:
    """Python's own digits, each different value's once; by its bits, for 0 equals -0 and nothing equals NaN."""
    bits = np.asarray(pc.fill_null(values, 0.0), np.float64).view(np.int64)
    coded = pc.dictionary_encode(pa.array(bits))
    different = np.asarray(coded.dictionary, np.int64).view(np.float64).tolist()
    digits = pa.array([repr(one) if isfinite(one) else _ENCODE(one) for one in different], pa.string())
    texts = digits.take(coded.indices)
    return pc.if_else(pc.is_null(values), pa.scalar(None, pa.string()), texts) if values.null_count else texts


def _lists(values: pa.Array) -> pa.Array:
    counts = np.asarray(pc.fill_null(pc.list_value_length(values), 0), np.int64)
    ends = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    inner = pc.binary_join(pa.ListArray.from_arrays(pa.array(ends), _texts(values.flatten())), ", ")
    texts = _joined(["[", inner, "]"])
    return pc.if_else(pc.is_null(values), pa.scalar(None, pa.string()), texts) if values.null_count else texts
