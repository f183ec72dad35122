"""`kvpolicy demo` before and after its engines run: targets, requests, folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpolicy.workload import Request, Workload
from kvpolicy_vllm.bench.overload import Run
from kvpolicy_vllm.bench.run_demo import DEMO_JSON, LinkResult, _clear_folder, _fitting_requests, demo, targets_of


def run(ttft_s: float, itl_s: tuple[tuple[float, ...], ...]) -> Run:
    return Run("x", 0, 1.0, (ttft_s,) * len(itl_s), itl_s, ((1,),) * len(itl_s), (), {}, 0, 0)


def test_targets_come_from_undisturbed_runs() -> None:
    targets = targets_of([run(4.0, ((0.1, 0.3), ())), run(6.0, ((0.2,),))])
    assert targets.ttft_s == pytest.approx(4.0 + 0.98 * 2.0)  # of 4, 4 and 6
    assert targets.itl_s == pytest.approx(1.25 * 0.2)


def test_calm_requests_fit_into_memory_together() -> None:
    workload = Workload("by hand", tuple(Request(0.0, 60, 40) for _ in range(9)), 0)
    # 100 tokens take 4 blocks of 32, and one to spare.
    assert len(_fitting_requests(workload, 32, capacity=21, max_requests=6).requests) == 4
    assert len(_fitting_requests(workload, 32, capacity=100, max_requests=6).requests) == 6
    assert len(_fitting_requests(workload, 32, capacity=1, max_requests=6).requests) == 1


def test_a_finished_demo_makes_room_and_an_unfinished_one_is_kept(tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    _clear_folder(tmp_path)
    assert (tmp_path / "traces").exists()
    (tmp_path / DEMO_JSON).write_text("{}")
    _clear_folder(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_foreign_folders_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    (tmp_path / DEMO_JSON).write_text("{}")
    with pytest.raises(ValueError, match=r"holds thesis\.tex"):
        demo(tmp_path)
    assert (tmp_path / DEMO_JSON).exists()


def test_arms_with_the_plugin_have_the_order() -> None:
    """The stock arm stays as it is, in an engine of its own; without an order all share one."""
    trained = {"best_threshold": "threshold:64"}
    stock, *ours = LinkResult("native", None, {}, "cheapest:m", trained, {}, "mlfq:base=64").arms()
    assert (stock.policy, stock.order) == (None, "fcfs") and len(ours) == 4
    assert {arm.order for arm in ours} == {"mlfq:base=64"}
    assert len({arm.engine for arm in ours}) == 1 and stock.engine != ours[0].engine
    assert len({arm.engine for arm in LinkResult("native", None, {}, "cheapest:m", trained, {}).arms()}) == 1
