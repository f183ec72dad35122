"""A warm process imports once and does each job in a process of its own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.warm import Warm


@pytest.fixture
def warm() -> Iterator[Warm]:
    made = Warm("tests.warm_jobs")
    yield made
    made.end()


def run(warm: Warm, folder: Path, what: str, given: str = "", timeout_s: float = 300.0) -> int:
    return warm.run([what, str(folder / given)], {**os.environ, "GIVEN": given}, folder / "output", timeout_s)


def test_each_job_has_a_process_and_an_environment_of_its_own(warm: Warm, tmp_path: Path) -> None:
    assert [run(warm, tmp_path, "write", given) for given in ("one", "other")] == [0, 0]
    (one, first, parent), (other, second, same) = ((tmp_path / name).read_text().split() for name in ("one", "other"))
    assert (one, other) == ("one", "other") and first != second and parent == same
    assert (tmp_path / "output").read_text().count("ended as an interpreter does") == 1


def test_a_job_that_fails_says_so_and_the_next_one_runs(warm: Warm, tmp_path: Path) -> None:
    assert run(warm, tmp_path, "fail") == 1
    output = (tmp_path / "output").read_text()
    assert "ValueError: made up" in output and "ended as an interpreter does" in output
    assert run(warm, tmp_path, "write", "next") == 0


def test_a_job_that_hangs_is_killed_and_the_next_one_runs(warm: Warm, tmp_path: Path) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run(warm, tmp_path, "hang", timeout_s=0.5)
    assert run(warm, tmp_path, "write", "next") == 0


def test_what_cannot_be_imported_is_named(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"tests\.no_such_jobs"):
        run(Warm("tests.no_such_jobs"), tmp_path, "write")
