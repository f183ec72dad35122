"""What a cost model gains by learning from what was really lost, instead of from what was expected to be lost.

    python benchmarks/lost_tokens.py [--requests N] [--blocks N] [--noise SD] [--json FILE]

The built-in simulator serves a made-up overload on made-up hardware with prefix caching (no device is measured here),
and each preemption's option is a coin's choice. From the log of one workload a model is trained twice: as it is, and
with outcomes that show what was expected at the decisions. Both are judged on the log of another workload: as at the
decision, where only the expectation is known, and as at resume, where it is known what survived.
Errors are |log(measured / predicted)|; the bias is that of the summed costs.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from exploration import SERVER, TIMES, asked_for, made_up

from kvpolicy.cost import FittedModel
from kvpolicy.datasets.examples import log_miss
from kvpolicy.datasets.logs import Record, records_of
from kvpolicy.events import KINDS
from kvpolicy.features import Features, surviving
from kvpolicy.simulator import Builtin, MemorySink
from kvpolicy.study.report import aligned
from kvpolicy.trace import Trace, from_rows, with_core
from kvpolicy.training import train

FAMILIES = ("analytic", "boosted")
MOMENTS: dict[str, Callable[[Record], Features]] = {
    "decision": lambda record: record.expected,
    "resume": lambda record: record.example.x,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1200)
    parser.add_argument("--blocks", type=int, default=1500, help="of the device")
    parser.add_argument("--noise", type=float, default=0.0, help="standard deviation of the log of costs")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    known, new = (log(seed, options.requests, options.blocks, options.noise) for seed in (0, 1))
    records = records_of({"new": new}).records
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for learned, trace in {"expected": as_expected(known), "found": known}.items():
            folder = Path(scratch, learned)
            trace.write(folder)
            for family in FAMILIES:
                model = train([folder], family=family).model
                rows += [{"learned": learned, "family": family} | row for row in judged(model, records)]
    survived = fmean(record.hit_tokens / record.situation.computed_tokens for record in records)
    expected = fmean(record.situation.hit_blocks / record.situation.held_blocks for record in records)
    print(f"{len(records)} records; {survived:.1%} of a victim survived, {expected:.1%} were expected to")
    print("\n".join(aligned([list(rows[0]), *([_cell(value) for value in row.values()] for row in rows)])))
    if options.json:
        options.json.write_text(json.dumps({"survived": survived, "expected": expected, "rows": rows}, indent=1) + "\n")
    return 0


def log(seed: int, requests: int, blocks: int, noise: float) -> Trace:
    """The log of a coin."""
    server = replace(SERVER, prefix_caching=True, device_blocks=blocks)
    run = Builtin().run(made_up(seed, requests), asked_for("random:0.5"), server, TIMES, seed, MemorySink())
    assert run.trace is not None
    rng = random.Random(seed)
    return changed(run.trace, lambda row: {"engine_s": row["engine_s"] * rng.lognormvariate(-(noise**2) / 2, noise)})


def as_expected(trace: Trace) -> Trace:
    """The log as if exactly what was expected at each decision had survived; at the same costs."""
    expected = {
        row["preemption_id"]: surviving(row["hit_blocks"], row["shared_blocks"]) * row["block_size"]
        for row in trace.rows("decisions")
    }
    return changed(trace, lambda row: {"local_hit_tokens": round(expected[row["preemption_id"]])})


def changed(trace: Trace, values: Callable[[dict[str, Any]], dict[str, Any]]) -> Trace:
    """The trace with other values in its outcomes."""
    (core,) = trace.headers
    rows = [row | values(row) for row in trace.rows("outcomes")]
    outcomes = from_rows("outcomes", [{name: row[name] for name in row if name != "core"} for row in rows])
    return Trace(trace.headers, dict(trace.tables) | {"outcomes": with_core(outcomes, core)})


def judged(model: FittedModel, records: Sequence[Record]) -> list[dict[str, Any]]:
    """Errors by option, at the decision and at resume."""
    rows = []
    for kind in KINDS:
        some = [record for record in records if record.kind == kind]
        row: dict[str, Any] = {"option": kind, "records": len(some)}
        for moment, features in MOMENTS.items():
            predicted = [model.seconds(kind, features(record)) for record in some]
            floor_s = model.floor_s[kind]
            errors = [log_miss(record.engine_s, s, floor_s) for record, s in zip(some, predicted, strict=True)]
            row[f"error at {moment}"] = fmean(map(abs, errors))
            row[f"bias at {moment}"] = sum(predicted) / sum(record.engine_s for record in some) - 1
        rows.append(row)
    return rows


def _cell(value: Any) -> str:
    return f"{value:.1%}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
