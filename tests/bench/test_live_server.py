"""Servers that a bench starts: how they end, and that nothing of them is left."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvpolicy.errors import EngineFailed
from kvpolicy_vllm.bench import live_server
from kvpolicy_vllm.bench.live_server import LiveServer


def test_a_server_that_ends_says_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["/bin/sh", "-c", "echo no such model; exit 3", "--"]
    with (
        pytest.raises(EngineFailed, match=r"(?s)ended with 3 before it answered.*no such model"),
        LiveServer(command, tmp_path / "log"),
    ):
        pass


def test_a_server_is_ended_with_all_its_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_server, "_answers", lambda url: (tmp_path / "up").exists())
    command = ["/bin/sh", "-c", f"sleep 1000 & echo $! > {tmp_path}/pid; touch {tmp_path}/up; wait", "--"]
    with LiveServer(command, tmp_path / "log") as server:
        pid = int((tmp_path / "pid").read_text())
        server.refuse_ended()
    stat = Path(f"/proc/{pid}/stat")
    for _ in range(600):  # a killed process takes a moment
        if not stat.exists() or stat.read_text().split(")")[1].split()[0] == "Z":
            return
        time.sleep(0.1)
    raise AssertionError(f"process {pid} outlived the server")
