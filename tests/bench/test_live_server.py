"""Servers that a bench starts: how they end, and that nothing of them is left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvpolicy.errors import EngineFailed
from kvpolicy_vllm import launch
from kvpolicy_vllm.bench import live_server
from kvpolicy_vllm.bench.live_server import LiveServer, session_cpu_s, session_runs


def test_a_server_that_ends_says_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["/bin/sh", "-c", "echo no such model; exit 3", "--"]
    with (
        pytest.raises(EngineFailed, match=r"(?s)ended with 3 before it answered.*no such model"),
        LiveServer(command, tmp_path / "log"),
    ):
        pass


@pytest.mark.parametrize(("given", "cores"), [(None, "2"), ("0", "0")])
def test_a_server_on_a_cpu_has_the_cores_that_it_has_without_a_connector(
    given: str | None, cores: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "version", lambda name: "0.32.0+cpu")
    monkeypatch.delenv(launch.RESERVED_CORES, raising=False)
    if given is not None:
        monkeypatch.setenv(launch.RESERVED_CORES, given)
    command = ["/bin/sh", "-c", f"echo cores ${launch.RESERVED_CORES}.; exit 3", "--", "-tp", "2"]
    with pytest.raises(EngineFailed, match=rf"cores {cores}\."), LiveServer(command, tmp_path / "log"):
        pass


def test_a_server_without_enough_memory_says_so_in_one_line(tmp_path: Path) -> None:
    text = "ValueError: Available memory on node 0 (17.97/23.54 GiB) on startup is less than desired CPU memory"
    command = ["/bin/sh", "-c", f"echo more; echo '{text}'; echo more; exit 1", "--"]
    with pytest.raises(EngineFailed) as ended, LiveServer(command, tmp_path / "log"):
        pass
    assert str(ended.value) == (
        f"the server ended with 1 before it answered: {text} (Give --gpu-memory-utilization 0.76 or less.); its output "
        f"is in {tmp_path / 'log'}"
    )


def test_a_server_is_ended_with_all_its_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_server, "_answers", lambda url: (tmp_path / "up").exists())
    command = ["/bin/sh", "-c", f"sleep 1000 & echo $! > {tmp_path}/pid; touch {tmp_path}/up; wait", "--"]
    with LiveServer(command, tmp_path / "log") as server:
        pid = int((tmp_path / "pid").read_text())
        server.refuse_ended()
    stat = Path(f"/proc/{pid}/stat")
    assert not stat.exists() or stat.read_text().split(")")[1].split()[0] == "Z", "whoever comes next needs its memory"


def test_cpu_time_is_that_of_all_processes_of_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child of the server counts until it says that it is ready; the shell that waits for it does next to nothing."""
    monkeypatch.setattr(live_server, "_answers", lambda url: (tmp_path / "up").exists())
    child = f"i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done; touch {tmp_path}/up; sleep 1000"
    with LiveServer(["/bin/sh", "-c", f"( {child} ) & wait", "--"], tmp_path / "log") as server:
        assert server.cpu_s > 0
        assert session_cpu_s(-1) == 0.0


def test_cpu_time_is_read_by_session_whatever_a_process_is_called(tmp_path: Path) -> None:
    for pid, name, session, ticks in ((7, "a) S 9 (b", 70, 300), (8, "sh", 70, 50), (9, "sh", 90, 1000)):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(f"{pid} ({name}) S 1 1 {session} 0 -1 0 0 0 0 0 {ticks} {ticks} 0 0")
    (tmp_path / "10").mkdir()  # ended meanwhile
    assert session_cpu_s(70, tmp_path) == pytest.approx(2 * 350 / os.sysconf("SC_CLK_TCK"))
    assert session_runs(70, tmp_path) and session_runs(90, tmp_path) and not session_runs(80, tmp_path)
    (tmp_path / "9" / "stat").write_text("9 (sh) Z 1 1 90 0 -1 0 0 0 0 0 1 1 0 0")
    assert not session_runs(90, tmp_path), "a zombie holds nothing"
