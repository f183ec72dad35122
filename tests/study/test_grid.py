"""The command's whole way on small workloads: grid, figures, cache, traces, failures."""

from __future__ import annotations

import json
from dataclasses import astuple
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

import kvpolicy
from kvpolicy import cost
from kvpolicy.study import grid, run_cell
from kvpolicy.study.cell import Cell
from kvpolicy.study.config import Serving, usual_limits
from kvpolicy.study.report import SweepReport, server_words
from kvpolicy.trace import read
from tests.study.conftest import CONFIG, grouped
from tests.synthetic import options_for, situation

WORKLOAD = "azure-conversation-2023?n=30&context=1024"
POLICIES = ("always-recompute", "always-swap", "threshold:512")
TIGHT = 200
"""Blocks of 16 tokens: three of the longest requests."""


def simulate(hardware: str, cache: Path, **more: Any) -> SweepReport:
    given: dict[str, Any] = {"workloads": [WORKLOAD], "policies": POLICIES, "kv_blocks": [TIGHT], "jobs": 0}
    return kvpolicy.simulate(hardware=hardware, **grouped(cache=cache, **(given | more)))


def test_a_grid_has_all_its_cells(hardware: str, tmp_path: Path) -> None:
    report = simulate(hardware, tmp_path / "c", kv_blocks=[TIGHT, 4000], links=["native", "1e8,0.001"], seeds=2)
    assert report.ok and len(report.results) == 3 * 2 * 2 * 2
    for one in report.results:
        given, done = one["inputs"], one["preemptions"]
        assert one["requests"] == 30
        assert set(one["e2e_s"]) == set(one["ttft_s"]) == set(one["itl_s"]) == {"mean", "p50", "p99"}
        assert one["throughput_tok_s"] > 0 and one["makespan_s"] > 0
        if given["kv_blocks"] == 4000:
            assert not any(done.values()) and not one["recomputed_tokens"] and not one["moved_bytes"]
        elif given["policy"] == "always-recompute":
            assert done["recompute"] > 0 and not done["swap"] and not one["moved_bytes"]
        elif given["policy"] == "always-swap":
            assert done["swap"] > 0 and one["moved_bytes"] > 0
    slow, fast = (
        [one["makespan_s"] for one in report.results if (one["inputs"]["link"], one["inputs"]["policy"]) == key]
        for key in (("1e8,0.001", "always-swap"), ("native", "always-swap"))
    )
    assert sum(slow) > sum(fast), "copies behind a slow link take longer"


def test_policies_meet_the_same_requests(hardware: str, tmp_path: Path) -> None:
    report = simulate(hardware, tmp_path / "c", kv_blocks=[4000], seeds=2)
    makespans = [one["makespan_s"] for one in report.results]
    assert makespans[0::2] == [makespans[0]] * 3 and makespans[1::2] == [makespans[1]] * 3
    assert makespans[0] != makespans[1], "each seed draws requests of its own"


