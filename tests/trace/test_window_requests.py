"""Requests that arrived before a window of time and were served in it tell which costs are complete; they count not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvpolicy import trace as traces
from kvpolicy.attribution.offline import attribute
from kvpolicy.evaluation.log_service import log_service
from kvpolicy.trace import Trace, row_groups
from kvpolicy.trace.timeline import events
from tests.attribution.step_rows import Row, costs, outcome, trace_of_cores
from tests.attribution.test_completeness import BEFORE, decision, recomputed, request

FIRST = 40
"""Step with which the window begins, well before the preemption in step BEFORE."""


def idle_after() -> tuple[list[Row], float]:
    """Steps of a preemption after which the engine was idle for half a second, and when that began."""
    steps = recomputed(idle_before=BEFORE + 4, idle_s=0.5)
    return steps, steps[BEFORE + 3]["start_s"] + steps[BEFORE + 3]["duration_s"]


def written(folder: Path, steps: list[Row], requests: list[Row], lost: int | None = None) -> tuple[Trace, Trace]:
    """The whole trace of these rows, with a part file for each request, and its window from step FIRST on."""
    at_s = steps[BEFORE]["start_s"]
    end = outcome(
        "p", recomputed_tokens=100, first_step=BEFORE, last_step=BEFORE + 3, closed_s=steps[BEFORE + 3]["start_s"]
    )
    tables = {
        "steps": [row for row in steps if row["step"] != lost],
        "outcomes": [end],
        "decisions": [decision("p", "v", time_s=at_s)],
    }
    trace = trace_of_cores({"a": tables})
    header = replace(trace.headers["a"], source="simulation")
    replace(trace, headers={"a": header}).write(folder)
    for number, row in enumerate(requests):
        traces.write_part(folder / "a", "requests", number, traces.from_rows("requests", [row]))
    since_s = steps[-1]["start_s"] - steps[FIRST]["start_s"] + 1e-6
    between = (f"-{since_s:.9f}s", "end")
    return traces.read(folder), traces.read_between([folder], between)[str(folder)]


def cost(trace: Trace) -> Any:
    return costs(attribute(trace))["p"][0]


def test_a_cost_within_is_as_complete_as_in_the_whole_trace(tmp_path: Path) -> None:
    """That the victim ended before the engine was idle is seen by its row, and it arrived long before the window."""
    steps, idle_s = idle_after()
    later = request("w", idle_s + 0.4, steps[-1]["start_s"])
    whole, window = written(tmp_path, steps, [request("v", 20.0, idle_s), later])
    assert window.table("steps").num_rows == whole.table("steps").num_rows - FIRST
    assert cost(whole) is not None and cost(window) == pytest.approx(cost(whole), rel=0.02)


def test_a_cost_that_lacks_steps_is_as_incomplete(tmp_path: Path) -> None:
    """A request that arrived long before was served across the hole, so that steps are lost there."""
    steps, idle_s = idle_after()
    across = request("y", 20.0, steps[-1]["start_s"])
    whole, window = written(tmp_path, steps, [request("v", steps[FIRST + 9]["start_s"], idle_s), across])
    assert cost(whole) is None and cost(window) is None


def test_they_do_not_count(tmp_path: Path) -> None:
    steps, idle_s = idle_after()
    across = request("y", 20.0, steps[-1]["start_s"])
    whole, window = written(tmp_path, steps, [across, request("v", steps[FIRST + 9]["start_s"], idle_s)])
    assert {row["request"] for row in window.rows("requests")} == {"v", "y"}
    assert log_service([whole])["default"].requests == 2
    assert log_service([attribute(window)])["default"].requests == 1
    drawn = list(events(window))
    begin_us = min(event["ts"] for event in drawn if "ts" in event)
    assert begin_us == 0.0 and max(event.get("ts", 0.0) for event in drawn) < 1e6 * (steps[-1]["start_s"] - 20.0) / 2


def test_those_that_ended_before_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, idle_s = idle_after()
    read: list[str] = []
    original = row_groups.read_rows
    monkeypatch.setattr(
        row_groups,
        "read_rows",
        lambda path, *more: read.append(f"{path.parent.name} {path.stem}") or original(path, *more),
    )
    early = request("e", 20.0, steps[FIRST - 1]["start_s"])
    _, window = written(tmp_path, steps, [early, request("v", 20.0, idle_s)])
    assert [row["request"] for row in window.rows("requests")] == ["v"]
    assert [name for name in read if name.startswith("requests")] == ["requests part-000001"]


def test_a_victim_without_a_token_is_kept(tmp_path: Path) -> None:
    """It was preempted in its prefill and given up; who had no token and was not preempted is of no use."""
    steps, _ = idle_after()
    none = {"first_token_s": None, "last_token_s": None, "finish": "FINISHED_ABORTED"}
    _, window = written(tmp_path, steps, [request("v", 20.0, 0.0) | none, request("u", 21.0, 0.0) | none])
    assert [row["request"] for row in window.rows("requests")] == ["v"]
