"""Work in pieces: nothing twice, nothing begun too late, and what fails or is damaged is done again."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import tarfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.check import Checks, cases_of
from benchmarks.gpu.pieces import Begun, Done, Piece, exit_status_of, failure_of, part_of, read_part, run_pieces
from benchmarks.gpu.place import Place, chosen
from benchmarks.gpu.profile import shares_of
from benchmarks.gpu.swap import settings_of
from kvpolicy.errors import EngineFailed

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


def test_another_machine_of_the_same_kind_goes_on_and_its_parts_say_so(tmp_path: Path) -> None:
    work = Work()
    here = HERE | {"driver": "560.1", "python": "3.12.3", "memory_bytes": 5}
    work.run(tmp_path, work.piece("a"), place=here)
    done = work.run(tmp_path, work.piece("a"), work.piece("b"), place=here | {"driver": "570.2", "memory_bytes": 6})
    assert done.whole and "elsewhere" not in done.results["a"]
    assert done.results["b"]["elsewhere"] == {"driver": "570.2", "memory_bytes": 6}
    work.run(tmp_path / "other", work.piece("a"), place=HERE | {"arms": ["x"]})
    with pytest.raises(Begun, match="begun with arms"):
        work.run(tmp_path / "other", work.piece("a"), place=HERE | {"arms": ["y"]})


def test_a_folder_begun_otherwise_ends_a_program_with_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> int:
        raise Begun("out: was begun with something else")

    assert exit_status_of(main) == 2 and "was begun with something else" in capsys.readouterr().out
    assert exit_status_of(lambda: 3) == 3


def test_what_a_piece_takes_may_be_learned_from_earlier_ones(tmp_path: Path) -> None:
    """Asked when its turn comes: it is not begun where that does not fit, and where it does it is."""
    work = Work()
    seen: list[float | None] = [None]
    piece = replace(work.piece("b", thought_s=1.0), learned_s=lambda: seen[0])
    first = work.piece("a")

    def do(left_s: float) -> dict[str, Any]:
        seen[0] = 55.0
        return first.do(left_s)

    assert work.run(tmp_path, replace(first, do=do), piece).left == ("b",)
    seen[0] = 45.0
    assert work.run(tmp_path / "two", first, piece).whole


def test_what_comes_after_every_piece_finds_its_part(tmp_path: Path) -> None:
    work, seen = Work(), []

    def then() -> None:
        seen.append([name for name in "abc" if read_part(tmp_path, name) is not None])

    work.broken = {"b"}
    run_pieces(tmp_path, HERE, [work.piece(name) for name in "abc"], 9, work.said.append, work.clock, then)
    assert seen == [["a"], ["a", "c"]]


@dataclass(frozen=True)
class Named:
    name: str
    seconds: float = 1.0


def only(*asked: str) -> list[str]:
    options = argparse.Namespace(only=list(asked), list=False)
    return [one.name for one in chosen([Named(name) for name in ("plain", "v2-plain", "b16", "b16-4096")], options)]


def test_pieces_are_chosen_by_their_names_or_how_they_begin() -> None:
    assert only("plain") == ["plain"]
    assert only("b16") == ["b16"] and only("b16*") == ["b16", "b16-4096"]
    assert only() == ["plain", "v2-plain", "b16", "b16-4096"]
    for wrong in (["lain"], ["plain", "b32"], ["b32*"]):
        with pytest.raises(SystemExit, match="no such piece"):
            only(*wrong)


FAKE_PYTHON = """#!/usr/bin/env bash
shift; what=${1#benchmarks.gpu.}; mkdir -p out/gpu/$what/unfinished out/gpu/$what/llm
echo "$@" >> out/gpu/$what/asked; echo half > out/gpu/$what/unfinished/half
echo weights > out/gpu/$what/llm/model.safetensors; echo '{}' > out/gpu/$what/llm/config.json
until [ -e "${FAKE_UNTIL:-.}" ]; do sleep 0.1; done
[ $what != swap ]
"""


def began(where: Path, results: Path, *steps: str, minutes: str = "9", **more: str) -> subprocess.Popen[str]:
    where.mkdir(exist_ok=True)
    python = where / "python"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    script = Path(__file__).parents[1] / "tools" / "gpu_session.sh"
    return subprocess.Popen(
        ["bash", str(script), str(results), *steps],
        cwd=where,
        env=os.environ | {"PYTHON": str(python), "MINUTES": minutes} | more,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def session(where: Path, results: Path, *steps: str, **more: str) -> subprocess.CompletedProcess[str]:
    running = began(where, results, *steps, **more)
    out, err = running.communicate(timeout=300)
    return subprocess.CompletedProcess(steps, running.returncode, out, err)


def packed(results: Path) -> list[str]:
    with tarfile.open(results / "gpu-results.tar.gz") as archive:
        return archive.getnames()


def test_a_session_goes_on_elsewhere(tmp_path: Path) -> None:
    """What is there is packed although a step fails, half a piece is not, and another machine takes it up."""
    first = session(tmp_path / "one", tmp_path / "results", "check-first", "swap")
    assert first.returncode == 1 and "== swap ended with 1" in first.stdout
    second = session(tmp_path / "two", tmp_path / "results", "check")
    assert second.returncode == 0, second.stderr
    asked = (tmp_path / "two" / "out" / "gpu" / "check" / "asked").read_text().splitlines()
    assert len(asked) == 2 and "--only v2-plain" in asked[0] and "--minutes " in asked[1]
    assert (tmp_path / "two" / "out" / "gpu" / "swap" / "asked").exists()
    assert not (tmp_path / "two" / "out" / "gpu" / "swap" / "unfinished").exists()


def test_a_model_that_came_without_its_weights_is_made_anew(tmp_path: Path) -> None:
    """Packed on one machine, unpacked on another: weights stay behind, and a configuration alone is no model."""
    one, two = tmp_path / "one", tmp_path / "two"
    out = Path("out") / "gpu" / "check"
    Checks(one / out, place("cpu", "tiny"), 0).model()
    weights = (one / out / "llm" / "model.safetensors").read_bytes()
    assert session(one, tmp_path / "results", "swap").returncode == 1
    assert session(two, tmp_path / "results", "swap").returncode == 1
    assert (two / out / "llm" / "config.json").exists() and not list((two / out / "llm").glob("*.safetensors"))
    Checks(two / out, place("cpu", "tiny"), 0).model()
    assert (two / out / "llm" / "model.safetensors").read_bytes() == weights


def test_a_session_packs_while_a_step_runs(tmp_path: Path) -> None:
    """The machine may be taken away in the middle of a step, without a word to anybody."""
    results, end = tmp_path / "results", tmp_path / "end"
    running = began(tmp_path / "one", results, "check", PACK_S="0.1", FAKE_UNTIL=str(end))
    try:
        patience = time.monotonic() + 120
        while not ((results / "gpu-results.tar.gz").exists() and "out/gpu/check/asked" in packed(results)):
            assert time.monotonic() < patience, "nothing was packed"
            time.sleep(0.1)
        assert running.poll() is None
    finally:
        end.touch()
        running.communicate(timeout=300)


def test_a_program_is_told_to_end_before_it_is_ended(tmp_path: Path) -> None:
    """A minute of the step's time is for its start and its end; a step that has less than that to work is not begun."""
    assert session(tmp_path / "one", tmp_path / "results", "check", minutes="9").returncode == 0
    told = (tmp_path / "one" / "out" / "gpu" / "check" / "asked").read_text().split("--minutes ")[1]
    assert 7.5 < float(told) <= 8.0
    assert session(tmp_path / "two", tmp_path / "other", "check", minutes="1.9").returncode == 3


@pytest.mark.parametrize("minutes", ["0", "0.7"])
def test_a_session_begins_no_step_without_time(tmp_path: Path, minutes: str) -> None:
    done = session(tmp_path / "one", tmp_path / "results", "check", minutes=minutes)
    assert done.returncode == 3 and "check: no time left" in done.stdout and not done.stderr
    assert session(tmp_path / "one", tmp_path / "results", "chek").returncode == 2
    assert session(tmp_path / "one", tmp_path / "results", "check", minutes="nine").returncode == 2


def test_a_damaged_archive_is_left_as_it_is(tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    (results / "gpu-results.tar.gz").write_bytes(b"half of it")
    done = session(tmp_path / "one", results, "check")
    assert done.returncode == 2 and "is damaged" in done.stdout
    assert (results / "gpu-results.tar.gz").read_bytes() == b"half of it"


def test_the_first_steps_name_pieces_that_there_are() -> None:
    """Whole names, and few enough for one call."""
    script = (Path(__file__).parents[1] / "tools" / "gpu_session.sh").read_text()
    there = place("NVIDIA H200", "full")
    plans: dict[str, list[Any]] = {
        "check": list(cases_of(False)),
        "swap": list(settings_of(there)),
        "profile": list(shares_of(there)),
    }
    for what, plan in plans.items():
        line = next(line for line in script.splitlines() if line.strip().startswith(f"{what}-first)"))
        asked = re.findall(r"--only ([^ \"]+)", line)
        assert asked and set(asked) <= {one.name for one in plan}
