"""An engine in a process of its own: its errors and its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvpolicy.errors import EngineFailed
from kvpolicy_vllm.bench.engine_process import EngineProcess

SERVING = "kvpolicy_vllm.bench.serve_engine"


def test_a_broken_engine_reports_its_last_lines(tmp_path: Path) -> None:
    with EngineProcess(SERVING, tmp_path / "log") as engine:
        with pytest.raises(EngineFailed, match="no_such_argument"):
            engine.ask({"do": "start", "engine": {"model": "any", "no_such_argument": 1}})
        with pytest.raises(EngineFailed, match="ended with"):
            engine.ask({"do": "start", "engine": {}})


def test_an_engine_that_does_not_answer_in_time_is_killed(tmp_path: Path) -> None:
    with EngineProcess("tests.vllm.silent_process", tmp_path / "log") as engine:
        with pytest.raises(EngineFailed, match=r"no answer within 0.5 s$"):
            engine.ask_in_time({}, 0.5)
        assert not alive(engine.pid)


def test_what_an_engine_has_forked_is_killed_with_it(tmp_path: Path) -> None:
    """A fork holds the pipe that the answer is awaited on."""
    with EngineProcess("tests.vllm.forking_process", tmp_path / "log") as engine:
        with pytest.raises(EngineFailed, match=r"no answer within 5 s$"):
            engine.ask_in_time({}, 5.0)
        assert gone(int((tmp_path / "log").read_text()))


def test_after_an_exception_nothing_of_an_engine_is_left(tmp_path: Path) -> None:
    forked = []

    def interrupt(news: dict[str, int]) -> None:
        forked.append(news["forked"])
        raise KeyboardInterrupt

    with (
        pytest.raises(KeyboardInterrupt),
        EngineProcess("tests.vllm.forking_process", tmp_path / "log") as engine,
    ):
        engine.ask({}, interrupt)
    assert not alive(engine.pid) and gone(forked[0])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_an_engine_dies_with_its_parent(number: signal.Signals) -> None:
    """One is killed outright, so that nothing of it can clean up; control-C at a terminal reaches the parent alone."""
    parent = (
        "import signal, time; from kvpolicy_vllm.bench.engine_process import EngineProcess\n"
        # A shell's background jobs ignore SIGINT, and so would this process.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "with EngineProcess('tests.vllm.idle_process') as engine:\n"
        "    engine.ask({}); print(engine.pid, flush=True)\n"
        "    time.sleep(600)"
    )
    paths = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
    process = subprocess.Popen(
        [sys.executable, "-c", parent],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    process.send_signal(number)
    process.wait()
    process.stdout.close()
    assert gone(child)


def gone(pid: int) -> bool:
    """Whether a process that is no child of this one ends soon."""
    patience = time.monotonic() + 120
    while alive(pid) and time.monotonic() < patience:
        time.sleep(0.02)
    return not alive(pid)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
