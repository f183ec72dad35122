"""The GPU harness on whatever engine is here, at its smallest scale, and what it plans and sums up."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import copiers, leftovers, pagelock
from benchmarks.gpu.check import REFERENCE, Case, Checks, cases_of, faults, page_locking, widest_gap
from benchmarks.gpu.geometries import write_model
from benchmarks.gpu.intervals import interval_text, ratio_of
from benchmarks.gpu.overload_summary import TARGETS, goodput, summary_of
from benchmarks.gpu.pieces import Done
from benchmarks.gpu.place import Place
from benchmarks.gpu.profile import PIECE_S, TRAINING_S, shares_of, status_of
from benchmarks.gpu.swap import settings_of
from kvpolicy_vllm.bench.profile_parts import Rig
from kvpolicy_vllm.plugin.messages import Job
from tests.plugin.copiers.segments import made_segments
from tests.vllm.harness import ROOT, environment


def place(device: str, scale: str) -> Place:
    return Place(device, None, None, None, None, "2.11.0", "0.24.0", "3.12.0", scale)


@pytest.mark.parametrize("there", [place("cpu", "tiny"), place("cpu", "full"), place("NVIDIA H200", "full")])
def test_every_plan_names_its_pieces_apart_and_the_most_telling_first(there: Place) -> None:
    plans: list[list[Any]] = [list(shares_of(there)), list(settings_of(there)), list(cases_of(there.on_cpu))]
    for plan in plans:
        names = [piece.name for piece in plan]
        assert len(set(names)) == len(names)
    assert plans[2][0].name == REFERENCE and plans[2][0].memory_enough
    if not there.on_cpu:
        assert [piece.name for piece in plans[0][:2]] == ["llama-8b-b16-pass0", "llama-8b-b64-pass0"]
        assert {case.runner for case in plans[2]} == {None, "v1", "v2"}


def test_the_clearest_difference_is_reported() -> None:
    reference = {"tokens": [[1, 2, 3], [4, 5, 6], [7, 8]], "gaps": [[1.0, 0.2, 9.0], [1.0, 0.5, 1.0], [1.0, 1.0]]}
    assert widest_gap(reference, [[1, 9, 9], [4, 9, 9], [7, 8]]) == 0.5
    assert widest_gap(reference, reference["tokens"]) == 0.0


def cell(share: float, block: int, makespans: dict[str, float]) -> dict[str, Any]:
    def run(makespan_s: float) -> dict[str, Any]:
        return {
            "makespan_s": makespan_s, "output_tokens": 100, "ttft_s": [0.5, 2.0], "mean_itl_s": [0.01, 0.01],
            "itl_p99_s": 0.02, "preemptions": {"swap": 1, "recompute": 2}, "recomputed_tokens": 7, "moved_bytes": 5,
        }  # fmt: skip

    arms = {name: run(makespan_s) for name, makespan_s in makespans.items()}
    return {"share": share, "block": block, "device_blocks": 10, "arms": arms, "policies": {"learned": "a"}}


def test_overload_is_summed_up_by_limit() -> None:
    targets = {"ttft_s": 1.0, "itl_s": 0.1}
    results = {TARGETS: targets, "x": cell(0.4, 0, {"vllm": 4.0, "learned": 2.0})}
    results["y"] = cell(0.4, 1, {"learned": 4.0, "vllm": 8.0})
    part = summary_of(results, seed=0)["0.4"]
    assert part["blocks"] == 2
    assert part["ratios"]["throughput_tok_s learned / vllm"]["value"] == pytest.approx(2.0)
    assert part["arms"]["vllm"]["recomputed_tokens"] == 14 and part["arms"]["vllm"]["moved_bytes"] == 10
    assert goodput(results["x"]["arms"]["vllm"], targets) == pytest.approx(1 / 4.0)


def test_no_interval_over_a_few_blocks() -> None:
    """Over two blocks a bootstrap goes from the least to the greatest: that is no 95%."""
    above = [2.0, 2.2, 1.9, 2.1, 2.3]
    few = ratio_of(above[:4], [1.0] * 4, random.Random(0))
    assert few["low"] is few["high"] is None and few["value"] == pytest.approx(math.prod(above[:4]) ** 0.25)
    assert interval_text(few) == "too few: 4 of at least 5"
    enough = ratio_of(above, [1.0] * 5, random.Random(0))
    assert 1.9 <= enough["low"] < enough["value"] < enough["high"] <= 2.3


def test_runs_of_different_policies_are_never_put_together() -> None:
    results = {TARGETS: {"ttft_s": 1.0, "itl_s": 0.1}, "x": cell(0.4, 0, {"vllm": 4.0, "learned": 2.0})}
    results["y"] = cell(0.4, 1, {"vllm": 4.0, "learned": 2.0}) | {"policies": {"learned": "b"}}
    with pytest.raises(ValueError, match="different policies"):
        summary_of(results, seed=0)


def test_only_our_own_dead_engines_files_are_removed(tmp_path: Path) -> None:
    """From shared memory: one that a dead engine of ours left, not one in use, nor anybody else's."""
    shared, processes, out = tmp_path / "shm", tmp_path / "proc", tmp_path / "out"
    shared.mkdir()
    for name in ("vllm_offload_dead.mmap", "vllm_offload_alive.mmap", "vllm_offload_theirs.mmap", "else"):
        (shared / name).write_text("")

    def process(pid: int, *names: str) -> Path:
        (processes / str(pid)).mkdir(parents=True)
        lines = [f"7f00-7f01 rw-s 00000000 00:1a 12 {shared / name}\n" for name in names]
        (processes / str(pid) / "maps").write_text("".join(lines) + "7f02-7f03 rw-p 00000000 00:00 0\n")
        return processes / str(pid)

    engine = process(7, "vllm_offload_dead.mmap", "else")
    process(8, "vllm_offload_alive.mmap")
    for pid in (7, 8, 9):
        leftovers.note(out, pid, shared, processes)
    assert leftovers.remove(out, shared, processes) == []
    shutil.rmtree(engine)
    assert leftovers.remove(out, shared, processes) == ["vllm_offload_dead.mmap"]
    assert sorted(path.name for path in shared.iterdir()) == [
        "else", "vllm_offload_alive.mmap", "vllm_offload_theirs.mmap",
    ]  # fmt: skip


