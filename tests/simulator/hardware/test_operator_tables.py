"""Tables of operator times: recognised by their columns, read into features, refused by file and row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvpolicy.simulator.hardware.layouts import WHOLE
from kvpolicy.simulator.hardware.operator_tables import TableError, read_table, subsampled, tables_in
from tests.simulator.hardware.table_files import GEMM, write


def test_quantised_kernels_are_left_out_and_said_so(tmp_path: Path) -> None:
    (table,) = read_table(write(tmp_path / "a.parquet", [GEMM, GEMM | {"gemm_dtype": "fp8"}]))
    assert len(table) == 1
    assert table.left_out == ("1 of 2 rows are bfloat16, the others left out",)


def test_every_operator_is_a_table_and_so_are_all_together(tmp_path: Path) -> None:
    rows = [{"layer": layer, "tokens": n, "time_us": n + 10.0} for layer in ("qkv_proj", "act_fn") for n in (1, 2, 4)]
    tables = {table.operator: table for table in read_table(write(tmp_path / "a.csv", rows))}
    assert set(tables) == {"qkv_proj", "act_fn", WHOLE}
    assert tables[WHOLE].seconds == pytest.approx([22e-6, 24e-6, 28e-6])


@pytest.mark.parametrize(
    ("value", "message"), [(0.0, "latency is 0.0"), (-2.0, "latency is -2.0"), (float("nan"), "latency is nan")]
)
@pytest.mark.parametrize("ending", ["parquet", "csv"])
def test_impossible_times_are_refused_by_file_and_row(tmp_path: Path, ending: str, value: float, message: str) -> None:
    file = write(tmp_path / f"a.{ending}", [GEMM, GEMM | {"latency": value}])
    with pytest.raises(TableError, match=rf"a\.{ending}, row 1: {message}, should be a time above 0"):
        read_table(file)


def test_a_bad_time_in_a_row_that_is_left_out_is_refused_too(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="row 1"):
        read_table(write(tmp_path / "a.parquet", [GEMM, GEMM | {"gemm_dtype": "fp8", "latency": -1.0}]))


def test_a_missing_time_is_refused_where_all_should_be_there(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="row 1: latency is missing"):
        read_table(write(tmp_path / "a.parquet", [GEMM, GEMM | {"latency": None}]))


def test_a_count_below_zero_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TableError, match=r"row 1: m is -3\.0, should be 0 or above"):
        read_table(write(tmp_path / "a.parquet", [GEMM, GEMM | {"m": -3}]))


def test_an_unknown_layout_is_passed_over_and_said_so(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", [GEMM])
    write(tmp_path / "b.csv", [{"median_ms": 1.0, "size_bytes": 3}])
    (tmp_path / "notes.md").write_text("not a table")
    tables, passed_over = tables_in(tmp_path)
    assert [table.file for table in tables] == ["a.parquet"]
    assert passed_over == ["b.csv: not in a known layout; its columns are median_ms, size_bytes"]
    with pytest.raises(TableError, match="known layout; its columns are median_ms"):
        read_table(tmp_path / "b.csv")


def test_a_folder_without_tables_and_a_broken_file_are_errors(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="no table in a known layout"):
        tables_in(tmp_path)
    with pytest.raises(TableError, match="is not a folder"):
        tables_in(tmp_path / "none")
    (tmp_path / "a.parquet").write_text("not parquet")
    with pytest.raises(TableError, match=r"a\.parquet: cannot be read"):
        tables_in(tmp_path)


def test_noise_is_estimated_from_repeats_alone(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    points = np.repeat(np.arange(1, 401), 3)
    times = points * np.exp(rng.normal(0, 0.05, len(points)))
    rows = [GEMM | {"m": int(m), "latency": float(t)} for m, t in zip(points, times, strict=True)]
    (table,) = read_table(write(tmp_path / "a.parquet", rows))
    assert table.noise() == pytest.approx(0.05 * np.sqrt(2 / np.pi), rel=0.1)
    (single,) = read_table(write(tmp_path / "b.parquet", rows[::3]))
    assert single.noise() is None


def test_drawing_keeps_whole_points_and_is_the_same_every_time(tmp_path: Path) -> None:
    rows = [GEMM | {"m": m} for m in range(1, 101) for _ in range(2)]
    (table,) = read_table(write(tmp_path / "a.parquet", rows))
    one, other = subsampled(table, 60, 0), subsampled(table, 60, 0)
    assert one.plain.tolist() == other.plain.tolist()
    assert np.bincount(one.groups).tolist() == [2] * 30
    assert one.left_out == ("30 of 100 measured points drawn",)
    assert subsampled(table, 200, 0) is table
    for seed in range(5):
        assert set(range(91, 101)) <= set(subsampled(table, 60, seed).times.length.tolist())
    assert set(subsampled(table, 8, 0).times.length.tolist()) == {97, 98, 99, 100}
