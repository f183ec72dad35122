"""An engine in a process of its own: its errors and its end."""

from __future__ import annotations

import os
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


def test_an_engine_dies_with_its_parent(tmp_path: Path) -> None:
    """The parent is killed outright, so nothing of it can clean up."""
    parent = (
        "import sys, time; from kvpolicy_vllm.bench.engine_process import EngineProcess\n"
        "engine = EngineProcess('tests.vllm.idle_process'); engine.ask({}); print(engine.pid, flush=True)\n"
        "time.sleep(600)"
    )
    paths = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
    process = subprocess.Popen(
        [sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": paths}
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()
    patience = time.monotonic() + 120
    while alive(child) and time.monotonic() < patience:
        time.sleep(0.02)
    assert not alive(child)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
