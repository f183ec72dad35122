"""The command's whole way on small workloads: grid, figures, cache, traces, failures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvpolicy.study import grid
from kvpolicy.study.cell import Cell
from kvpolicy.study.report import SweepReport
from kvpolicy.trace import read
from tests.study.grids import TIGHT, WORKLOAD, simulate


def test_a_grid_has_all_its_cells(hardware: str, tmp_path: Path) -> None:
    report = simulate(hardware, tmp_path / "c", kv_blocks=[TIGHT, 4000], links=["native", "1e8,0.001"], seeds=2)
    assert report.ok and len(report.results) == 3 * 2 * 2 * 2
    for result in report.results:
        given, done = result["inputs"], result["preemptions"]
        assert result["requests"] == 30
        assert set(result["e2e_s"]) == set(result["ttft_s"]) == set(result["itl_s"]) == {"mean", "p50", "p99"}
        assert result["throughput_tok_s"] > 0 and result["makespan_s"] > 0
        if given["kv_blocks"] == 4000:
            assert not any(done.values()) and not result["recomputed_tokens"] and not result["moved_bytes"]
        elif given["policy"] == "always-recompute":
            assert done["recompute"] > 0 and not done["swap"] and not result["moved_bytes"]
        elif given["policy"] == "always-swap":
            assert done["swap"] > 0 and result["moved_bytes"] > 0
    slow, fast = (
        [
            result["makespan_s"]
            for result in report.results
            if (result["inputs"]["link"], result["inputs"]["policy"]) == key
        ]
        for key in (("1e8,0.001", "always-swap"), ("native", "always-swap"))
    )
    assert sum(slow) > sum(fast), "copies behind a slow link take longer"


def test_policies_meet_the_same_requests(hardware: str, tmp_path: Path) -> None:
    report = simulate(hardware, tmp_path / "c", kv_blocks=[4000], seeds=2)
    makespans = [result["makespan_s"] for result in report.results]
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
    for failure in report.failed:
        raise AssertionError(failure.error)


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
    events: list[tuple[int, int]] = []
    simulate(hardware, tmp_path / "c", progress=lambda done, total, words: events.append((done, total)))
    assert events == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_a_cell_that_fails_is_named_and_the_rest_is_finished(hardware: str, tmp_path: Path) -> None:
    """A workload whose requests cannot fit fails when it runs; a policy that is none, before."""
    policies = ["always-recompute", "no-such-policy"]
    report = simulate(hardware, tmp_path / "c", kv_blocks=[TIGHT, 20], policies=policies)
    assert not report.ok and len(report.results) == 1
    text = report.text()
    assert "kv_blocks 20" in text and "policy no-such-policy" in text
    assert len(report.failed) == 3
    assert {failure["inputs"]["kv_blocks"] for failure in report.to_dict()["failed"]} == {TIGHT, 20}


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


def test_the_oracle_is_a_policy_here(hardware: str, tmp_path: Path) -> None:
    (one,) = simulate(hardware, tmp_path / "c", policies=["oracle"]).results
    assert one["choices"] > 0 and sum(one["preemptions"].values()) >= one["choices"]


def test_what_changes_while_a_grid_runs_is_not_kept(hardware: str, tmp_path: Path) -> None:
    cell = Cell(WORKLOAD, "always-recompute", TIGHT, "native", 0, hardware)
    with pytest.raises(ValueError, match="changed while the grid ran"):
        grid.work(grid.Task(cell, "another digest", None))
