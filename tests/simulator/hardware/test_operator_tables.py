"""Tables of operator times: recognised by their columns, read into features, refused by file and row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from kvpolicy.simulator.hardware.layouts import TILE, WHOLE
from kvpolicy.simulator.hardware.operator_tables import TableError, read_table, subsampled, tables_in

ATTENTION: dict[str, Any] = {
    "op_name": "context_attention", "kernel_source": "flash", "device": "NVIDIA H100 80GB HBM3", "batch_size": 2,
    "isl": 300, "num_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "attn_dtype": "bfloat16",
    "kv_cache_dtype": "bfloat16", "step": 0, "latency": 0.5,
}  # fmt: skip
GEMM: dict[str, Any] = {
    "device": "NVIDIA H100 80GB HBM3", "gemm_dtype": "bfloat16", "m": 129, "n": 256, "k": 64, "latency": 0.25,
}  # fmt: skip


def write(file: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    table = pa.Table.from_pylist([dict(row) for row in rows])
    if file.name.endswith(".parquet"):
        pyarrow.parquet.write_table(table, file)
    else:
        pyarrow.csv.write_csv(table, file)
    return file


def test_a_layout_is_known_by_its_columns_whatever_the_file_is_called(tmp_path: Path) -> None:
    for name in ("b300_tomorrow.parquet", "mine.csv"):
        (table,) = read_table(write(tmp_path / name, [GEMM, GEMM | {"latency": 0.5}, GEMM | {"m": 4}]))
        assert (table.operator, table.layout) == ("matrix product", "aiconfigurator gemm")
        assert table.seconds.tolist() == [0.00025, 0.0005, 0.00025]
        assert table.groups[0] == table.groups[1] != table.groups[2]


def test_work_is_rounded_up_to_tiles_and_waves(tmp_path: Path) -> None:
    (table,) = read_table(write(tmp_path / "a.parquet", [GEMM]))
    x = table.times.features
    assert x["flops"][0] == 2 * 129 * 256 * 64
    assert x["bytes"][0] == 2 * (129 * 64 + 64 * 256 + 129 * 256)
    assert (x["tiles"][0], x["waves"][0]) == (4, 1)
    assert x["tile_flops"][0] == 2 * 4 * TILE * TILE * 64
    (unknown,) = read_table(write(tmp_path / "b.parquet", [GEMM | {"device": "Some Future Device"}]))
    assert "waves" not in unknown.columns


def test_causal_and_windowed_attention_count_their_pairs(tmp_path: Path) -> None:
    rows = [ATTENTION | {"window_size": 0}, ATTENTION | {"window_size": 100}, ATTENTION | {"window_size": 5000}]
    (table,) = read_table(write(tmp_path / "a.parquet", rows))
    full = sum(range(1, 301))
    windowed = sum(min(query, 100) for query in range(1, 301))
    assert table.times.features["flops"].tolist() == [4 * 2 * 8 * 64 * pairs for pairs in (full, windowed, full)]


def test_decode_attention_reads_the_context_it_has(tmp_path: Path) -> None:
    one = ATTENTION | {"op_name": "generation_attention", "isl": 1, "step": 4095}
    (table,) = read_table(write(tmp_path / "a.parquet", [one]))
    assert table.operator == "decode attention"
    assert table.times.length.tolist() == [4096]
    assert table.times.features["bytes"].tolist() == [2 * 2 * 2 * 64 * 4096 * 2]


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
def test_times_that_cannot_be_are_refused_by_file_and_row(
    tmp_path: Path, ending: str, value: float, message: str
) -> None:
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


def test_noise_is_told_from_repeats_alone(tmp_path: Path) -> None:
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
