"""Several orders of service in one grid: every policy is simulated under every one of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import kvpolicy
from kvpolicy.cli import main
from kvpolicy.fields import WrongValue
from kvpolicy.study.config import Run, Serving
from kvpolicy.study.report import SweepReport
from tests.order.failing import Failing
from tests.order.own_victims import SpareChats
from tests.study.policy_grids import TIGHT
from tests.study.test_own_orders import MIXED

POLICIES = ["always-recompute", "always-swap"]


def simulate(hardware: str, cache: Path, orders: Any = (), serving: Serving = Serving(), jobs: int = 0) -> SweepReport:
    run = Run(jobs=jobs, cache=cache)
    return kvpolicy.simulate([MIXED], POLICIES, [TIGHT], hardware, serving=serving, run=run, orders=orders)


def orders_of(report: SweepReport) -> list[tuple[str, str]]:
    return [(result["inputs"]["serving"]["order"], result["inputs"]["policy"]) for result in report.results]


def lasting(report: SweepReport) -> list[Any]:
    return [{name: value for name, value in one.items() if name != "simulator_wall_s"} for one in report.results]


@pytest.mark.parametrize("jobs", [0, 1])
def test_arms_are_policies_by_orders_and_each_is_that_of_its_own_grid(hardware: str, tmp_path: Path, jobs: int) -> None:
    own = SpareChats()
    report = simulate(hardware, tmp_path / "all", ["fcfs", "mlfq:base=32", own, "fcfs"], jobs=jobs)
    orders = ["fcfs", "mlfq:base=32", own.label]
    assert report.ok and orders_of(report) == [(order, policy) for order in orders for policy in POLICIES]
    alone = [
        simulate(hardware, tmp_path / "one", serving=Serving(order=order)) for order in ("fcfs", "mlfq:base=32", own)
    ]
    assert lasting(report) == [one for single in alone for one in lasting(single)]
    assert lasting(simulate(hardware, tmp_path / "again", [own])) == lasting(alone[2]), "one is that of the server"


def test_tables_and_sentences_name_the_order_where_there_are_several(hardware: str, tmp_path: Path) -> None:
    text = simulate(hardware, tmp_path, ["fcfs", "urgent"]).text()
    for policy in POLICIES:
        for order in ("fcfs", "urgent"):
            assert text.count(f"\n{policy}, order {order}  ") >= 2, "of all requests, and by class"
    assert "under always-recompute, order fcfs, " in text and "under always-recompute, order urgent, " in text
    single = simulate(hardware, tmp_path, ["urgent"]).text()
    assert ", order urgent  " not in single and "\nunder always-recompute, " in single


def test_a_failed_cell_names_its_order(hardware: str, tmp_path: Path) -> None:
    order = Failing("rank")
    report = simulate(hardware, tmp_path, ["fcfs", order])
    assert len(report.failed) == 2
    for line in (one for one in report.text().splitlines() if one.startswith("failed: ")):
        assert f", order {order.label}, kv_blocks " in line


def test_progress_says_which_order_a_finished_cell_had(hardware: str, tmp_path: Path) -> None:
    lines: list[str] = []
    run = Run(jobs=0, cache=tmp_path, progress=lambda finished, total, words: lines.append(words))
    orders: Any = ["fcfs", "mlfq:base=32", SpareChats()]
    kvpolicy.simulate([MIXED], POLICIES, [TIGHT], hardware, run=run, orders=orders)
    finished = [line for line in lines if line.startswith("workload ")]
    assert len(finished) == len(set(finished)) == 6
    assert sum(", order mlfq:base=32, " in line for line in finished) == 2


def test_a_wrong_order_is_named(hardware: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(WrongValue, match=r"^orders is 'mlfq', should be a list, as \['mlfq'\]"):
        simulate(hardware, tmp_path, "mlfq")
    with pytest.raises(WrongValue, match=r"^order .*nothing.* is no order"):
        simulate(hardware, tmp_path, ["fcfs", "nothing"])
    flags = ["--kv-blocks", "200", "--hardware", hardware, "--workload", MIXED, "--policy", "always-swap"]
    with pytest.raises(SystemExit):
        main(["simulate", *flags, "--order", "fcfs", "--order", "nothing"])
    assert "--order " in capsys.readouterr().err


def test_the_flag_may_be_given_several_times(hardware: str, tmp_path: Path) -> None:
    flags = [
        "--kv-blocks",
        "200",
        "--hardware",
        hardware,
        "--workload",
        MIXED,
        "--policy",
        "always-swap",
        "--jobs",
        "0",
    ]
    file = tmp_path / "figures.json"
    cache = ["--results", str(tmp_path / "cache"), "--json", str(file)]
    for orders, expected in (([], ["fcfs"]), (["las"], ["las"]), (["las", "fcfs"], ["las", "fcfs"])):
        with pytest.raises(SystemExit) as ended:
            main(["simulate", *flags, *cache, *(part for order in orders for part in ("--order", order))])
        assert not ended.value.code
        cells = json.loads(file.read_text())["cells"]
        assert [cell["inputs"]["serving"]["order"] for cell in cells] == expected
