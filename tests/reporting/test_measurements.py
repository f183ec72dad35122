"""What a report reads out of a trace: overflows and served runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from kvpolicy import trace
from kvpolicy.reporting.measurements import material
from kvpolicy.trace import Trace
from tests.synthetic import make_trace
from tests.synthetic_steps import with_steps


def test_a_discarded_window_does_not_hide_its_second_try() -> None:
    """They have the same labels; the first one's steps are others."""
    given = make_trace(states=20, repeats=1)
    rows = given.rows("windows")
    first = next(row for row in rows if row["arm"] == "swap")
    rows = [row | {"discarded": "a request finished"} if row is first else row for row in rows]
    tables = dict(given.tables) | {"windows": with_cores("windows", rows)}
    whole, less = material(given), material(Trace(given.headers, tables))
    assert len(less.overflows) == len(whole.overflows) - 1
    assert less.left_out == {"overflows in discarded windows": 1}


def with_cores(name: str, rows: Sequence[dict[str, Any]]) -> pa.Table:
    return trace.from_rows(name, rows).append_column("core", pa.array([row["core"] for row in rows], pa.string()))


def test_a_served_run_has_its_own_memory_and_its_own_requests() -> None:
    """One engine serves under several memories, one run after the other: the header has the largest."""
    given = with_steps(make_trace(states=12, repeats=1))
    core, header = next(iter(given.headers.items()))
    steps = sorted((row for row in given.rows("steps") if row["core"] == core), key=lambda row: row["step"])
    half = len(steps) // 2
    window = {
        "state_id": "memory/10", "arm": "recompute", "repeat": 0, "cause": "memory", "duration_s": 1.0,
        "first_step": steps[half]["step"], "last_step": steps[-1]["step"], "preemption_id": None, "discarded": "",
        "core": core,
    }  # fmt: skip
    arrivals_s = [steps[0]["start_s"] - 1, steps[half]["start_s"], steps[half + 1]["start_s"]]
    asked = {
        "first_token_s": None, "last_token_s": None, "prompt_tokens": 8, "output_tokens": 8, "preemptions": 0,
        "recomputed_tokens": 0, "loaded_tokens": 0, "finish": "length", "core": core,
    }  # fmt: skip
    requests = [asked | {"request": f"r{number}", "arrival_s": at} for number, at in enumerate(arrivals_s)]
    tables = dict(given.tables) | {
        "windows": with_cores("windows", [*given.rows("windows"), window]),
        "requests": with_cores("requests", requests),
    }
    result = replace(header, noise=dict(header.noise) | {"device_blocks": {"memory/10": 40}}, notes="scaled by half")
    (run,) = material(Trace(dict(given.headers) | {core: result}, tables)).runs
    assert run.used_share == pytest.approx([row["used_blocks"] / 40 for row in steps[half:]])
    assert run.scaling == "scaled by half"
    assert run.requests == 2, "the first was served before"