def test_page_locking_is_tried_first_and_its_refusal_said() -> None:
    def refuse(owner: object, memory: object) -> None:
        raise RuntimeError("CUDA error 2")

    assert pagelock.try_lock(lambda owner, memory: None) is None
    events: list[str] = []
    assert page_locking(lambda: pagelock.try_lock(refuse), events.append) == "RuntimeError: CUDA error 2"
    assert "PAGE-LOCKING FAILS" in events[0] and "CUDA error 2" in events[0]


def test_digests_do_not_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Block numbers go to a device from page-locked memory; from pageable memory the call would synchronise."""
    pinned: list[list[int]] = []

    def pin_memory(self: torch.Tensor) -> torch.Tensor:
        pinned.append(self.tolist())
        return self

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    segments = [torch.zeros((6, 4), dtype=torch.float32, device="meta")]
    assert copiers.block_digests(segments, (3, 1)).shape == (2,)
    assert pinned == [[3, 1]]
    assert copiers.numbers_on((1, 2), torch.device("cpu")).tolist() == [1, 2] and len(pinned) == 1


def test_the_shipped_copier_has_cases_of_its_own() -> None:
    """Texts alone tell there; where digests are taken, blocks must have come back."""
    shipped = {case.name for there in (True, False) for case in cases_of(there) if case.policy and not case.copier}
    assert shipped == {"plain", "v2-plain", "v1-plain"}
    checks = Checks(Path("nowhere"), place("cpu", "tiny"), 0)
    checks.model = lambda: "model"
    extra = [
        checks.engine(Case("x", copier=copier))["kv_transfer_config"]["kv_connector_extra_config"]
        for copier in (None, "slow")
    ]
    assert "copier" not in extra[0] and extra[1]["copier"] == "benchmarks.gpu.copiers.slow"
    values = {"ties": 0, "tokens": 1, "ties_allowed": 1}
    assert faults(Case("x", copier=None), values, passing() | {"restored_blocks": 0}) == []


@pytest.mark.parametrize(
    ("models", "left", "status"),
    [
        ({"a": {"model": 1}, "b": {"no_model": "x"}}, (), 0), ({"a": {"no_model": "x"}}, (), 1),
        ({"a": {"no_model": "x"}}, ("p",), 1), ({"a": {"model": 1}}, ("p",), 3),
    ],
)  # fmt: skip
def test_a_profile_without_a_model_has_failed(models: dict[str, Any], left: tuple[str, ...], status: int) -> None:
    assert status_of(Done({}, {}, left), {"p": {}}, models) == status
    assert status_of(Done({}, {}, ("p",)), {}, {}) == 3


def test_the_grid_reaches_what_is_said_of_it(tmp_path: Path) -> None:
    """docs/gpu.md says how far; two first pieces fit one call."""
    shares = shares_of(place("NVIDIA H200", "full"))
    events = []
    for share in shares:
        llm = write_model(tmp_path / share.geometry.name, share.geometry, "bfloat16")
        states = Rig(llm, share.extent, None, 0, device=True).job(share.part, tmp_path).states
        lengths = [state.prompt_tokens + state.decoded_tokens for state in states]
        events.append((min(lengths), max(lengths), max(len(state.other_prompts) for state in states)))
    assert events[0] == (78, 24180, 19)
    assert min(low for low, _, _ in events) == 64 and max(others for _, _, others in events) == 19
    assert max(high for _, high, _ in events[:12]) == 31228
    assert [high for share, (_, high, _) in zip(shares, events, strict=True) if "long" in share.name] == [41641]
    assert 60 * 9 - 60 - TRAINING_S >= 2 * PIECE_S


def test_an_arm_that_misses_a_block_is_left_out() -> None:
    results = {TARGETS: {"ttft_s": 1.0, "itl_s": 0.1}, "x": cell(0.4, 0, {"vllm": 4.0, "learned": 2.0})}
    results["y"] = cell(0.4, 1, {"vllm": 8.0})
    assert set(summary_of(results, seed=0)["0.4"]["arms"]) == {"vllm"}


def passing() -> dict[str, Any]:
    return {
        "blocks_in_use": 0, "host_slots_used": 0, "open_preemptions": 0, "restored_blocks": 9, "different_blocks": 0,
        "preemptions": 4, "stats": {"preemptions|executed=swap|cause=memory": 2, "preemptions|executed=recompute": 2},
    }  # fmt: skip


def harness(what: str, out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"benchmarks.gpu.{what}", "--out", str(out), "--scale", "tiny", *arguments]
    return subprocess.run(command, env=os.environ | environment(), cwd=ROOT, capture_output=True, text=True)


def test_gpu_check_passes_here(tmp_path: Path) -> None:
    """Blocks that come back late and bit for bit, texts as with memory enough, and nothing left behind."""
    done = harness("check", tmp_path / "check", "--only", "slow")
    assert done.returncode == 0, done.stdout + done.stderr
    values = json.loads((tmp_path / "check" / "check.json").read_text())
    assert values["passed"] == ["reference", "slow"] and not values["failed"]
    part = json.loads((tmp_path / "check" / "parts" / "slow.json").read_text())
    assert part["served"]["restored_blocks"] > 0 == part["served"]["different_blocks"]
    assert "TINY SCALE" in done.stdout or torch.cuda.is_available()


def test_gpu_swap_ends_here(tmp_path: Path) -> None:
    done = harness("swap", tmp_path / "swap", "--only", "b16*", "--turns", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    values = json.loads((tmp_path / "swap" / "swap.json").read_text())
    assert {piece["block_size"] for piece in values["pieces"].values()} == {16}
    for piece in values["pieces"].values():
        for row in piece["rows"]:
            assert row["gb_per_s"] > 0
            assert row["way"] == "large" or (row["of_large"]["low"] is None and row["of_large"]["value"] > 0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"blocks_in_use": 3}, "3 device blocks leaked"),
        ({"host_slots_used": 1}, "1 host slots leaked"),
        ({"open_preemptions": 1}, "1 preemptions stay open"),
        ({"different_blocks": 2}, "2 of 9 blocks came back different"),
        ({"restored_blocks": 0}, "no block came back"),
        ({"stats": {"preemptions|executed=swap": 4}}, "0 preemptions by recompute"),
        ({"stats": passing()["stats"] | {"fallbacks|reason=load_failed": 2}}, "2 loads failed"),
    ],
)
def test_a_case_fails_for_whatever_is_wrong(change: dict[str, Any], said: str) -> None:
    case = next(case for case in cases_of(True) if case.name == "prefix")
    assert faults(case, {"ties": 0, "tokens": 1, "ties_allowed": 1}, passing()) == []
    (wrong,) = faults(case, {"ties": 0, "tokens": 1, "ties_allowed": 1}, passing() | change)
    assert said in wrong


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_digests_know_blocks_apart(dtype: torch.dtype) -> None:
    """Equal bits elsewhere give the same number; one bit, another place or another layer another one."""
    segments = made_segments((dtype, dtype), blocks=6)
    for segment in segments:
        segment[1] = segment[0]
    first, same, other = copiers.block_digests(segments, (0, 1, 2))
    assert first == same != other
    segments[0].view(torch.int16)[1, 5] ^= 1
    assert copiers.block_digests(segments, (1,)) != first
    segments[0][1] = segments[0][0].flip(0)
    assert copiers.block_digests(segments, (1,)) != first
    segments[0][1], segments[1][1] = segments[1][0].clone(), segments[0][0].clone()
    assert copiers.block_digests(segments, (1,)) != first


def test_a_digesting_copier_finds_what_was_changed_on_the_way() -> None:
    segments = made_segments((torch.bfloat16,))
    copier: Any = copiers.staged_digesting(segments, 8, False, None)
    job = Job(1, "r", (3, 4), (0, 1))
    copier.save(job)
    copier.load(job)
    copier.poll()
    assert copier.told() == {"restored_blocks": 2, "different_blocks": 0}
    copier.arena[1, 7] ^= 1
    copier.load(job)
    copier.poll()
    assert copier.told() == {"restored_blocks": 4, "different_blocks": 1}


def test_a_part_of_a_copy_is_held_against_its_own_part() -> None:
    """What is still in the prefix cache does not come back, and what does goes to other blocks."""
    segments = made_segments((torch.bfloat16,))
    copier: Any = copiers.digesting(segments, 8, False, None)
    copier.save(Job(1, "r", (3, 4, 5), (0, 1, 2)))
    copier.load(Job(1, "r", (9,), (2,)))
    copier.load(Job(1, "r", (7, 8), (1, 2)))
    copier.poll()
    assert copier.told() == {"restored_blocks": 3, "different_blocks": 0}
