"""Rows on their way to the disk, whatever the disk does."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from kvpolicy import trace
from kvpolicy.trace import Header
from kvpolicy_vllm.plugin import trace_writer
from kvpolicy_vllm.plugin.trace_writer import TraceWriter


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

    def test_a_folder_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("in the way")
        recorder = TraceWriter(tmp_path / "file" / "core", header())
        recorder.add("requests", ROW)
        recorder.close()
        assert recorder.dropped == 1

    def test_a_disk_that_does_not_keep_up(self, tmp_path: Path) -> None:
        recorder = TraceWriter(tmp_path / "trace" / "core", header(), most_waiting=3, part_s=1e9)
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
