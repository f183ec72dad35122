"""Selects the valid windows of a trace: not discarded by the profile, and with a completely attributed cost.

Tables are checked and joined as columns. Single rows are read only for error messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kvpolicy.arrays import Flags, Ints
from kvpolicy.datasets.tables import TransferTable, Windows, coded, keys, reals, texts, wholes
from kvpolicy.datasets.validation import (
    CLOCK_ROUNDING_S,
    COUNTS,
    SIZES,
    refuse_cost,
    refuse_negative,
    refuse_negative_hits,
    refuse_situation,
    refuse_sizes,
    spans_s,
)
from kvpolicy.events import KINDS, SITUATION_FIELDS
from kvpolicy.trace import Trace, TraceError

DECISION_COLUMNS = (*SITUATION_FIELDS, "core", "preemption_id", "state_id", "arm", "repeat", "executed")
WINDOW_COLUMNS = ("core", "preemption_id", "duration_s", "discarded")
OUTCOME_COLUMNS = (
    "core", "preemption_id", "ended", "victim_delay_s", "wait_blocks_s", "loaded_tokens", "recomputed_tokens",
    "local_hit_tokens", "engine_s", "others_delay_s",
)  # fmt: skip
"""Columns that are read. The lists, which take most of the space, are not among them."""
MEASURED = ("engine_s", "victim_delay_s", "others_delay_s", "local_hit_tokens")

REASONS = (
    "preemptions beside the one that a window names",
    "windows that were discarded",
    "preemptions whose outcome is not whole",
    "preemptions whose cost could not be attributed",
    "preemptions in which something else was executed",
    "swaps of which nothing was loaded",
)
"""Reasons for which a window does not count; the first that applies is reported."""

Bounds = tuple[int, int, int]


def valid_windows(folder: str, trace: Trace, left_out: Counter[str]) -> tuple[Windows, list[tuple[str, Bounds]]]:
    """The valid windows, and name and rows of each state measured under both options, ordered by name.

    Excluded windows are added to ``left_out``. Raises TraceError, naming table and row, for impossible values, and
    naming the option that was never measured.
    """
    outcomes = _outcomes(folder, trace)
    windows = trace.table("windows").select(list(WINDOW_COLUMNS))
    _refuse_first_bad_row(
        windows, reals(windows, "duration_s") < -CLOCK_ROUNDING_S,
        lambda number, row: refuse_negative(folder, "windows", number, row, "duration_s"),
    )  # fmt: skip
    windows = windows.filter(pc.is_valid(windows["preemption_id"]))
    decisions = trace.table("decisions").select(list(DECISION_COLUMNS))
    decision_keys = keys(decisions["core"], decisions["preemption_id"])
    outcome_at = _last_rows(decision_keys, outcomes)
    reason = _why_not(
        decisions,
        windows.take(_take_indices(_last_rows(decision_keys, windows))),
        outcomes.take(_take_indices(outcome_at)),
    )
    in_state = _flags(pc.is_valid(decisions["state_id"]))
    counted = in_state & (reason < 0)
    _refuse_rows(folder, decisions, in_state, counted)
    _count(left_out, reason[in_state])
    costs = outcomes.select(list(MEASURED)).take(pa.array(outcome_at[counted]))
    measured = decisions.filter(pa.array(counted))
    for name in MEASURED:
        measured = measured.append_column(name, costs[name])
    _refuse_missing_arm(folder, measured)
    return _by_state(measured, left_out)


def transfers_of_trace(folder: str, trace: Trace) -> pa.Table:
    """The finished transfers, as columns for :class:`TransferTable`. Raises TraceError if one ends before it starts."""
    table = trace.table("transfers")
    duration_s = reals(table, "end_s") - reals(table, "start_s")
    _refuse_first_bad_row(table, duration_s < -CLOCK_ROUNDING_S, lambda number, row: refuse_negative(
        folder, "transfers", number, row | {"duration_s": row["end_s"] - row["start_s"]}, "duration_s"
    ))  # fmt: skip
    # `bytes` is summed over ranks, segments are one rank's.
    size = wholes(table, "segments") * wholes(table, "segment_bytes")
    columns = table.select(["core", "preemption_id", "direction", "segments"])
    columns = columns.append_column("size_bytes", pa.array(size)).append_column("duration_s", pa.array(duration_s))
    return columns.filter(table["ok"])


def all_transfers(traces: Mapping[str, Trace]) -> TransferTable:
    """The finished transfers of all traces, which are given by the name used in error messages."""
    return TransferTable(pa.concat_tables([transfers_of_trace(folder, trace) for folder, trace in traces.items()]))


def _refuse_first_bad_row(table: pa.Table, bad: Flags, refuse: Any) -> None:
    """Call ``refuse`` with number and row of the first bad row; it raises the error."""
    for number in np.flatnonzero(bad)[:1].tolist():
        refuse(number, table.slice(number, 1).to_pylist()[0])


def _outcomes(folder: str, trace: Trace) -> pa.Table:
    """The outcomes. Raises TraceError for an impossible time, cost or number of tokens found."""
    table = trace.table("outcomes").select(list(OUTCOME_COLUMNS))
    span_s = spans_s(trace)
    spans = np.array([span_s[core] for core in texts(table, "core")], np.float64)
    cost = reals(table, "engine_s")
    bad = _flags(pc.is_valid(table["engine_s"])) & ~(np.abs(cost) <= spans)
    for name in ("victim_delay_s", "wait_blocks_s"):
        bad |= reals(table, name) < -CLOCK_ROUNDING_S
    bad |= wholes(table, "local_hit_tokens") < 0

    def refuse(number: int, row: Mapping[str, Any]) -> None:
        for name in ("victim_delay_s", "wait_blocks_s"):
            refuse_negative(folder, "outcomes", number, row, name)
        refuse_negative_hits(folder, number, row)
        refuse_cost(folder, number, row, span_s[row["core"]])

    _refuse_first_bad_row(table, bad, refuse)
    return table


def _refuse_rows(folder: str, decisions: pa.Table, in_state: Flags, counted: Flags) -> None:
    has_arm = _flags(pc.is_in(decisions["arm"], value_set=pa.array(KINDS))) & _flags(pc.is_valid(decisions["repeat"]))
    bad = in_state & ~has_arm
    for name in COUNTS:
        bad |= reals(decisions, name) < 0
    for name in SIZES:
        bad |= counted & (wholes(decisions, name) <= 0)

    def refuse(number: int, row: Mapping[str, Any]) -> None:
        refuse_situation(folder, number, row)
        refuse_sizes(folder, number, row)

    _refuse_first_bad_row(decisions, bad, refuse)


def _why_not(decisions: pa.Table, windows: pa.Table, outcomes: pa.Table) -> Ints:
    """Index into :data:`REASONS` for each decision; -1 for one that counts. Tables are aligned with the decisions."""
    named_by_window = pc.is_valid(windows["discarded"])
    not_discarded = pc.equal(windows["discarded"], "")
    resumed = pc.equal(outcomes["ended"], "resumed")
    executed = pc.equal(decisions["executed"], decisions["arm"])
    copy_used = pc.or_(pc.greater(outcomes["loaded_tokens"], 0), pc.less_equal(outcomes["recomputed_tokens"], 1))
    copy_used = pc.or_(copy_used, pc.equal(decisions["executed"], "recompute"))  # the same rule as events.copy_was_used
    conditions = [
        _flags(pc.fill_null(condition, False))
        for condition in (
            named_by_window,
            not_discarded,
            resumed,
            pc.is_valid(outcomes["engine_s"]),
            executed,
            copy_used,
        )
    ]
    reason = np.full(decisions.num_rows, -1, np.int64)
    for number in reversed(range(len(REASONS))):
        reason[~conditions[number]] = number
    return reason


def _count(left_out: Counter[str], reason: Ints) -> None:
    """Add the number of decisions by reason to ``left_out``, ordered by first row."""
    for number in sorted(
        set(reason[reason >= 0].tolist()), key=lambda reason_number: int(np.argmax(reason == reason_number))
    ):
        left_out[REASONS[number]] += int(np.count_nonzero(reason == number))


def _refuse_missing_arm(folder: str, measured: pa.Table) -> None:
    if not measured.num_rows:
        raise TraceError(
            f"{folder}: tables decisions and windows hold no measured state; `kvpolicy profile` measures some"
        )
    arms = pc.unique(measured["arm"]).to_pylist()
    for kind in KINDS:
        if kind not in arms:
            raise TraceError(f"{folder}: table decisions has no valid row with arm {kind!r}: it was not measured")


def _by_state(measured: pa.Table, left_out: Counter[str]) -> tuple[Windows, list[tuple[str, Bounds]]]:
    state, names = coded(measured, "state_id")
    swap = np.asarray(texts(measured, "arm") == KINDS[1], np.bool_)
    # Stable: rows of the same repeat and core stay in their order.
    order = np.lexsort((coded(measured, "core")[0], wholes(measured, "repeat"), swap, state))
    state, swap = state[order], swap[order]
    starts = np.flatnonzero(np.diff(state, prepend=-1))
    stops = np.append(starts[1:], len(state))
    swap_starts = stops - np.add.reduceat(swap.astype(np.int64), starts)
    both = (starts < swap_starts) & (swap_starts < stops)
    left_out["states measured under one option only"] += int(np.count_nonzero(~both))
    rows = zip(
        state[starts][both].tolist(),
        *(positions[both].tolist() for positions in (starts, swap_starts, stops)),
        strict=True,
    )
    return Windows(measured.take(pa.array(order))), [(names[number], (a, b, c)) for number, a, b, c in rows]


def _last_rows(values: pa.Array, table: pa.Table) -> Ints:
    """Number of the last row of ``table`` with each key; -1 if there is none."""
    table_keys = keys(table["core"], table["preemption_id"])
    reversed_row = pc.index_in(values, table_keys.take(pa.array(np.arange(len(table_keys))[::-1])))
    reversed_row_or_end = np.asarray(pc.fill_null(reversed_row, len(table_keys)), np.int64)
    return len(table_keys) - 1 - reversed_row_or_end


def _take_indices(rows: Ints) -> pa.Array:
    """Indices for ``take``, which returns empty values for rows of -1."""
    return pa.array(rows, mask=rows < 0)


def _flags(values: pa.ChunkedArray | pa.Array) -> Flags:
    chunked = pa.chunked_array([values]) if isinstance(values, pa.Array) else values
    return np.asarray(chunked.to_numpy(), np.bool_)
