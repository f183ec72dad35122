"""Communication between tensor-parallel ranks: published times of all-reduces, as seconds of a step by tokens.

Megatron's split (Shoeybi et al., arXiv:1909.08053), which vLLM follows: every layer adds up what the ranks computed
once behind attention and once behind the MLP. vLLM splits the embedding, too, and adds that up once a step. Each
all-reduce is over one vector of the model's width per token.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kvpolicy.arrays import Floats
from kvpolicy.hardware import Geometry
from kvpolicy.simulator.hardware.layout import Rows
from kvpolicy.simulator.hardware.layouts import ELEMENT_BYTES, NATIVE_DTYPE
from kvpolicy.simulator.hardware.operator_tables import TableError, TableFile, columns_of, medians
from kvpolicy.simulator.hardware.operators import SourcedCurve, curve_of
from kvpolicy.simulator.hardware.table_times import ALL_REDUCE, Curve
from kvpolicy.stored_values import sha256_of

PER_LAYER, PER_STEP = 2, 1
SPELLINGS = (
    {"ms": "time_stats.all_reduce.median", "workers": "num_workers", "size": "size", "in_node": "devices_per_node"},
    {"ms": "median_ms", "workers": "num_workers", "size": "size_bytes", "in_node": "devices_per_node"},
)
"""Columns of Vidur's tables (microsoft/vidur, data/profiling/network): milliseconds by ranks and bytes."""


def with_all_reduces(tokens: SourcedCurve, file: Path, geometry: Geometry, ranks: int) -> SourcedCurve:
    """``tokens``, the operators by token of a step, with the all-reduces of these ranks in one node.

    ``geometry``: that of one rank. Raises TableError for a file in no known layout, with an impossible value, or
    without rows for as many ranks in one node.
    """
    rows = columns_of(file)
    size, seconds = _measured(rows, file, ranks)
    bytes_per_token = geometry.hidden * ELEMENT_BYTES[NATIVE_DTYPE]
    times = PER_LAYER * geometry.layers + PER_STEP
    source = TableFile(file, ALL_REDUCE, rows, {}, sha256_of(file))
    note = (
        f"{file.name}: {times} all-reduces a step of {bytes_per_token:g} bytes per token; gathering the head's output "
        "from the ranks is not counted"
    )
    return SourcedCurve(
        _sum(tokens.curve, curve_of(size / bytes_per_token, times * seconds)),
        (*tokens.sources, (source, f"all-reduces of {ranks} ranks")),
        (*tokens.notes, note),
    )


def _measured(rows: Rows, file: Path, ranks: int) -> tuple[Floats, Floats]:
    """Bytes, rising, and median seconds of an all-reduce of them among ``ranks`` in one node."""
    spelling = next((names for names in SPELLINGS if set(names.values()) <= set(rows.names)), None)
    if spelling is None:
        known = " or ".join(", ".join(names.values()) for names in SPELLINGS)
        raise TableError(f"{file}: not a table of all-reduces; its columns are {', '.join(rows.names)}, not {known}")
    columns = {name: rows.number(column) for name, column in spelling.items()}
    for name, values in columns.items():
        bad = ~np.isfinite(values) | (values <= 0)
        if bad.any():
            row = int(np.argmax(bad))
            raise TableError(
                f"{file}, row {row}: {spelling[name]} is {float(values[row])!r}, should be a number above 0"
            )
    in_node = columns["workers"] == columns["in_node"]
    chosen = in_node & (columns["workers"] == ranks)
    points, seconds = medians(columns["size"][chosen][:, None], 1e-3 * columns["ms"][chosen])
    if len(points) < 2:
        counts = ", ".join(f"{count:g}" for count in np.unique(columns["workers"][in_node])) or "none"
        raise TableError(
            f"{file}: fewer than two sizes were measured with {ranks} ranks in one node; there are rows for {counts}"
        )
    return points[:, 0], seconds


def _sum(operators: Curve, communication: Curve) -> Curve:
    """The sum of both by tokens, at the points of both up to the operators' last; beyond, each has its own slope."""
    at = np.unique(np.concatenate([operators.at, communication.at]))
    at = at[at <= operators.at[-1]]
    seconds = _seconds(operators, at) + _seconds(communication, at)
    per_more_s = operators.per_more_s + communication.per_more_s
    return Curve(tuple(map(float, at)), tuple(float(f"{value:.6g}") for value in seconds), per_more_s)


def _seconds(curve: Curve, at: Floats) -> Floats:
    beyond = np.maximum(at - curve.at[-1], 0.0)
    return np.asarray(np.interp(at, curve.at, curve.seconds) + beyond * curve.per_more_s, np.float64)
