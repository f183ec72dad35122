"""A recorded trace can be asked again: its requests in the order of arrival, whatever order they finished in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvpolicy.simulator.trace_workload import TRACE_FORMATS, RecordedRequests
from kvpolicy.trace import Header, from_rows, write_part
from kvpolicy.workload import Care, Request, WorkloadError, counts_of, open_workload

HEADER = Header(
    run_id="run-1",
    source="production",
    created="2026-01-01T00:00:00+00:00",
    engine="vllm 0.32.0",
    hardware={"device": "none"},
    geometry={},
    block_size=16,
    block_bytes=1024,
    device_blocks=10,
    host_blocks=10,
    policy="always-recompute",
)


def row(request: str, arrival_s: float, prompt_tokens: int, output_tokens: int) -> dict[str, Any]:
    return {
        "request": request,
        "arrival_s": arrival_s,
        "first_token_s": arrival_s + 1,
        "last_token_s": arrival_s + 2,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "preemptions": 0,
        "recomputed_tokens": 0,
        "loaded_tokens": 0,
        "finish": "length",
    }


def recorded(folder: Path, *parts: list[dict[str, Any]], core: str = "core-0") -> Path:
    HEADER.write(folder / core)
    for number, rows in enumerate(parts):
        write_part(folder / core, "requests", number, from_rows("requests", rows))
    return folder


def test_requests_come_in_the_order_of_their_arrival(tmp_path: Path) -> None:
    folder = recorded(tmp_path / "trace", [row("b", 103.5, 20, 2), row("a", 100.0, 10, 1)], [row("c", 101.0, 30, 3)])
    source = open_workload(f"{folder}?speed=2", TRACE_FORMATS)
    assert list(source) == [Request(0.0, 10, 1), Request(0.5, 30, 3), Request(1.75, 20, 2)]
    assert list(open_workload(f"trace:{folder}?n=1&seed=4", TRACE_FORMATS)) == [Request(0.0, 10, 1)]
    assert source.source == "trace: recorded by vllm 0.32.0 (production), run run-1"


def test_what_requests_said_is_replayed_too(tmp_path: Path) -> None:
    said = {"class": "urgent", "priority": -1, "ttft_deadline_s": 0.5, "tpot_deadline_s": None}
    silent = dict.fromkeys(said)
    folder = recorded(tmp_path / "trace", [row("a", 1.0, 10, 1) | said, row("b", 2.0, 20, 2) | silent])
    recorded(folder, [row("c", 1.0, 30, 3)], core="core-1")
    urgent, default = RecordedRequests(folder, "core-0")
    assert urgent == Request(0.0, 10, 1, class_name="urgent", priority=-1, ttft_s=0.5)
    assert default == Request(1.0, 20, 2)
    assert list(RecordedRequests(folder, "core-1")) == [Request(0.0, 30, 3)]


def test_requests_that_generated_nothing_are_left_out_and_counted(tmp_path: Path) -> None:
    source = RecordedRequests(recorded(tmp_path / "trace", [row("a", 1.0, 10, 0), row("b", 2.0, 20, 2)]))
    assert list(source) == [Request(0.0, 20, 2)]
    assert (source.counts.rows, source.counts.requests, source.counts.empty) == (2, 1, 1)


def test_a_damaged_row_is_refused_or_skipped(tmp_path: Path) -> None:
    folder = recorded(tmp_path / "trace", [row("a", 1.0, 10, 1)], [row("b", 2.0, 0, 2)])
    with pytest.raises(WorkloadError, match="trace, table requests, row 1: prompt_tokens 0, output_tokens 2"):
        list(RecordedRequests(folder))
    source = open_workload(f"{folder}?skip_damaged=true", TRACE_FORMATS)
    assert list(source) == [Request(0.0, 10, 1)]
    counts = counts_of(source)
    assert counts is not None and counts.damaged == 1


def test_one_of_several_cores_has_to_be_named(tmp_path: Path) -> None:
    folder = recorded(tmp_path / "trace", [row("a", 1.0, 10, 1)])
    recorded(folder, [row("b", 1.0, 20, 2)], core="core-1")
    with pytest.raises(WorkloadError, match=r"has engine cores core-0, core-1; which one is meant\? \(core=NAME\)"):
        list(open_workload(f"trace:{folder}", TRACE_FORMATS))
    with pytest.raises(WorkloadError, match="there is no core-2"):
        list(open_workload(f"{folder}?core=core-2", TRACE_FORMATS))
    assert list(open_workload(f"{folder}?core=core-1", TRACE_FORMATS)) == [Request(0.0, 20, 2)]


def test_traces_are_among_what_is_known(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"is of no known format; .*trace:FILE"):
        open_workload(str(tmp_path), TRACE_FORMATS)


def test_care_is_taken(tmp_path: Path) -> None:
    folder = recorded(tmp_path / "trace", [])
    assert list(RecordedRequests(folder, care=Care(skip_damaged=True))) == []