def test_what_is_finished_is_taken_up(hardware: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = simulate(hardware, tmp_path / "c")
    monkeypatch.setattr(grid, "work", _never)
    again = simulate(hardware, tmp_path / "c")
    assert (first.taken_up, again.taken_up) == (0, 3)
    assert again.results == first.results
    with pytest.raises(AssertionError, match="simulated again"):
        _raise(simulate(hardware, tmp_path / "c", fresh=True))
    with pytest.raises(AssertionError, match="simulated again"):
        _raise(simulate(hardware, tmp_path / "c", host_blocks=7))


def _never(task: Any) -> Any:
    raise AssertionError("simulated again")


def _raise(report: SweepReport) -> None:
    for one in report.failed:
        raise AssertionError(one.error)


def test_a_file_that_changed_is_read_again(hardware: str, tmp_path: Path) -> None:
    file = tmp_path / "w.csv"
    for output, expected in ((30, 0), (30, 1), (31, 0)):
        file.write_text(f"arrival_s,prompt_tokens,output_tokens\n0.0,100,20\n0.5,50,{output}\n")
        assert simulate(hardware, tmp_path / "c", workloads=[str(file)], policies=["always-swap"]).taken_up == expected


def test_a_sweep_that_was_cut_off_goes_on(hardware: str, tmp_path: Path) -> None:
    def cut(done: int, total: int, words: str) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(hardware, tmp_path / "c", progress=cut)
    assert simulate(hardware, tmp_path / "c").taken_up == 2


def test_progress_counts_up_to_all(hardware: str, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    simulate(hardware, tmp_path / "c", progress=lambda done, total, words: told.append((done, total)))
    assert told == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_a_cell_that_fails_is_named_and_the_rest_is_finished(hardware: str, tmp_path: Path) -> None:
    """A workload whose requests cannot fit fails when it runs; a policy that is none, before."""
    policies = ["always-recompute", "no-such-policy"]
    report = simulate(hardware, tmp_path / "c", kv_blocks=[TIGHT, 20], policies=policies)
    assert not report.ok and len(report.results) == 1
    told = report.text()
    assert "kv_blocks 20" in told and "policy no-such-policy" in told
    assert len(report.failed) == 3
    assert {one["inputs"]["kv_blocks"] for one in report.to_dict()["failed"]} == {TIGHT, 20}


def test_what_nobody_had_is_null_and_blank(hardware: str, tmp_path: Path) -> None:
    """Requests of one output token have no time between tokens; a file without requests fails alone, by name."""
    single, empty = tmp_path / "single.csv", tmp_path / "empty.csv"
    single.write_text("arrival_s,prompt_tokens,output_tokens\n0.0,100,1\n0.5,50,1\n")
    empty.write_text("arrival_s,prompt_tokens,output_tokens\n")
    report = simulate(hardware, tmp_path / "c", workloads=[str(single), str(empty)], policies=["always-swap"])
    (one,) = report.results
    assert one["itl_s"] == {"mean": None, "p50": None, "p99": None} and one["e2e_s"]["mean"] > 0
    assert "null" in json.dumps(report.to_dict(), allow_nan=False) and "nan" not in report.text()
    (failed,) = report.failed
    assert "empty.csv" in failed.text() and "no request" in failed.error


def test_nothing_that_can_begin_is_an_error(hardware: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the policies are"):
        simulate(hardware, tmp_path / "c", policies=["no-such-policy"])
    with pytest.raises(ValueError, match=r"hardware 'H100': should be a folder that"):
        simulate("H100", tmp_path / "c")
    with pytest.raises(ValueError, match="no such file"):
        simulate(hardware, tmp_path / "c", workloads=["nowhere.csv"])
    for wrong in (
        {"seeds": 0},
        {"parts": 0},
        {"kv_blocks": [0]},
        {"host_blocks": -1},
        {"scheduling": "lifo"},
        {"watermark": 1.0},
    ):
        with pytest.raises(ValueError, match="should be"):
            simulate(hardware, tmp_path / "c", **wrong)


def test_jobs_below_none_are_refused(hardware: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="jobs is -1, should be 1 or more"):
        simulate(hardware, tmp_path / "c", jobs=-1)


def test_a_copy_moves_pieces_of_the_size_that_was_measured(hardware: str, tmp_path: Path) -> None:
    """Behind a model's own machine nothing of a swap is beyond it; elsewhere a piece is one layer's page."""
    model = "cpu-llama-native"
    given = {"block_size": 32, "workloads": ["azure-conversation-2023?n=10&context=512"], "kv_blocks": [30]}
    (one,) = simulate(model, tmp_path / "c", policies=[f"cheapest:{model}"], **given).results
    assert one["choices"] > 0
    cell = Cell(WORKLOAD, "always-swap", 30, "native", 0, model, serving=Serving(block_size=32))
    server = run_cell.server_of(cell, run_cell.machine_of(cell))
    assert server.segment_bytes == 65536
    trained = run_cell.machine_of(cell).model_loader
    low, high = cost.load(model).ranges["swap"]["segment_bytes"]
    assert trained is not None and low <= server.segment_bytes <= high
    by_sheet = _priced(hardware)
    there = run_cell.server_of(by_sheet, run_cell.machine_of(by_sheet))
    assert there.segment_bytes == there.block_bytes // 8, "of eight layers"
    assert there.segment_bytes == 2 * 2 * 128 * 2 * 16, "keys and values, heads, their width, bytes, tokens"


def test_servers_are_vllms_own_for_the_device(hardware: str, tmp_path: Path) -> None:
    report = simulate(hardware, tmp_path / "c", policies=["always-swap"])
    serving = report.results[0]["inputs"]["serving"]
    assert (serving["token_budget"], serving["max_num_seqs"], serving["asynchronous"]) == (8192, 1024, True)
    assert "at most 8192 tokens a step and 1024 requests, scheduling one step ahead" in report.text()
    given = {"policies": ["always-swap"], "token_budget": 512, "max_num_seqs": 7, "asynchronous": False}
    serving = simulate(hardware, tmp_path / "c", **given).results[0]["inputs"]["serving"]
    assert (serving["token_budget"], serving["max_num_seqs"], serving["asynchronous"]) == (512, 7, False)


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("cpu", (2048, 128, False)),
        ("H200", (8192, 1024, True)),
        ("NVIDIA H100 80GB HBM3", (8192, 1024, True)),
        ("NVIDIA A100-SXM4-80GB", (2048, 256, True)),
        ("A100-SXM-80GB", (2048, 256, True)),
        ("L40S", (2048, 256, True)),
        ("one without a data sheet", (2048, 256, True)),
    ],
)
def test_defaults_go_by_the_device(device: str, expected: tuple[int, int, bool]) -> None:
    assert astuple(usual_limits(device)) == expected


def test_traces_are_put_beside(hardware: str, tmp_path: Path) -> None:
    report = simulate(hardware, tmp_path / "c", out=tmp_path / "out", policies=["always-swap"])
    trace = read(tmp_path / "out" / report.results[0]["digest"][:16])
    assert trace.table("requests").num_rows == 30
    swaps = [row for row in trace.rows("decisions") if row["executed"] == "swap"]
    assert len(swaps) == report.results[0]["preemptions"]["swap"]
    again = simulate(hardware, tmp_path / "c", out=tmp_path / "other", policies=["always-swap"])
    assert again.taken_up == 0, "a trace that is not there has to be made"


def test_in_processes_the_figures_are_the_same(hardware: str, tmp_path: Path) -> None:
    here = simulate(hardware, tmp_path / "a", policies=["always-swap"])
    there = simulate(hardware, tmp_path / "b", policies=["always-swap"], jobs=1)
    assert {**here.results[0], "simulator_wall_s": 0} == {**there.results[0], "simulator_wall_s": 0}


def test_a_trained_model_is_hardware_too(tmp_path: Path) -> None:
    """Its own link is what it was measured on; behind another one it does not fit, and says so."""
    model = "cpu-llama-simulated-link"
    report = simulate(
        model,
        tmp_path / "c",
        block_size=32,
        links=["native", "1e9"],
        policies=["always-swap", f"cheapest:{model}", f"minwaste:{model}"],
        workloads=["azure-conversation-2023?n=10&context=512"],
        kv_blocks=[30],
    )
    assert [one["inputs"]["policy"] for one in report.results] == [
        "always-swap",
        f"cheapest:{model}",
        f"minwaste:{model}",
        "always-swap",
    ]
    assert all(sum(one["preemptions"].values()) for one in report.results)
    assert len(report.failed) == 2 and all("it was measured on" in one.error for one in report.failed)
    assert not report.results[0]["unmeasured"]


def test_the_oracle_is_a_policy_here(hardware: str, tmp_path: Path) -> None:
    (one,) = simulate(hardware, tmp_path / "c", policies=["oracle"]).results
    assert one["choices"] > 0 and sum(one["preemptions"].values()) >= one["choices"]


def test_a_link_that_is_named_with_the_device_counts(hardware: str, tmp_path: Path) -> None:
    """For the simulated copies, and for the cost model that is asked about them."""
    slow = hardware.replace("H100-SXM:", "H100-SXM@pcie3:")
    results = [simulate(where, tmp_path / "c", policies=["always-swap"]).results[0] for where in (hardware, slow)]
    assert results[0]["e2e_s"] != results[1]["e2e_s"]
    models = [run_cell.policy_of(cell)[0].cost_model for cell in (_priced(hardware), _priced(slow))]
    costs = [model.predict(situation(2000, 16), options_for(situation(2000, 16)))[1] for model in models if model]
    assert costs[0].engine_s < costs[1].engine_s


def _priced(hardware: str) -> Cell:
    return Cell(WORKLOAD, "cheapest:analytic", TIGHT, "native", 0, hardware)


def test_hardware_that_changed_is_read_again(tmp_path: Path) -> None:
    """Nothing that is open in memory, and nothing that was kept, is of the file that was there before."""
    config = tmp_path / "config.json"
    speeds = []
    for layers in (8, 32, 8):
        config.write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))
        report = simulate(f"H100-SXM:{config}", tmp_path / "c", policies=["always-recompute", "cheapest:analytic"])
        speeds.append([one["throughput_tok_s"] for one in report.results])
        taken_up = report.taken_up
    assert speeds[1][0] < 0.95 * speeds[0][0] and speeds[2] == speeds[0]
    assert taken_up == 2


