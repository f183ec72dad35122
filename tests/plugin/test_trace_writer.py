"""Rows on their way to the disk, whatever the disk does."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpolicy import trace
from kvpolicy.attribution.ledger import Step
from kvpolicy.trace import Header
from kvpolicy_vllm.plugin import trace_writer
from kvpolicy_vllm.plugin.messages import Forward
from kvpolicy_vllm.plugin.observers import Tally
from kvpolicy_vllm.plugin.trace_writer import TraceRecorder, TraceWriter


def header() -> Header:
    return Header(
        "run", "production", "2026-01-01T00:00:00Z", "vllm 0", {"device": "cpu"}, {}, 32, 100, 10, 4, "always-swap"
    )


ROW = {
    "request": "r", "arrival_s": 0.0, "first_token_s": None, "last_token_s": None, "prompt_tokens": 1,
    "output_tokens": 0, "preemptions": 0, "recomputed_tokens": 0, "loaded_tokens": 0, "finish": "abort",
}  # fmt: skip


class TestTraceWriter:
    def test_rows_come_back(self, tmp_path: Path) -> None:
        recorder = TraceWriter(tmp_path / "trace" / "core", header(), part_rows=2)
        for _ in range(5):
            recorder.add("requests", ROW)
        recorder.close()
        assert trace.read(tmp_path / "trace").table("requests").num_rows == 5
        assert len(list((tmp_path / "trace" / "core" / "requests").iterdir())) == 3
        assert recorder.dropped == 0

    def test_what_is_asked_for_is_written_while_rows_are_few_and_time_is_short(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As where the engine idles after its last answer, and may be killed at any moment."""
        written = threading.Event()
        write = trace_writer.write_part

        def write_and_tell(*arguments: Any) -> None:
            write(*arguments)
            written.set()

        monkeypatch.setattr(trace_writer, "write_part", write_and_tell)
        recorder = TraceWriter(tmp_path / "trace" / "core", header(), part_s=1e9)
        for parts in (1, 2):
            recorder.add("requests", ROW)
            recorder.flush_soon()
            assert written.wait(60)
            assert trace.read(tmp_path / "trace").table("requests").num_rows == parts
            written.clear()
        recorder.close()

    def test_a_request_just_after_the_thread_has_waited_is_heeded(self, tmp_path: Path) -> None:
        class SetWhenWaitedFor(threading.Event):
            def wait(self, timeout: float | None = None) -> bool:
                found = super().wait(timeout)
                if not found and recorder._waiting["requests"]:
                    self.set()
                return found

        recorder = TraceWriter(tmp_path / "trace" / "core", header(), part_s=1e9)
        recorder.add("requests", ROW)
        recorder._wake = SetWhenWaitedFor()
        deadline = time.monotonic() + 30.0
        while recorder._waiting["requests"] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not recorder._waiting["requests"]
        recorder.close()

    def test_a_server_that_idles_after_every_request_writes_few_parts(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now = 0.0
        monkeypatch.setattr(trace_writer, "MIN_PART_S", 0.05)
        recorder = TraceWriter(tmp_path / "trace" / "core", header(), part_s=1e9, clock=lambda: now)
        for _ in range(50):  # the clock stands still: however often it is asked for, nothing is due
            recorder.add("requests", ROW)
            recorder.flush_soon()
            time.sleep(0.002)
        folder = tmp_path / "trace" / "core" / "requests"
        assert not folder.exists()
        now = 1.0
        patience = time.monotonic() + 60
        while not folder.exists() and time.monotonic() < patience:
            time.sleep(0.002)
        recorder.close()
        assert trace.read(tmp_path / "trace").table("requests").num_rows == 50
        assert len(list(folder.iterdir())) == 1, "asked for once more than enough, and remembered"

    def test_asking_for_it_does_not_wait_for_the_disk(self, tmp_path: Path) -> None:
        recorder = TraceWriter(tmp_path / "trace" / "core", header())
        with recorder._writing:  # the writer is stuck
            recorder.add("requests", ROW)
            recorder.flush_soon()
            recorder.flush_soon()
        recorder.close()
        assert trace.read(tmp_path / "trace").table("requests").num_rows == 1

    def test_a_folder_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("in the way")
        recorder = TraceWriter(tmp_path / "file" / "core", header())
        recorder.add("requests", ROW)
        recorder.close()
        assert recorder.dropped == 1

    def test_a_disk_that_does_not_keep_up(self, tmp_path: Path) -> None:
        recorder = TraceWriter(tmp_path / "trace" / "core", header(), max_waiting=3, part_s=1e9)
        with recorder._writing:  # the writer is stuck
            for _ in range(10):
                recorder.add("requests", ROW)
        recorder.close()
        assert recorder.dropped == 7
        assert trace.read(tmp_path / "trace").table("requests").num_rows == 3

    def test_a_disk_that_hangs_keeps_nobody_at_the_end(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """As a network folder whose server is gone: neither raises nor returns."""
        back = threading.Event()
        monkeypatch.setattr(trace_writer, "write_part", lambda *arguments: back.wait())
        recorder = TraceWriter(tmp_path / "trace" / "core", header(), part_rows=2, close_s=0.2)
        for _ in range(5):
            recorder.add("requests", ROW)
        with caplog.at_level(logging.WARNING):
            recorder.close()
        back.set()
        assert recorder.dropped == 5
        assert "dropping 5 records" in caplog.text


class TestTraceRecorder:
    def test_a_request_is_recorded_with_its_priority(self) -> None:
        """Its class and deadlines are unknown to a server. tests/vllm/test_nothing_lost.py has those of an engine."""
        rows: list[tuple[str, dict[str, Any]]] = []
        writer = SimpleNamespace(dropped=0, size=None, add=lambda table, row: rows.append((table, row)))
        recorder = TraceRecorder(writer, str.upper, "core", Tally(), lambda request: {"priority": request.priority})
        request = SimpleNamespace(
            request_id="r", num_prompt_tokens=5, num_output_tokens=0, num_preemptions=0, priority=-3,
            get_finished_reason=lambda: "abort",
        )  # fmt: skip
        recorder.arrived(request, 1.0)
        recorder.ended(request, 2.0)
        ((table, row),) = rows
        assert (table, row["request"], row["priority"]) == ("requests", "R", -3)
        assert (row["class"], row["ttft_deadline_s"], row["tpot_deadline_s"]) == (None, None, None)

    @pytest.mark.parametrize("share", [1.0, 0.999999])
    def test_steps_get_the_time_of_the_device_and_failures_are_counted(self, share: float) -> None:
        rows: list[dict[str, Any]] = []
        writer = SimpleNamespace(
            dropped=0, size=None, add=lambda table, row: rows.append(row), flush_soon=lambda: None, close=lambda: None
        )
        tally = Tally()
        recorder = TraceRecorder(writer, str.upper, "core", tally, lambda request: {}, 2, share)
        output = SimpleNamespace(num_scheduled_tokens={"r": 1}, scheduled_new_reqs=[])
        scheduler = SimpleNamespace(requests={})
        for number in range(3):
            step: Step[Any] = Step(number, scheduled_tokens=1, scheduled_requests=1)
            recorder.forwards_timed([Forward(number, 0.5), Forward(number, None if number == 1 else 0.25)])
            recorder.done(step, output, scheduler, float(number), number + 1.0)
        recorder.close()
        assert [row["device_s"] for row in rows] == [0.5, None, 0.5]
        assert tally.totals == {"untimed_forwards": 1}
