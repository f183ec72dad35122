"""Text of rows made by columns: the same, to the last character, as of row after row."""

from __future__ import annotations

import json
import math

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.trace.digest import BATCH_ROWS, row_texts
from tests.examples import examples
from tests.synthetic import make_trace
from tests.synthetic_steps import with_steps


def by_rows(table: pa.Table) -> str:
    return "".join(map(json.JSONEncoder(sort_keys=True).encode, table.to_pylist()))


def by_columns(table: pa.Table) -> str:
    return b"".join(map(bytes, row_texts(table))).decode()


SOME = {
    "real": st.none() | st.floats(),
    "whole": st.none() | st.integers(-(2**63), 2**63 - 1),
    "flag": st.none() | st.booleans(),
    "text": st.none() | st.text(),
    'na"me': st.text("abc/-_ 012"),
}
INNER = {"z": st.none() | st.floats(), "a": st.none() | st.text("xy é")}
TYPES = {"real": pa.float64(), "whole": pa.int64(), "flag": pa.bool_(), "text": pa.string(), 'na"me': pa.string()}
STRUCT = pa.struct([("z", pa.float64()), ("a", pa.string())])
SCHEMA = pa.schema([*TYPES.items(), ("records", pa.list_(STRUCT)), ("one", STRUCT), ("reals", pa.list_(pa.float64()))])
ROWS = st.lists(
    st.fixed_dictionaries(
        SOME
        | {
            "records": st.none() | st.lists(st.none() | st.fixed_dictionaries(INNER), max_size=3),
            "one": st.none() | st.fixed_dictionaries(INNER),
            "reals": st.none() | st.lists(st.none() | st.floats(), max_size=3),
        }
    ),
    max_size=6,
)


@examples(60)
@given(ROWS, st.integers(0, 3))
def test_any_rows_give_the_text_of_their_json(rows: list[dict[str, object]], skipped: int) -> None:
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    assert by_columns(table) == by_rows(table)
    assert by_columns(table.slice(skipped)) == by_rows(table.slice(skipped))


@pytest.mark.parametrize("value", [0.0, -0.0, 1e16, 1e-5, 1e22, 0.1, 123456789012.0, math.inf, -math.inf, math.nan])
def test_numbers_are_written_as_python_writes_them(value: float) -> None:
    table = pa.table({"x": pa.array([value, 0.0, None, -0.0], pa.float64())})
    assert by_columns(table) == by_rows(table)


def test_types_that_are_not_known_by_columns_are_written_by_rows() -> None:
    table = pa.table({"x": pa.array([1.5, None], pa.float32()), "y": pa.array(["a", "b"]).dictionary_encode()})
    assert by_columns(table) == by_rows(table)


def test_all_tables_of_a_trace_and_rows_beyond_one_batch() -> None:
    trace = with_steps(make_trace(states=20))
    for name, table in trace.tables.items():
        assert by_columns(table) == by_rows(table), name
    long = pa.table({"x": range(BATCH_ROWS + 3)})
    assert by_columns(long) == by_rows(long)
    assert by_columns(long.slice(0, 0)) == ""
