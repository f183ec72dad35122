"""`kvpolicy demo` before its engines run: arms, folders, what is refused."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from kvpolicy.errors import InputError
from kvpolicy.fields import WrongValue
from kvpolicy.stored_values import sealed
from kvpolicy.study.demo_report import DEMO_JSON, TITLES
from kvpolicy_vllm.bench.demo_rounds import STATE
from kvpolicy_vllm.bench.live_scenarios import ONE_CLASS, TWO_CLASSES
from kvpolicy_vllm.bench.run_demo import FULL, HEADLINES, _clear_folder, arms_of, demo, shown


def test_a_finished_demo_makes_room_and_an_unfinished_one_is_kept(tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    (tmp_path / STATE).write_text("{}")
    _clear_folder(tmp_path)
    assert (tmp_path / "traces").exists() and (tmp_path / STATE).exists()
    for name in (DEMO_JSON, "demo.html"):
        (tmp_path / name).write_text("{}")
    _clear_folder(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("held", "kind"), [('{"kind": "offline"}', "offline"), ('{"kind": "live"}', "live"),
                                           ("half a fi", "unreadable")])  # fmt: skip
def test_what_a_demo_replaces_is_said(tmp_path: Path, held: str, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / DEMO_JSON).write_text(held)
    _clear_folder(tmp_path)
    assert capsys.readouterr().err == f"kvpolicy demo: replaces the finished {kind} demo in {tmp_path}\n"
    _clear_folder(tmp_path)
    assert not capsys.readouterr().err


def test_foreign_folders_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    (tmp_path / DEMO_JSON).write_text("{}")
    with pytest.raises(InputError, match=r"holds thesis\.tex"):
        demo(tmp_path)
    assert (tmp_path / DEMO_JSON).exists()


@pytest.mark.parametrize("mine", ["traces/mine", "models/mine"])
def test_traces_and_models_of_others_are_left_alone(mine: str, tmp_path: Path) -> None:
    for name in (mine, "traces/profile", "models/learned"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / DEMO_JSON).write_text("{}")
    with pytest.raises(InputError, match=f"holds {mine}, which is not from a demo"):
        _clear_folder(tmp_path)
    assert (tmp_path / mine).exists() and (tmp_path / DEMO_JSON).exists()


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "demo").write_text("")
    with pytest.raises(InputError, match="is a file, should be a folder"):
        demo(tmp_path / "demo")


def test_an_unfinished_demo_is_not_resumed_with_another_order(tmp_path: Path) -> None:
    began = sealed({"asked": {"seed": 0, "order": "mlfq"}, "values": {}, "seconds": {}})
    (tmp_path / STATE).write_text(json.dumps(began))
    with pytest.raises(InputError, match="was begun with order 'mlfq', now asked for with 'las'"):
        demo(tmp_path, order="las")


def test_an_unfinished_demo_is_not_resumed_by_another_version(tmp_path: Path) -> None:
    asked = {"seed": 0, "order": "las", **asdict(FULL), "versions": {"kvpolicy": "0.0.9", "vllm": "0.24.0"}}
    (tmp_path / STATE).write_text(json.dumps(sealed({"asked": asked, "values": {}, "seconds": {}})))
    with pytest.raises(InputError, match=r"was begun with versions .*'0\.0\.9'.*, now asked for with"):
        demo(tmp_path, order="las")


@pytest.mark.parametrize("order", ["fcfs", "priority"])
def test_stock_vllms_order_shows_nothing(order: str, tmp_path: Path) -> None:
    with pytest.raises(WrongValue, match="which other arms have: should be another, as mlfq:base=32"):
        demo(tmp_path / "new", order=order)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("scenario", [ONE_CLASS, TWO_CLASSES])
def test_the_headline_stands_first_and_a_tail_behind_its_mean(scenario: str) -> None:
    names = list(shown(scenario))
    assert names[0] == HEADLINES[scenario] and "CPU time" not in names
    for number, name in enumerate(names):
        if TITLES[name] == "its p99 s":
            assert name == f"{names[number - 1]} p99"


def test_unmodified_vllm_has_an_engine_of_its_own_and_comes_first() -> None:
    for scenario, order, names in (
        (ONE_CLASS, "fcfs", ["vllm", "best threshold", "learned", "learned, las:quantum=8"]),
        (TWO_CLASSES, "priority", ["vllm", "learned", "learned, las:quantum=8"]),
    ):
        stock, *ours = arms = arms_of(scenario, "las:quantum=8", "cheapest:m", "threshold:64")
        assert [arm.name for arm in arms] == names and stock.policy is None
        assert [arm.order for arm in arms] == [order] * (len(arms) - 1) + ["las:quantum=8"]
        assert stock.engine not in {arm.engine for arm in ours}
        assert len({arm.engine for arm in ours}) == 2, "rules under the same order share one"
        assert "kv_transfer_config" not in stock.arguments() and "scheduler_cls" not in stock.arguments()
