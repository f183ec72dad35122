"""The step table under a made-up profile: for tests in which costs are still to be attributed."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from kvpolicy import trace as traces
from kvpolicy.trace import Trace

FIXED_S, TOKEN_S, DECODE_S = 2e-3, 3e-5, 1e-4
CALM_STEPS = 12
Row = dict[str, Any]


def with_steps(made: Trace) -> Trace:
    """The trace with steps and re-timed transfers under each preemption, and no ``engine_s``.

    Each preemption takes one step that is as much longer as the preemption cost, with undisturbed ones around it.
    """
    tables: dict[str, list[pa.Table]] = {}
    for core in made.headers:
        rows = {name: [row for row in made.rows(name) if row["core"] == core] for name in ("outcomes", "transfers")}
        for name, some in _core(rows["outcomes"], rows["transfers"]).items():
            tables.setdefault(name, []).append(traces.with_core(traces.from_rows(name, some), core))
    return Trace(made.headers, dict(made.tables) | {name: pa.concat_tables(some) for name, some in tables.items()})


def _core(outcomes: list[Row], transfers: list[Row]) -> dict[str, list[Row]]:
    steps: list[Row] = []
    now_s = 1000.0
    closed, moved = [], []
    for outcome in outcomes:
        for calm in range(CALM_STEPS):
            now_s = _add(steps, now_s, 1 + calm % 4, 0, 0.0, {})
        swapped = outcome["loaded_tokens"] > 0
        extra_s, lost = outcome["engine_s"], outcome["recomputed_tokens"]
        disturbed = {"preemptions": 1, "saves": int(swapped), "loads": int(swapped), "recomputed_tokens": lost}
        number, began_s = len(steps), now_s
        repeated = {"preemption_id": outcome["preemption_id"], "tokens": lost, "kv_read_tokens": 0}
        if not swapped:
            disturbed["repeated"] = [repeated | {"chunk_context": lost * (lost + 1) // 2, "decodes": 0}]
        now_s = _add(steps, now_s, 3, lost, extra_s, disturbed)
        mine = [row for row in transfers if row["preemption_id"] == outcome["preemption_id"]]
        times = {"step": number, "submit_s": began_s, "start_s": began_s + 1e-5, "end_s": now_s - 1e-5}
        moved += [row | times for row in mine]
        closed.append(outcome | {"engine_s": None, "others_delay_s": None, "first_step": number, "last_step": number})
    for calm in range(CALM_STEPS):
        now_s = _add(steps, now_s, 1 + calm % 4, 0, 0.0, {})
    return {"steps": steps, "outcomes": closed, "transfers": moved}


def _add(steps: list[Row], start_s: float, decodes: int, chunk: int, extra_s: float, changes: Row) -> float:
    """Append a step; returns when it ends. ``chunk``: tokens prefilled again, whose time is part of ``extra_s``."""
    duration_s = FIXED_S + (TOKEN_S + DECODE_S) * decodes + extra_s
    row = {
        "step": len(steps), "start_s": start_s, "duration_s": duration_s, "device_s": None,
        "scheduled_tokens": decodes + chunk, "scheduled_requests": decodes + (chunk > 0), "decode_requests": decodes,
        "kv_read_tokens": 300 * decodes, "chunk_context": chunk * (chunk + 1) // 2, "running_requests": decodes,
        "waiting_requests": 0, "used_blocks": 10, "recomputed_tokens": 0, "preemptions": 0, "saves": 0, "loads": 0,
        "repeated": [],
    }  # fmt: skip
    steps.append(row | changes)
    return start_s + duration_s
