"""Work in pieces: nothing twice, nothing begun too late, and what fails or is damaged is done again."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.pieces import Begun, Done, Piece, failure_of, part_of, read_part, run_pieces
from benchmarks.gpu.place import Place
from kvpolicy_vllm.bench.engine import EngineFailed

HERE = {"device": "cpu", "vllm": "0.24.0"}


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Work:
    """Pieces that take time by the clock, and count how often they were done."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.done: list[str] = []
        self.said: list[str] = []
        self.broken: set[str] = set()

    def piece(self, name: str, takes_s: float = 10.0, thought_s: float = 10.0) -> Piece:
        def do(left_s: float) -> dict[str, Any]:
            self.clock.now_s += takes_s
            self.done.append(name)
            if name in self.broken:
                raise EngineFailed(f"{name} is broken")
            return {"name": name, "left_s": left_s}

        return Piece(name, thought_s, do)

    def run(self, out: Path, *pieces: Piece, minutes: float = 1.0, place: dict[str, Any] | None = None) -> Done:
        return run_pieces(out, place or HERE, pieces, minutes, self.said.append, self.clock)


def test_what_is_done_is_not_done_again(tmp_path: Path) -> None:
    work = Work()
    pieces = [work.piece(name) for name in "abc"]
    assert work.run(tmp_path, *pieces[:2]).whole
    again = work.run(tmp_path, *pieces)
    assert work.done == ["a", "b", "c"]
    assert again.results["a"] == {"name": "a", "left_s": 60.0}
    assert any("a: there already" in line for line in work.said)


def test_nothing_is_begun_that_does_not_fit(tmp_path: Path) -> None:
    work = Work()
    done = work.run(tmp_path, work.piece("a", 25), work.piece("b", 25), work.piece("c"), work.piece("d"), minutes=0.9)
    assert work.done == ["a", "b"] and done.left == ("c", "d") and not done.whole
    assert work.run(tmp_path, *(work.piece(name) for name in "abcd")).whole


def test_a_short_piece_still_fits_behind_a_long_one(tmp_path: Path) -> None:
    work = Work()
    done = work.run(tmp_path, work.piece("a", 30), work.piece("b", 10, thought_s=40), work.piece("c"))
    assert work.done == ["a", "c"] and done.left == ("b",)


def test_the_first_piece_is_always_begun(tmp_path: Path) -> None:
    """Otherwise one that is thought to take longer than the limit would never be."""
    work = Work()
    assert work.run(tmp_path, work.piece("a", 10, thought_s=1000)).whole


def test_a_failure_is_told_and_tried_again_and_stops_nobody(tmp_path: Path) -> None:
    work = Work()
    work.broken = {"a"}
    done = work.run(tmp_path, work.piece("a"), work.piece("b"))
    assert set(done.results) == {"b"} and "EngineFailed: a is broken" in done.failed["a"]
    assert failure_of(tmp_path, "a").exists() and not part_of(tmp_path, "a").exists()
    work.broken = set()
    assert work.run(tmp_path, work.piece("a"), work.piece("b")).whole
    assert work.done == ["a", "b", "a"] and not failure_of(tmp_path, "a").exists()


@pytest.mark.parametrize("damage", [b"", b'{"name": "a"', b"[1]", b"\xff\xfe"])
def test_a_damaged_part_is_done_again(tmp_path: Path, damage: bytes) -> None:
    work = Work()
    work.run(tmp_path, work.piece("a"))
    part_of(tmp_path, "a").write_bytes(damage)
    assert read_part(tmp_path, "a") is None
    assert work.run(tmp_path, work.piece("a")).whole
    assert work.done == ["a", "a"]


