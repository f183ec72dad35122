"""Engines that are killed while they write files of KV, and two of them in one folder: every token is unmodified
vLLM's, and nothing half-written stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.tiers.blocks import files_of
from tests.vllm import harness, test_file_index
from tests.vllm.test_file_index import CONVERSATIONS, FLEETING, POLICIES, Servers, counted

pytestmark = pytest.mark.feature("prompts in files, beyond restarts")
first, second, stock = test_file_index.first, test_file_index.second, test_file_index.stock
QUICK = "cost"
"""The caching policy by which faults of files are tested each time; the others take their time with the slow tests."""
PATIENCE_S = 1200.0
"""Whatever is waited for comes much sooner, except on a machine that is busy with something else."""


def mostly_slow(names: Iterable[str]) -> list[Any]:
    """Parameters for caching policies: tests of all but :data:`QUICK` are slow."""
    return [pytest.param(name, marks=() if name == QUICK else pytest.mark.slow) for name in names]


@pytest.fixture
def servers(model: str, stock: dict[str, Any], tmp_path: Path) -> Servers:
    return Servers(model, tmp_path, stock)


@contextmanager
def engine(
    work: dict[str, Any], folder: Path
) -> Iterator[tuple[subprocess.Popen[bytes], Callable[[], dict[str, Any]]]]:
    """An engine that serves meanwhile, and what it comes to, for which that waits. It is killed at the end."""
    folder.mkdir()
    (folder / "job").write_text(json.dumps(work))
    command = [sys.executable, "-m", "tests.vllm.engine_process", str(folder / "job"), str(folder / "result")]
    with (folder / "output").open("wb") as sink:
        process = subprocess.Popen(
            command, env=harness.environment(), cwd=harness.ROOT, stdout=sink, stderr=sink, start_new_session=True
        )

    def result() -> dict[str, Any]:
        status = process.wait(timeout=PATIENCE_S)
        assert status == 0, (folder / "output").read_text()[-4000:]
        return dict(json.loads((folder / "result").read_text()))

    try:
        yield process, result
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_until(true: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < until, "it does not come about"
        time.sleep(0.001)


def half_written(files: Path) -> list[Path]:
    return [*files.rglob("writing/*")]


@pytest.mark.parametrize("cache", mostly_slow(POLICIES))
def test_an_engine_that_is_killed_while_it_writes(
    servers: Servers, first: list[dict[str, Any]], second: list[dict[str, Any]], cache: str, tmp_path: Path
) -> None:
    """The next one finds what was whole, and nothing of the rest stays. What it asks for is in files before others
    come, and while theirs goes there, too, the first one is killed; it does not end before."""
    others = harness.prompts(3 * CONVERSATIONS, (180, 300), (40, 90), seed=8)
    stored, never = tmp_path / "stored", tmp_path / "never"
    work = servers.job([*first, *others], **FLEETING | POLICIES[cache]) | {
        "waves": [[*range(at, at + CONVERSATIONS)] for at in range(0, 4 * CONVERSATIONS, CONVERSATIONS)],
        "only_files": True, "stops": {"1": {"says": str(stored)}, "4": {"awaits": str(never)}},
    }  # fmt: skip
    with engine(work, tmp_path / "killed") as (process, _):
        wait_until(lambda: process.poll() is not None or stored.exists())
        before = len(files_of(servers.files))
        wait_until(lambda: process.poll() is not None or len(files_of(servers.files)) > before + 5)
        assert process.poll() is None, "it was to be killed while it serves"
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    there = len(files_of(servers.files))
    assert there > before > 20
    after = servers.serve("second", second, **POLICIES[cache])
    assert counted(after, "loaded") > 0 and counted(after, "load_failed") == 0
    assert not half_written(servers.files) and len(files_of(servers.files)) >= there
    assert [path.name for path in servers.files.glob("*/*")] == ["0"]


@pytest.mark.parametrize("cache", mostly_slow(POLICIES))
def test_two_engines_in_one_folder(
    servers: Servers, first: list[dict[str, Any]], second: list[dict[str, Any]], cache: str, tmp_path: Path
) -> None:
    """Each has files of its own there. Neither begins to serve before both are there, nor looks at what is half-written
    before both have served."""
    there, go = [tmp_path / "a is there", tmp_path / "b is there"], tmp_path / "go"
    served, end = [tmp_path / "a has served", tmp_path / "b has served"], tmp_path / "end"
    stops = [
        {"0": {"says": str(here), "awaits": str(go)}, "1": {"says": str(over), "awaits": str(end)}}
        for here, over in zip(there, served, strict=True)
    ]
    works = [
        servers.job(requests, **POLICIES[cache]) | {"stops": stop}
        for requests, stop in zip((first, second), stops, strict=True)
    ]
    with engine(works[0], tmp_path / "a") as (a, one), engine(works[1], tmp_path / "b") as (b, two):
        wait_until(lambda: all(map(Path.exists, there)) or a.poll() is not None or b.poll() is not None)
        go.touch()
        wait_until(lambda: all(map(Path.exists, served)) or a.poll() is not None or b.poll() is not None)
        end.touch()
        stats = [servers.judged("first", one()), servers.judged("second", two())]
    for each in stats:
        assert counted(each, "stored") > 10 and counted(each, "store_failed") == 0
    assert sorted(path.name for path in servers.files.glob("*/*")) == ["0", "1"]
    assert not servers.half_written and not half_written(servers.files)
