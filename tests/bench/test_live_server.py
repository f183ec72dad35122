"""Servers that a bench starts: how they end, and that nothing of them is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvpolicy.errors import EngineFailed
from kvpolicy_vllm import launch
from kvpolicy_vllm.bench import live_server
from kvpolicy_vllm.bench.live_server import LiveServer, session_cores, session_cpu_s, session_runs


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


OUTLIVED = """
import subprocess, sys
from pathlib import Path

folder = Path(sys.argv[1])
killed = subprocess.Popen(["sleep", "1000"])
while_server = "while kill -0 $PPID 2> /dev/null; do sleep 0.05; done"
slow = subprocess.Popen(["/bin/sh", "-c", f"{while_server}; sleep 1"], process_group=0)
(folder / "pids").write_text(f"{killed.pid} {slow.pid}")
(folder / "up").touch()
slow.wait()
"""
"""A server with a child that goes on until it is killed, and one that is not killed, and ends a second after it."""


def test_a_server_is_ended_with_all_its_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_server, "_answers", lambda url: (tmp_path / "up").exists())
    with LiveServer([sys.executable, "-c", OUTLIVED, str(tmp_path)], tmp_path / "log") as server:
        server.refuse_ended()
    for pid in (tmp_path / "pids").read_text().split():
        stat = Path(f"/proc/{pid}/stat")
        assert not stat.exists() or stat.read_text().split(")")[1].split()[0] == "Z", "the next one needs its memory"


def test_a_second_interrupt_leaves_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one has the bench end its server, which takes its time; the next one comes meanwhile."""
    monkeypatch.setattr(live_server, "_answers", lambda url: (tmp_path / "up").exists())
    deaf = f"trap '' TERM; touch {tmp_path}/up; while :; do sleep 0.1; done"
    server = LiveServer(["/bin/sh", "-c", deaf, "--"], tmp_path / "log")
    server.__enter__()
    process = server._process
    assert process is not None
    wait = process.wait

    def interrupted(timeout: float | None = None) -> int:
        if timeout is not None:
            raise KeyboardInterrupt
        return wait()

    monkeypatch.setattr(process, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        server.__exit__(None, None, None)
    assert wait(10.0) == -signal.SIGKILL


KILLED = """
import os, signal, sys
from pathlib import Path
from kvpolicy_vllm.bench import live_server

folder = Path(sys.argv[1])
live_server._answers = lambda url: (folder / "up").exists()
server = "trap 'touch {0}/told; exit' TERM; echo $$ > {0}/pid; touch {0}/up; while :; do sleep 0.05; done"
with live_server.LiveServer(["/bin/sh", "-c", server.format(folder), "--"], folder / "log"):
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="prctl(2) is Linux's")
def test_a_server_ends_with_a_bench_that_is_killed(tmp_path: Path) -> None:
    """Told to, so that it ends its own processes: else it would hold the memory that the next bench needs."""
    assert subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)]).returncode == -signal.SIGKILL
    session = int((tmp_path / "pid").read_text())
    for _ in range(400):
        if not session_runs(session):
            break
        time.sleep(0.05)
    assert (tmp_path / "told").exists() and not session_runs(session)


def test_cpu_time_is_that_of_all_processes_of_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child of the server counts until it says that it is ready; the shell that waits for it does next to nothing."""
    monkeypatch.setattr(live_server, "_answers", lambda url: (tmp_path / "up").exists())
    child = f"i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done; touch {tmp_path}/up; sleep 1000"
    with LiveServer(["/bin/sh", "-c", f"( {child} ) & wait", "--"], tmp_path / "log") as server:
        assert server.cpu_s > 0
        assert session_cpu_s(-1) == 0.0


STAT = "{pid} ({name}) S 1 1 {session} 0 -1 4194560 99 0 0 0 {ticks} {ticks} 0 0 20 0 1 0 4711 8454144 1024"
"""/proc/PID/stat up to its field 24, of a process with one thread."""


def test_cpu_time_is_read_by_session_whatever_a_process_is_called(tmp_path: Path) -> None:
    for pid, name, session, ticks in ((7, "a) S 9 (b", 70, 300), (8, "sh", 70, 50), (9, "sh", 90, 1000)):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(STAT.format(pid=pid, name=name, session=session, ticks=ticks))
    (tmp_path / "10").mkdir()  # ended meanwhile
    assert session_cpu_s(70, tmp_path) == pytest.approx(2 * 350 / os.sysconf("SC_CLK_TCK"))
    assert session_runs(70, tmp_path) and session_runs(90, tmp_path) and not session_runs(80, tmp_path)


@pytest.mark.parametrize(
    ("state", "threads", "runs"), [("S", 1, True), ("S", 9, True), ("Z", 1, False), ("X", 0, False), ("Z", 2, True)]
)
def test_a_process_has_ended_when_all_its_threads_have(state: str, threads: int, runs: bool, tmp_path: Path) -> None:
    """Killed, its first thread may be a zombie while another one holds the memory of all."""
    (tmp_path / "9").mkdir()
    stat = STAT.replace(" S ", f" {state} ").replace(" 20 0 1 ", f" 20 0 {threads} ")
    (tmp_path / "9" / "stat").write_text(stat.format(pid=9, name="sh", session=90, ticks=1))
    assert session_runs(90, tmp_path) == runs


def test_cores_are_those_of_all_threads_of_a_session(tmp_path: Path) -> None:
    for pid, session, allowed in ((7, 70, ("0-3", "0")), (8, 70, ("0-3", "1")), (9, 90, ("0-3",))):
        for thread, cores in enumerate(allowed):
            (tmp_path / f"{pid}" / "task" / f"{pid + thread}").mkdir(parents=True)
            status = f"Name:\tsh\nCpus_allowed:\tf\nCpus_allowed_list:\t{cores}\nMems_allowed_list:\t0\n"
            (tmp_path / f"{pid}" / "task" / f"{pid + thread}" / "status").write_text(status)
        (tmp_path / f"{pid}" / "stat").write_text(STAT.format(pid=pid, name="sh", session=session, ticks=1))
    (tmp_path / "8" / "task" / "99").mkdir()  # a thread that ended meanwhile
    assert session_cores(70, tmp_path) == ["0", "0-3", "1"]
    assert session_cores(90, tmp_path) == ["0-3"] and session_cores(80, tmp_path) == []


def test_cores_are_read_of_a_server_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its child may run on one core alone."""
    monkeypatch.setattr(live_server, "_answers", lambda url: (tmp_path / "up").exists())
    core = max(os.sched_getaffinity(0))
    child = f"import os, time; os.sched_setaffinity(0, [{core}]); open('{tmp_path}/up', 'w').close(); time.sleep(1000)"
    with LiveServer([sys.executable, "-c", child], tmp_path / "log") as server:
        assert server.cores == [str(core)]
