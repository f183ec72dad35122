"""Checks of trace rows. Impossible values raise errors that name folder, table and row; unusual values are accepted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import inf, isfinite
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from kvpolicy.events import KINDS
from kvpolicy.trace import Trace, TraceError

Row = Mapping[str, Any]

CLOCK_ROUNDING_S = 1e-9
"""A difference of clock readings may be this far below 0."""

PROBABILITY_ROUNDING = 1e-9
"""A sum of shares may be this far above 1."""

IDENTITY: Mapping[str, tuple[str, ...]] = {
    "decisions": ("core", "decision_id"),
    "outcomes": ("core", "preemption_id"),
    "steps": ("core", "step"),
    "transfers": ("core", "preemption_id", "generation", "direction"),
    "displacements": ("core", "displacement_id"),
    "windows": ("core", "state_id", "arm", "repeat", "first_step", "preemption_id"),
}
"""Columns that identify a row of a table. Requests have none, because clients name them and may reuse a name."""

COUNTS = (
    "computed_tokens", "prompt_tokens", "output_tokens", "block_size", "block_bytes", "segment_bytes", "held_blocks",
    "shared_blocks", "hashed_blocks", "hit_blocks", "save_blocks", "device_blocks", "free_blocks", "short_blocks",
    "host_blocks", "free_host_blocks", "running_requests", "waiting_requests", "batch_tokens", "queued_save_bytes",
    "queued_load_bytes", "earlier_preemptions", "hashed_tokens", "hit_tokens",
)  # fmt: skip
"""Fields of a situation that are never below 0; some may be empty."""

SIZES = ("computed_tokens", "held_blocks", "block_size", "block_bytes", "segment_bytes")
"""Fields of a measured situation that are above 0."""

_TIMES: Mapping[str, tuple[str, ...]] = {
    "decisions": ("time_s",),
    "outcomes": ("closed_s",),
    "steps": ("start_s",),
    "transfers": ("submit_s", "end_s"),
    "requests": ("arrival_s", "last_token_s"),
}
"""Columns that hold readings of a core's clock."""


def refuse_doubled(folder: str, trace: Trace) -> None:
    """Raises TraceError for the first duplicate row of a table."""
    for table, names in IDENTITY.items():
        identities = trace.table(table).select(names)
        if identities.group_by(list(names)).aggregate([]).num_rows == identities.num_rows:
            continue
        columns = identities.to_pydict()
        seen: dict[tuple[Any, ...], int] = {}
        for number, key in enumerate(zip(*columns.values(), strict=True)):
            if seen.setdefault(key, number) != number:
                description = ", ".join(f"{name} {value}" for name, value in zip(names, key, strict=True))
                raise TraceError(
                    f"{folder}: table {table}, row {number} is row {seen[key]} again ({description}); each should be "
                    "there once: was a part file copied?"
                )


def refuse_choices_of_victims(folder: str, trace: Trace) -> None:
    """Raises TraceError for the first row of ``displacements`` that no order can have brought about."""
    for number, row in enumerate(
        trace.rows("displacements", ("core", "candidates", "taken", "left_out", "probability"))
    ):
        candidates = row["candidates"]
        if not 1 <= row["taken"] <= len(candidates):
            wrong = f"taken is {row['taken']}, should be from 1 to the number of candidates, {len(candidates)}"
        elif row["left_out"] < 0:
            wrong = f"left_out is {row['left_out']}, should be 0 or above"
        elif not 0.0 <= row["probability"] <= 1.0 + PROBABILITY_ROUNDING:
            wrong = f"probability is {row['probability']:g}, should be from 0 to 1, or 0 where it is not known"
        elif empty := [
            name for one in candidates for name, value in one.items() if value is None and name != "price_s"
        ]:
            wrong = f"{empty[0]} of a candidate is empty"
        else:
            continue
        raise TraceError(f"{folder}: table displacements, row {number} of core {row['core']}: {wrong}")


def refuse_negative(folder: str, table: str, number: int, row: Row, column: str) -> None:
    """Raises TraceError for a duration below 0."""
    if row[column] < -CLOCK_ROUNDING_S:
        raise TraceError(
            f"{folder}: table {table}, row {number} of core {row['core']}: {column} is {row[column]:g} s, "
            "should be 0 or above"
        )


def refuse_negative_hits(folder: str, number: int, row: Row) -> None:
    """Raises TraceError for a row of ``outcomes`` with fewer than 0 tokens found on the device."""
    if row["local_hit_tokens"] < 0:
        raise TraceError(
            f"{folder}: table outcomes, row {number} of core {row['core']}: local_hit_tokens is "
            f"{row['local_hit_tokens']}, should be 0 or above"
        )


def refuse_situation(folder: str, number: int, row: Row) -> None:
    """Raises TraceError for a row of ``decisions`` that is no valid situation."""
    for name in COUNTS:
        if row[name] is not None and row[name] < 0:
            raise TraceError(f"{folder}: table decisions, row {number}: {name} is {row[name]:g}, should be 0 or above")
    if row["state_id"] is not None and (row["arm"] not in KINDS or row["repeat"] is None):
        raise TraceError(
            f"{folder}: table decisions, row {number}: arm is {row['arm']!r}, repeat {row['repeat']!r}; "
            "a row with a state_id should have an arm (recompute or swap) and a repeat"
        )


def refuse_sizes(folder: str, number: int, row: Row) -> None:
    """Raises TraceError for a measured situation in which no blocks were held."""
    for name in SIZES:
        if row[name] <= 0:
            raise TraceError(f"{folder}: table decisions, row {number}: {name} is {row[name]}, should be above 0")


def refuse_cost(folder: str, number: int, row: Row, span_s: float) -> None:
    """Raises TraceError for an outcome whose cost is not finite, or exceeds the time span of its core's trace.

    ``span_s``: from :func:`spans_s`. Noise can bring a small cost below 0, so negative costs are accepted.
    """
    value = row["engine_s"]
    if not isfinite(value) or abs(value) > span_s:
        raise TraceError(
            f"{folder}: table outcomes, row {number} of core {row['core']}: engine_s is {value:g} s, should be a "
            f"number within the {span_s:g} s that this core's whole trace takes"
        )


def spans_s(trace: Trace) -> dict[str, float]:
    """Seconds from the first to the last recorded time of each core."""
    ends: dict[str, tuple[float, float]] = {}
    for moments in _moments(trace):
        grouped = moments.group_by("core").aggregate([("time_s", "min"), ("time_s", "max")])
        for row in grouped.to_pylist():
            low, high = ends.get(row["core"], (inf, -inf))
            ends[row["core"]] = min(low, row["time_s_min"]), max(high, row["time_s_max"])
    return {core: high - low for core, (low, high) in ends.items()}


def _moments(trace: Trace) -> Iterator[pa.Table]:
    """Tables of ``core`` and ``time_s``, without unknown times."""
    for table, names in _TIMES.items():
        for name in names:
            yield _known(trace.table(table)["core"], trace.table(table)[name])
    steps = trace.table("steps")
    yield _known(steps["core"], pc.add(steps["start_s"], steps["duration_s"]))


def _known(core: pa.ChunkedArray, time_s: pa.ChunkedArray) -> pa.Table:
    table = pa.table({"core": core, "time_s": time_s})
    return table.filter(pc.fill_null(pc.is_finite(time_s), False))
