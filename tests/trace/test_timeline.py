"""Trace events: what a viewer of the format needs, and that nothing of the trace is lost or moved."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from kvpolicy import trace as traces
from kvpolicy.errors import InputError
from kvpolicy.shelf import trace_folder
from kvpolicy.trace import SCHEMAS, Trace
from kvpolicy.trace.timeline import events, write_events
from tests.synthetic import make_trace

TIMES = {"X": {"ts", "dur", "tid"}, "i": {"ts", "s", "tid"}, "C": {"ts"}, "b": {"ts", "id", "cat"},
         "e": {"ts", "id", "cat"}, "M": {"args"}}  # fmt: skip
"""Phases that are written, and the fields that each must have."""


def check(found: list[dict[str, Any]]) -> None:
    """The rules of the Trace Event Format that a viewer relies on. Times are whole nanoseconds and never negative,
    slices of a track lie within or beside each other, what begins ends, and processes and tracks are named."""
    named: set[tuple[str, int, int]] = set()
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    begun: dict[tuple[str, str], float] = {}
    for event in found:
        missing = ({"ph", "name", "pid"} | TIMES[event["ph"]]) - event.keys()
        assert not missing and isinstance(event["name"], str) and event["name"], event
        assert event.get("ts", 0) >= 0 and event.get("dur", 0) >= 0, event
        if event["ph"] == "M":
            named.add((event["name"], event["pid"], event["tid"] if event["name"] == "thread_name" else 0))
        elif event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] == "b":
            assert (event["cat"], event["id"]) not in begun, "an id is used once"
            begun[event["cat"], event["id"]] = event["ts"]
        elif event["ph"] == "e":
            assert begun.pop((event["cat"], event["id"])) <= event["ts"]
        elif event["ph"] == "C":
            assert event["args"] and all(isinstance(value, (int, float)) for value in event["args"].values())
    assert not begun, "a copy that begins ends"
    for (pid, track), slices in tracks.items():
        assert ("process_name", pid, 0) in named and ("thread_name", pid, track) in named
        around: list[float] = []
        for begin, end in sorted(slices, key=lambda one: (one[0], -one[1])):
            while around and around[-1] <= begin + 1e-3:
                around.pop()
            assert not around or end <= around[-1] + 2e-3, f"slices of track {track} overlap"
            around.append(end)


def written(trace: Trace, out: Path) -> list[dict[str, Any]]:
    assert write_events(trace, out) > 0
    text = gzip.decompress(out.read_bytes()).decode() if out.suffix == ".gz" else out.read_text()
    found: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    return found


@pytest.mark.parametrize("name", ["out.json", "out.json.gz"])
def test_a_measured_trace_is_valid_and_whole(tmp_path: Path, name: str) -> None:
    trace = traces.read(trace_folder("cpu-llama-native"))
    found = written(trace, tmp_path / name)
    check(found)
    kinds = [(event["ph"], event["name"]) for event in found]
    steps = sum(phase == "X" and title.startswith("step") for phase, title in kinds)
    assert steps == trace.table("steps").num_rows > 0
    assert sum(phase == "i" for phase, _ in kinds) == trace.table("decisions").num_rows > 0
    assert sum(phase == "b" for phase, _ in kinds) == trace.table("transfers").num_rows > 0
    swaps = {"swapped out", "swapped in"}
    assert swaps <= {title for _, title in kinds}


def lived() -> Trace:
    """One request: preempted in its prefill at 2 s and back at 3 s, while decoding at 5 s and not back at the end."""
    trace = make_trace(states=1, repeats=1)
    decision, *_ = trace.rows("decisions")
    outcome, *_ = trace.rows("outcomes")
    step: dict[str, Any] = dict.fromkeys(SCHEMAS["steps"].names, 0) | {"device_s": None, "repeated": []}
    core = decision["core"]
    names = [part.name for part in SCHEMAS["decisions"].field("costs").type.value_type]
    price: dict[str, Any] = dict.fromkeys(names, 0.0) | {"extrapolated": False}
    decision["costs"] = [price | {"engine_s": 0.002 * (place + 1)} for place in range(len(decision["options"]))]
    rows = {
        "decisions": [decision | {"preemption_id": "a", "decision_id": "a", "request": "r", "time_s": 102.0},
                      decision | {"preemption_id": "b", "decision_id": "b", "request": "r", "time_s": 105.0},
                      decision | {"preemption_id": "b", "decision_id": "c", "request": "r", "time_s": 105.5}],
        "outcomes": [outcome | {"preemption_id": "a", "closed_s": 103.0, "engine_s": 0.25}],
        "requests": [{"request": "r", "arrival_s": 100.0, "first_token_s": 104.0, "last_token_s": None,
                      "prompt_tokens": 9, "output_tokens": 3, "preemptions": 2, "recomputed_tokens": 0,
                      "loaded_tokens": 0, "finish": "", "core": core}],
        "steps": [step | {"start_s": 101.0, "duration_s": 5.0}],
    }  # fmt: skip
    only = {core: trace.headers[core]}
    built = {name: traces.from_rows(name, [{k: v for k, v in row.items() if k != "core"} for row in of_name])
             for name, of_name in rows.items()}  # fmt: skip
    return Trace(only, {name: traces.with_core(table, core) for name, table in built.items()})


def test_a_requests_life_by_hand() -> None:
    found = list(events(lived()))
    check(found)
    life = [(event["name"], event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
            for event in found if event["ph"] == "X" and event["pid"] == 2]  # fmt: skip
    assert life == [
        ("waiting or prefill", 0.0, 2.0), ("preempted", 2.0, 3.0), ("waiting or prefill", 3.0, 4.0),
        ("running", 4.0, 5.0), ("preempted", 5.0, 6.0),
    ]  # fmt: skip
    first = next(event for event in found if event["name"] == "preempted")["args"]
    assert first["measured, ms"] == 250.0 and first["ended"] == "resumed"
    assert first["predicted recompute, ms"] == 2.0 and first["predicted swap, ms"] == 4.0
    assert {"reason", "policy", "computed_tokens"} <= first.keys()
    assert sum(event["ph"] == "i" for event in found) == 3, "a decision at resume is shown, and is no preemption"


def test_the_devices_share_of_a_step_is_shown_where_it_was_recorded() -> None:
    trace = lived()
    assert not [event for event in events(trace) if event["name"] == "device"]
    ((core, header),) = trace.headers.items()
    step, *_ = trace.rows("steps")
    del step["core"]
    table = traces.with_core(traces.from_rows("steps", [step | {"device_s": 4.0}]), core)
    found = list(events(Trace({core: header}, trace.tables | {"steps": table})))
    check(found)
    (count,) = [event for event in found if event["name"] == "device"]
    assert (count["ph"], count["args"]) == ("C", {"share of the step in its forward": 0.8})
    (shown,) = [event for event in found if event["name"] == "step"]
    assert shown["args"]["forward on the device, ms"] == 4000.0


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"a file that ends in \.json or \.json\.gz"):
        write_events(make_trace(states=1, repeats=1), tmp_path / "x")
