"""Layouts of published tables: which columns tell one, and what its rows hold.

Tests of `kvpolicy/simulator/hardware/layout.py` and of the layouts themselves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvpolicy.simulator.hardware.layouts import TILE
from kvpolicy.simulator.hardware.operator_tables import read_table
from tests.simulator.hardware.table_files import GEMM, write

ATTENTION: dict[str, Any] = {
    "op_name": "context_attention", "kernel_source": "flash", "device": "NVIDIA H100 80GB HBM3", "batch_size": 2,
    "isl": 300, "num_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "attn_dtype": "bfloat16",
    "kv_cache_dtype": "bfloat16", "step": 0, "latency": 0.5,
}  # fmt: skip


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