def test_a_cost_model_that_changed_is_read_again(hardware: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    copytree(Path(__file__).resolve().parents[2] / "models" / "cpu-llama-native", model)
    first = run_cell.policy_of(Cell(WORKLOAD, f"cheapest:{model}", TIGHT, "native", 0, str(model)))[0].cost_model
    card = json.loads((model / "model.json").read_text())
    (model / "model.json").write_text(json.dumps(card, indent=3))
    again = run_cell.policy_of(Cell(WORKLOAD, f"cheapest:{model}", TIGHT, "native", 0, str(model)))[0].cost_model
    assert again is not first


def test_what_changes_while_a_grid_runs_is_not_kept(hardware: str, tmp_path: Path) -> None:
    cell = Cell(WORKLOAD, "always-recompute", TIGHT, "native", 0, hardware)
    with pytest.raises(ValueError, match="changed while the grid ran"):
        grid.work(grid.Task(cell, "another digest", None))


def test_rows_that_made_no_request_are_told(hardware: str, tmp_path: Path) -> None:
    file = tmp_path / "w.csv"
    file.write_text("arrival_s,prompt_tokens,output_tokens\n0.0,100,20\n0.5,x,30\n0.6,50,30\n")
    given = {"workloads": [f"{file}?skip_damaged=true&speed=2"], "policies": ["always-recompute"]}
    for parts in (1, 2):
        report = simulate(hardware, tmp_path / "c", **given, parts=parts)
        assert report.results[0]["rows"] == {"read": 3, "damaged": 1, "empty": 0}
        assert "of 3 rows read, 1 damaged ones were skipped" in report.text()
    assert simulate(hardware, tmp_path / "c").results[0]["rows"] is None


def test_a_device_that_nobody_knows_is_said_to_be(tmp_path: Path) -> None:
    serving = {"token_budget": 2048, "max_num_seqs": 256, "asynchronous": True}
    assert "defaults of vLLM 0.32 for this device" in server_words(serving, "H100-SXM")
    assert "Some Card is unknown: defaults for the smallest GPU" in server_words(serving, "Some Card")


def test_copies_beside_a_step_slow_it_by_their_share_of_the_memory(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    cell = Cell(WORKLOAD, "always-swap", TIGHT, "native", 0, f"H100-SXM@pcie5:{config}")
    machine = run_cell.machine_of(cell)
    slowdown = run_cell.server_of(cell, machine).link.slowdown
    rate = 1e9 / machine.times.copy_s("load", 10**9, 1, 10**9)
    assert slowdown == pytest.approx(rate / 3.35e12, rel=0.02) and slowdown > 0.01