def test_a_part_is_whole_or_not_there(tmp_path: Path) -> None:
    """Cut off in the middle of a piece: the next run finds what was finished before, and nothing of the piece."""
    work = Work()

    def interrupted(left_s: float) -> dict[str, Any]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work.run(tmp_path, work.piece("a"), Piece("b", 1.0, interrupted))
    assert read_part(tmp_path, "a") is not None and read_part(tmp_path, "b") is None
    assert work.run(tmp_path, work.piece("a"), work.piece("b")).whole
    assert work.done == ["a", "b"]


def test_what_hangs_is_ended(tmp_path: Path) -> None:
    """And stops nobody else: an engine that never answers is waited for in a read."""
    work = Work()

    def hang(left_s: float) -> dict[str, Any]:
        read, write = os.pipe()
        try:
            os.read(read, 1)
        finally:
            os.close(read)
            os.close(write)
        return {}

    done = work.run(tmp_path, Piece("a", -19.9, hang), work.piece("b"))
    assert "TimeoutError: it was ended after 0 s" in done.failed["a"]
    assert set(done.results) == {"b"}


def test_parts_of_two_places_are_not_mixed(tmp_path: Path) -> None:
    work = Work()
    work.run(tmp_path, work.piece("a"))
    with pytest.raises(Begun, match=r"begun with vllm '0\.24\.0', here it is '0\.32\.0'"):
        work.run(tmp_path, work.piece("a"), place=HERE | {"vllm": "0.32.0"})


def test_names_are_not_shared(tmp_path: Path) -> None:
    work = Work()
    with pytest.raises(ValueError, match="share a name: a"):
        work.run(tmp_path, work.piece("a"), work.piece("a"))


def place(device: str, scale: str) -> Place:
    return Place(device, None, None, None, None, "2.11.0", "0.24.0", "3.12.0", scale)


@pytest.mark.parametrize(
    ("device", "name"),
    [("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA A100-SXM4-80GB", "a100"), ("cpu", "cpu")],
)
def test_a_device_has_a_short_name(device: str, name: str) -> None:
    assert place(device, "full").short_name == name
    assert place(device, "tiny").short_name == f"{name}-tiny"


FAKE_PYTHON = """#!/usr/bin/env bash
shift; what=${1#benchmarks.gpu.}; mkdir -p out/gpu/$what/unfinished
echo "$@" >> out/gpu/$what/asked; echo half > out/gpu/$what/unfinished/half
[ $what != swap ]
"""


def session(where: Path, results: Path, *steps: str, minutes: str = "9") -> subprocess.CompletedProcess[str]:
    where.mkdir(exist_ok=True)
    python = where / "python"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    script = Path(__file__).parents[1] / "tools" / "gpu_session.sh"
    return subprocess.run(
        ["bash", str(script), str(results), *steps],
        cwd=where,
        env=os.environ | {"PYTHON": str(python), "MINUTES": minutes},
        capture_output=True,
        text=True,
    )


def test_a_session_goes_on_elsewhere(tmp_path: Path) -> None:
    """What is there is packed although a step fails, half a piece is not, and another machine takes it up."""
    first = session(tmp_path / "one", tmp_path / "results", "check-first", "swap")
    assert first.returncode == 1 and "== swap ended with 1" in first.stdout
    second = session(tmp_path / "two", tmp_path / "results", "check")
    assert second.returncode == 0, second.stderr
    asked = (tmp_path / "two" / "out" / "gpu" / "check" / "asked").read_text().splitlines()
    assert len(asked) == 2 and "--only plain" in asked[0] and "--minutes " in asked[1]
    assert (tmp_path / "two" / "out" / "gpu" / "swap" / "asked").exists()
    assert not (tmp_path / "two" / "out" / "gpu" / "swap" / "unfinished").exists()


def test_a_session_begins_no_step_without_time(tmp_path: Path) -> None:
    done = session(tmp_path / "one", tmp_path / "results", "check", minutes="0")
    assert done.returncode == 3 and "check: no time left" in done.stdout
    assert session(tmp_path / "one", tmp_path / "results", "chek").returncode == 2
