"""The windows of a trace that count: those that a profile kept, with a cost that could be attributed in full.

Tables are checked and joined as columns; a row is looked at by itself only where something is wrong with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kvpolicy.arrays import Flags, Ints
from kvpolicy.datasets.tables import Moves, Windows, coded, keys, reals, texts, wholes
from kvpolicy.datasets.validation import (
    CLOCK_ROUNDING_S,
    COUNTS,
    SIZES,
    refuse_cost,
    refuse_negative,
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
    "engine_s", "others_delay_s",
)  # fmt: skip
"""What is read of the tables; the lists in them are most of what they hold."""
MEASURED = ("engine_s", "victim_delay_s", "others_delay_s")

REASONS = (
    "preemptions beside the one that a window names",
    "windows that were discarded",
    "preemptions whose outcome is not whole",
    "preemptions whose cost could not be attributed",
    "preemptions in which something else was executed",
    "swaps of which nothing was loaded",
)
"""For which a window does not count; the first that holds is told."""

Bounds = tuple[int, int, int]


def kept_windows(folder: str, trace: Trace, left_out: Counter[str]) -> tuple[Windows, list[tuple[str, Bounds]]]:
    """The windows that count, and of each state measured under both options its name and rows; states by name.

    ``left_out`` is added to. Raises TraceError, naming table and row, for values that cannot be, and naming the option
    that was never measured.
    """
    outcomes = _outcomes(folder, trace)
    windows = trace.table("windows").select(list(WINDOW_COLUMNS))
    _refuse_first(windows, reals(windows, "duration_s") < -CLOCK_ROUNDING_S, lambda number, row: refuse_negative(
        folder, "windows", number, row, "duration_s"
    ))  # fmt: skip
    windows = windows.filter(pc.is_valid(windows["preemption_id"]))
    decisions = trace.table("decisions").select(list(DECISION_COLUMNS))
    mine = keys(decisions["core"], decisions["preemption_id"])
    outcome_at = _last_in(mine, outcomes)
    reason = _why_not(decisions, windows.take(_places(_last_in(mine, windows))), outcomes.take(_places(outcome_at)))
    labelled = _flags(pc.is_valid(decisions["state_id"]))
    kept = labelled & (reason < 0)
    _refuse_rows(folder, decisions, labelled, kept)
    _count(left_out, reason[labelled])
    costs = outcomes.select(list(MEASURED)).take(pa.array(outcome_at[kept]))
    measured = decisions.filter(pa.array(kept))
    for name in MEASURED:
        measured = measured.append_column(name, costs[name])
    _refuse_missing_arm(folder, measured)
    return _by_state(measured, left_out)


def moves(folder: str, trace: Trace) -> pa.Table:
    """The finished transfers, as :class:`Moves` takes them. Raises TraceError for one that ends before it starts."""
    table = trace.table("transfers")
    took_s = reals(table, "end_s") - reals(table, "start_s")
    _refuse_first(table, took_s < -CLOCK_ROUNDING_S, lambda number, row: refuse_negative(
        folder, "transfers", number, row | {"duration_s": row["end_s"] - row["start_s"]}, "duration_s"
    ))  # fmt: skip
    # `bytes` is summed over ranks, segments are one rank's.
    size = wholes(table, "segments") * wholes(table, "segment_bytes")
    named = table.select(["core", "preemption_id", "direction", "segments"])
    named = named.append_column("size_bytes", pa.array(size)).append_column("duration_s", pa.array(took_s))
    return named.filter(table["ok"])


def all_moves(given: Mapping[str, Trace]) -> Moves:
    """Those of all traces, by the name they go by in messages."""
    return Moves(pa.concat_tables([moves(folder, trace) for folder, trace in given.items()]))


def _refuse_first(table: pa.Table, bad: Flags, refuse: Any) -> None:
    """Gives the first bad row, its number first, to what says what is wrong with it."""
    for number in np.flatnonzero(bad)[:1].tolist():
        refuse(number, table.slice(number, 1).to_pylist()[0])


def _outcomes(folder: str, trace: Trace) -> pa.Table:
    """The outcomes, each time and cost of which can be."""
    table = trace.table("outcomes").select(list(OUTCOME_COLUMNS))
    span_s = spans_s(trace)
    spans = np.array([span_s[core] for core in texts(table, "core")], np.float64)
    cost = reals(table, "engine_s")
    bad = _flags(pc.is_valid(table["engine_s"])) & ~(np.abs(cost) <= spans)
    for name in ("victim_delay_s", "wait_blocks_s"):
        bad |= reals(table, name) < -CLOCK_ROUNDING_S

    def refuse(number: int, row: Mapping[str, Any]) -> None:
        for name in ("victim_delay_s", "wait_blocks_s"):
            refuse_negative(folder, "outcomes", number, row, name)
        refuse_cost(folder, number, row, span_s[row["core"]])

    _refuse_first(table, bad, refuse)
    return table


def _refuse_rows(folder: str, decisions: pa.Table, labelled: Flags, kept: Flags) -> None:
    named = _flags(pc.is_in(decisions["arm"], value_set=pa.array(KINDS))) & _flags(pc.is_valid(decisions["repeat"]))
    bad = labelled & ~named
    for name in COUNTS:
        bad |= wholes(decisions, name) < 0
    for name in SIZES:
        bad |= kept & (wholes(decisions, name) <= 0)

    def refuse(number: int, row: Mapping[str, Any]) -> None:
        refuse_situation(folder, number, row)
        refuse_sizes(folder, number, row)

    _refuse_first(decisions, bad, refuse)


def _why_not(decisions: pa.Table, windows: pa.Table, outcomes: pa.Table) -> Ints:
    """Which of :data:`REASONS` holds of each decision; -1 of one that counts. Its window and outcome beside it."""
    named = pc.is_valid(windows["discarded"])
    counts = pc.equal(windows["discarded"], "")
    resumed = pc.equal(outcomes["ended"], "resumed")
    executed = pc.equal(decisions["executed"], decisions["arm"])
    used = pc.or_(pc.greater(outcomes["loaded_tokens"], 0), pc.less_equal(outcomes["recomputed_tokens"], 1))
    used = pc.or_(used, pc.equal(decisions["executed"], "recompute"))  # as events.copy_was_used has it
    fine = [
        _flags(pc.fill_null(one, False))
        for one in (named, counts, resumed, pc.is_valid(outcomes["engine_s"]), executed, used)
    ]
    reason = np.full(decisions.num_rows, -1, np.int64)
    for number in reversed(range(len(REASONS))):
        reason[~fine[number]] = number
    return reason


def _count(left_out: Counter[str], reason: Ints) -> None:
    """In the order of their first rows."""
    for number in sorted(set(reason[reason >= 0].tolist()), key=lambda one: int(np.argmax(reason == one))):
        left_out[REASONS[number]] += int(np.count_nonzero(reason == number))


def _refuse_missing_arm(folder: str, measured: pa.Table) -> None:
    if not measured.num_rows:
        raise TraceError(
            f"{folder}: tables decisions and windows hold no measured state; `kvpolicy profile` measures some"
        )
    arms = pc.unique(measured["arm"]).to_pylist()
    for kind in KINDS:
        if kind not in arms:
            raise TraceError(f"{folder}: table decisions has no kept row with arm {kind!r}: it was not measured")


def _by_state(measured: pa.Table, left_out: Counter[str]) -> tuple[Windows, list[tuple[str, Bounds]]]:
    state, names = coded(measured, "state_id")
    swap = np.asarray(texts(measured, "arm") == KINDS[1], np.bool_)
    # Stable: rows of the same repeat and core stay in their order.
    order = np.lexsort((coded(measured, "core")[0], wholes(measured, "repeat"), swap, state))
    state, swap = state[order], swap[order]
    starts = np.flatnonzero(np.diff(state, prepend=-1))
    stops = np.append(starts[1:], len(state))
    turns = stops - np.add.reduceat(swap.astype(np.int64), starts)
    both = (starts < turns) & (turns < stops)
    left_out["states measured under one option only"] += int(np.count_nonzero(~both))
    rows = zip(state[starts][both].tolist(), *(one[both].tolist() for one in (starts, turns, stops)), strict=True)
    return Windows(measured.take(pa.array(order))), [(names[number], (a, b, c)) for number, a, b, c in rows]


def _last_in(values: pa.Array, table: pa.Table) -> Ints:
    """The last row of the table with each key; -1 where none has."""
    among = keys(table["core"], table["preemption_id"])
    at = pc.index_in(values, among.take(pa.array(np.arange(len(among))[::-1])))
    found = np.asarray(pc.fill_null(at, len(among)), np.int64)
    return len(among) - 1 - found


def _places(rows: Ints) -> pa.Array:
    """For ``take``, which gives empty values where a row is -1."""
    return pa.array(rows, mask=rows < 0)


def _flags(values: pa.ChunkedArray | pa.Array) -> Flags:
    chunked = pa.chunked_array([values]) if isinstance(values, pa.Array) else values
    return np.asarray(chunked.to_numpy(), np.bool_)
