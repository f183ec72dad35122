"""Tables of measured operators as files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

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
