"""gpu-overload without a device: what its pieces are of, how hard they overload, and the way to a report."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.geometries import EIGHT_B, TINY
from benchmarks.gpu.overload import (
    CONNECTORS,
    LEARNED,
    NATIVE,
    SHARES,
    SLOWER,
    SWAP,
    ConnectorArm,
    Overload,
    policies_of,
    report,
)
from benchmarks.gpu.overload_summary import SIMPLE
from benchmarks.gpu.pieces import part_of, run_pieces, write_json
from benchmarks.gpu.place import Place
from kvpolicy.policy import load
from kvpolicy.simulator import Builtin, ConstantTimes, Server
from kvpolicy_vllm.bench.overload import STOCK, Run


def place(device: str, scale: str) -> Place:
    return Place(device, None, None, None, None, "2.11.0", "0.24.0", "3.12.0", scale)


def overload(out: Path, policies: dict[str, str], device: str = "NVIDIA H200") -> Overload:
    arms: Any = None
    return Overload(out, place(device, "full"), 0, policies, [STOCK, *policies], arms)


def test_a_model_that_was_trained_anew_makes_other_pieces(tmp_path: Path) -> None:
    """The arm keeps its name and the folder its path; what was measured with the model before is left alone."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.json").write_text("1")

    def names(spec: str) -> list[str]:
        return [piece.name for piece in overload(tmp_path, {LEARNED: spec}).pieces()]

    first, again, analytic = names(f"cheapest:{model}"), names(f"cheapest:{model}"), names("cheapest:analytic")
    (model / "model.json").write_text("2")
    anew = names(f"cheapest:{model}")
    assert first == again and first[0] == anew[0] == analytic[0], "the targets are stock vLLM's"
    assert not set(first[1:]) & set(anew[1:]) and not set(first[1:]) & set(analytic[1:])
    moved = tmp_path / "elsewhere" / "model"
    shutil.copytree(model, moved)
    assert names(f"cheapest:{moved}") == anew


def test_an_arm_that_no_engine_could_start_with_is_left_out(tmp_path: Path) -> None:
    """All our arms share an engine: one policy that cannot be made would take the others with it."""
    events: list[str] = []
    h200 = policies_of(place("NVIDIA H200", "full"), tmp_path, EIGHT_B, events.append)
    assert h200 == {SWAP: SWAP, LEARNED: "cheapest:analytic"}
    assert policies_of(place("cpu", "tiny"), tmp_path, TINY, events.append) == {SWAP: SWAP}
    assert "no hardware sheet for device 'cpu'" in events[1]


def test_every_cell_overloads_but_the_control(tmp_path: Path) -> None:
    """By the built-in simulator, whatever a step takes: memory and lengths alone decide who is preempted."""
    work = overload(tmp_path, {SWAP: SWAP})
    scale = work.scale
    for share in SHARES[:2]:
        for block in range(scale.blocks):
            server = Server(
                scale.block_size, scale.block_size * scale.geometry.kv_token_bytes, work.device_blocks(share) - 1,
                0, scale.step_tokens, scale.running, scale.context_tokens,
            )  # fmt: skip
            run = Builtin(wall=lambda: 0.0).run(
                work.workload(block, share), load("always-recompute"), server, ConstantTimes()
            )
            assert sum(run.summary.preemptions.values()) >= 10, (share, block)
    assert max(request.output_tokens for block in range(6) for request in work.workload(block).requests) < 2048


class PretendedArms:
    """Engines that serve at once: an arm's speed is its name's length."""

    names: tuple[str, ...] = ()

    def start(self, *arms: Any) -> None:
        self.names = (*self.names, *(arm.name for arm in arms))

    def serve(self, name: str, workload: Any, block: int, device_blocks: int) -> Run:
        requests = len(workload.requests)
        times: Any = ((0.5,) * requests, ((0.01, 0.02),) * requests, ((1, 2, 3),) * requests, ())
        return Run(name, block, float(len(name)), *times, {"swap": 1, "recompute": 2}, 3, 4)


def test_an_overload_goes_from_its_targets_to_a_report(tmp_path: Path) -> None:
    """All but the engines: parts, what later pieces learn, and ratios of this plan's pieces alone."""
    arms: Any = PretendedArms()
    there = place("cpu", "tiny")
    work = Overload(tmp_path, there, 0, {SWAP: SWAP}, [STOCK, SWAP], arms)
    pieces = work.pieces()
    write_json(part_of(tmp_path, "limit25-block0-other"), {"share": 0.25, "arms": {}})
    done = run_pieces(tmp_path, there.to_dict(), pieces, 9.0, lambda line: None)
    assert done.whole and pieces[1].expected_s == 2 * SLOWER * len(STOCK)
    text_report = report(tmp_path, there, done, pieces, 0)
    assert set(text_report["limits"]) == {"0.25", "0.15", "0.33"} and text_report["targets"]["makespan_s"] == len(STOCK)
    ratio = text_report["limits"]["0.25"]["ratios"][f"throughput_tok_s {STOCK} / {SWAP}"]
    assert ratio["value"] == pytest.approx(len(SWAP) / len(STOCK)) and ratio["low"] is None and ratio["blocks"] == 2


def test_what_a_cell_takes_is_learned_from_the_targets(tmp_path: Path) -> None:
    work = overload(tmp_path, {SWAP: SWAP})
    targets, cell = work.pieces()[:2]
    assert cell.expected_s == 2 * work.scale.serve_s
    write_json(part_of(tmp_path, targets.name), {"makespan_s": 40.0})
    assert cell.expected_s == 2 * SLOWER * 40.0


def test_the_offloading_connector_keeps_what_was_decoded_too() -> None:
    def extra(name: str) -> dict[str, Any]:
        part = ConnectorArm(name, None, None, 1.0, 0, 9, CONNECTORS[name]).arguments()["kv_transfer_config"]
        return dict(part["kv_connector_extra_config"])

    assert extra(NATIVE) == {"cpu_bytes_to_use": 1 << 30, "offload_prompt_only": False}
    assert extra(SIMPLE) == {"cpu_bytes_to_use": 1 << 30}
