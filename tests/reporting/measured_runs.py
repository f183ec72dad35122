"""What a report draws and judges, made up: served runs, relabelled states."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from kvpolicy.reporting.measurements import Material, ServedRun, material
from kvpolicy.trace import Trace
from tests.synthetic import make_trace


def relabelled(given: Trace, names: dict[str, str]) -> Trace:
    """With other state ids, in decisions and windows."""
    tables = dict(given.tables)
    for name in ("decisions", "windows"):
        table = tables[name]
        ids = [names.get(one, one) for one in table["state_id"].to_pylist()]
        at = table.schema.get_field_index("state_id")
        tables[name] = table.set_column(at, table.schema.field(at), pa.array(ids, pa.string()))
    return Trace(given.headers, tables)


def served_run(**more: Any) -> ServedRun:
    """Steps of 10 ms, one in ten of 50 ms and bringing somebody back; the host pool mirrors the device's cache."""
    rng = random.Random(0)
    slow = [number % 10 == 0 for number in range(200)]
    duration_s = [0.05 if one else 0.01 for one in slow]
    used = [rng.uniform(0.5, 1.0) for _ in slow]
    run = ServedRun(
        figure="timeline", level=12, arm="swap", repeat=0, makespan_s=sum(duration_s), overhead_s=1.0, unattributed=0,
        preemptions={"recompute": 0, "swap": 3}, requests=32, scaling="", end_s=tuple(np.cumsum(duration_s).tolist()),
        duration_s=tuple(duration_s), decoded=(4,) * 200, used_share=tuple(used),
        host_bytes=tuple((1 - one) * 2**26 for one in used), running=(4,) * 200, waiting=(0,) * 200,
        returning=tuple(slow), preempted=(), resumed=(),
    )  # fmt: skip
    return replace(run, **more)


def with_runs(*runs: ServedRun) -> Material:
    return replace(material(make_trace(states=4, repeats=1)), runs=runs)
