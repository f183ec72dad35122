"""Columns of a trace's tables: their Arrow types, which may be empty, and the words allowed in some of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import pyarrow as pa

from kvpolicy.events import CAUSES, DIRECTIONS, ENDINGS, KINDS, Preemption

SCHEMA_VERSION = 1

_INT = pa.int64()
_REAL = pa.float64()
_TEXT = pa.string()
_FLAG = pa.bool_()


def _columns(*, optional: Sequence[str] = (), **types: pa.DataType) -> pa.Schema:
    return pa.schema([pa.field(name, kind, nullable=name in optional) for name, kind in types.items()])


_SITUATION: dict[str, pa.DataType] = {
    f.name: {"float": _REAL, "float | None": _REAL, "int": _INT, "int | None": _INT}.get(str(f.type), _TEXT)
    for f in fields(Preemption)
}
_OPTION = pa.struct([("kind", _TEXT), ("load_tokens", _INT), ("tier", _TEXT), ("synchronous", _FLAG)])
_COST = pa.struct(
    [(n, _REAL) for n in ("engine_s", "save_s", "load_s", "recompute_s", "stall_s", "low_s", "high_s")]
    + [("log_ratio_low", _REAL), ("log_ratio_high", _REAL), ("extrapolated", _FLAG), ("victim_delay_s", _REAL)]
)
LATER_FIELDS = {("decisions", "costs"): ("victim_delay_s",)}
"""Fields of a record that older traces of the same schema version lack; they are read as empty."""
LATER_COLUMNS = {"decisions": {"hit_blocks": "shared_blocks", "save_blocks": "held_blocks"}}
"""Columns that older traces of the same schema version lack, by table. Each is read as the column after it, which is
what it would have held when it was recorded. A table that lacks only some of them is damaged."""
ABSENT_COLUMNS = {
    "requests": ("class", "priority", "ttft_deadline_s", "tpot_deadline_s"),
    "steps": ("weight", "left_out"),
}
"""Columns that a table may lack, as in older traces, and where all steps were recorded. They are not filled in, so that
such a trace keeps its digest."""
EMPTY_COLUMNS = {"decisions": ("absence_tokens", "hashed_tokens", "hit_tokens")}
"""Columns that older traces of the same schema version lack, by table; they are read as empty. A trace in which one is
empty throughout has the digest that it would have without it."""
_REPEATED = pa.struct(
    [("preemption_id", _TEXT), ("tokens", _INT), ("kv_read_tokens", _INT), ("chunk_context", _INT), ("decodes", _INT)]
)

_CANDIDATE = pa.struct(
    [
        ("request", _TEXT),
        ("number", _INT),
        ("rank", pa.list_(_REAL)),
        ("output_tokens", _INT),
        ("computed_tokens", _INT),
        ("freed_blocks", _INT),
        ("price_s", _REAL),
    ]
)

SCHEMAS: dict[str, pa.Schema] = {
    "decisions": _columns(
        preemption_id=_TEXT,
        decision_id=_TEXT,
        request=_TEXT,
        generation=_INT,
        step=_INT,
        overflow_id=_TEXT,
        **_SITUATION,
        options=pa.list_(_OPTION),
        probabilities=pa.list_(_REAL),
        chosen=_INT,
        costs=pa.list_(_COST),
        policy=_TEXT,
        state=_TEXT,
        executed=_TEXT,
        reason=_TEXT,
        state_id=_TEXT,
        arm=_TEXT,
        repeat=_INT,
        optional=("state_id", "arm", "repeat", *EMPTY_COLUMNS["decisions"]),
    ),
    "outcomes": _columns(
        preemption_id=_TEXT,
        ended=_TEXT,
        closed_s=_REAL,
        victim_delay_s=_REAL,
        wait_blocks_s=_REAL,
        local_hit_tokens=_INT,
        loaded_tokens=_INT,
        recomputed_tokens=_INT,
        first_step=_INT,
        last_step=_INT,
        engine_s=_REAL,
        others_delay_s=_REAL,
        optional=("engine_s", "others_delay_s"),
    ),
    # One row per executed engine step. `repeated` holds, per preemption, the part of the step's composition that
    # recomputes tokens its victim had already computed. Where steps were sampled, a row stands for `weight` steps, and
    # `left_out` steps right before it have no row. `device_s`: how long the forward pass took on the slowest rank's
    # device, null where that is not known.
    "steps": _columns(
        step=_INT,
        start_s=_REAL,
        duration_s=_REAL,
        device_s=_REAL,
        scheduled_tokens=_INT,
        scheduled_requests=_INT,
        decode_requests=_INT,
        kv_read_tokens=_INT,
        chunk_context=_INT,
        running_requests=_INT,
        waiting_requests=_INT,
        used_blocks=_INT,
        recomputed_tokens=_INT,
        preemptions=_INT,
        saves=_INT,
        loads=_INT,
        repeated=pa.list_(_REPEATED),
        weight=_REAL,
        left_out=_INT,
        optional=("device_s", *ABSENT_COLUMNS["steps"]),
    ),
    "transfers": _columns(
        preemption_id=_TEXT,
        generation=_INT,
        step=_INT,
        direction=_TEXT,
        tier=_TEXT,
        bytes=_INT,
        segments=_INT,
        segment_bytes=_INT,
        pinned=_FLAG,
        queued_bytes=_INT,
        submit_s=_REAL,
        start_s=_REAL,
        end_s=_REAL,
        ok=_FLAG,
    ),
    "requests": _columns(
        request=_TEXT,
        arrival_s=_REAL,
        first_token_s=_REAL,
        last_token_s=_REAL,
        prompt_tokens=_INT,
        output_tokens=_INT,
        preemptions=_INT,
        recomputed_tokens=_INT,
        loaded_tokens=_INT,
        finish=_TEXT,
        **{"class": _TEXT},
        priority=_INT,
        ttft_deadline_s=_REAL,
        tpot_deadline_s=_REAL,
        optional=("first_token_s", "last_token_s", *ABSENT_COLUMNS["requests"]),
    ),
    # One row per request that others were displaced for: of `candidates` the first `taken` were. What they cost is in
    # the outcomes of the decisions of the same step, cause and request.
    "displacements": _columns(
        displacement_id=_TEXT,
        step=_INT,
        time_s=_REAL,
        order=_TEXT,
        request=_TEXT,
        rank=pa.list_(_REAL),
        prompt_tokens=_INT,
        output_tokens=_INT,
        need_blocks=_INT,
        free_blocks=_INT,
        need_places=_INT,
        free_places=_INT,
        candidates=pa.list_(_CANDIDATE),
        taken=_INT,
        left_out=_INT,
        probability=_REAL,
    ),
    # Profiles only: one row per measuring window, including discarded ones.
    "windows": _columns(
        state_id=_TEXT,
        arm=_TEXT,
        repeat=_INT,
        cause=_TEXT,
        first_step=_INT,
        last_step=_INT,
        duration_s=_REAL,
        preemption_id=_TEXT,
        discarded=_TEXT,
        optional=("preemption_id",),
    ),
}
"""Arrow schema of each table. ``windows.discarded`` is the reason, or empty if the window counts."""

ALLOWED_WORDS = {
    ("decisions", "cause"): CAUSES,
    ("decisions", "executed"): KINDS,
    ("outcomes", "ended"): ENDINGS,
    ("transfers", "direction"): DIRECTIONS,
}
