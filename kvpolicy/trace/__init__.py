"""Traces: what an engine or a simulator did, as a folder of tables. Entry point for reading and writing them."""

from kvpolicy.trace.header import Header
from kvpolicy.trace.parts import TraceError, TraceWarning
from kvpolicy.trace.row_groups import scan
from kvpolicy.trace.rows import (
    Row,
    decision_row,
    displacement_row,
    outcome_row,
    request_row,
    step_row,
    transfer_row,
    window_row,
)
from kvpolicy.trace.schemas import SCHEMA_VERSION, SCHEMAS
from kvpolicy.trace.table import (
    Trace,
    core_folders,
    from_rows,
    iter_parts,
    left_out_before,
    read,
    read_part,
    weights_of,
    with_core,
    write_part,
)
from kvpolicy.trace.window import read_between

__all__ = [
    "SCHEMAS",
    "SCHEMA_VERSION",
    "Header",
    "Row",
    "Trace",
    "TraceError",
    "TraceWarning",
    "core_folders",
    "decision_row",
    "displacement_row",
    "from_rows",
    "iter_parts",
    "left_out_before",
    "outcome_row",
    "read",
    "read_between",
    "read_part",
    "request_row",
    "scan",
    "step_row",
    "transfer_row",
    "weights_of",
    "window_row",
    "with_core",
    "write_part",
]
