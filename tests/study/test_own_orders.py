"""Orders of one's own in studies: by module path and as objects, in this process and in others; their results are kept
by what they are, not by what they are called."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from math import nan
from pathlib import Path
from typing import Any

import pytest

import kvpolicy
from kvpolicy import Order, Progress, Rank, Serving, View
from kvpolicy.extensions import ExtensionError
from kvpolicy.fields import WrongValue
from kvpolicy.study.config import Run
from kvpolicy.study.report import SweepReport
from kvpolicy.trace import read
from tests.order.made import ByLevel
from tests.order.own_victims import SpareChats
from tests.study.policy_grids import TIGHT

OWN = "python:tests.order.own_victims:SpareChats"
MIXED = "azure-conversation-2023?n=20&rate=20&context=512&class=chat + deepseek-r1?n=40&rate=9999&scale=.1&class=batch"


def simulate(hardware: str, cache: Path, order: Any, workload: str = MIXED, **more: Any) -> SweepReport:
    run = Run(cache=cache, **({"jobs": 0} | more))
    return kvpolicy.simulate([workload], ["always-swap"], [TIGHT], hardware, serving=Serving(order=order), run=run)


@dataclass
class Unhashable(SpareChats):
    name: str = "unhashable"


def test_a_module_path_and_an_object_come_to_the_same_in_any_process(hardware: str, tmp_path: Path) -> None:
    orders: list[Any] = [OWN, SpareChats()]
    reports = [
        simulate(hardware, tmp_path / f"{jobs} {number}", order, jobs=jobs, out=tmp_path / f"out {jobs} {number}")
        for jobs in (0, 1)
        for number, order in enumerate(orders)
    ]
    assert all(report.ok for report in reports), [report.text() for report in reports]
    results = [report.results[0] for report in reports]
    stock = simulate(hardware, tmp_path, "fcfs").results[0]
    for one in results:
        json.dumps(one, allow_nan=False)
        assert one["preemptions"] == results[0]["preemptions"] and one["makespan_s"] == results[0]["makespan_s"]
    assert results[0]["classes"]["chat"]["ttft_s"]["mean"] < stock["classes"]["chat"]["ttft_s"]["mean"]
    assert [one["inputs"]["serving"]["order"] for one in results] == [OWN, SpareChats().label] * 2
    assert [one["inputs"]["serving"].get("order_digest") for one in results] == [None, SpareChats().digest] * 2
    headers = [header for folder in tmp_path.glob("out*/*") for header in read(folder).headers.values()]
    assert {header.order for header in headers} == {SpareChats().label} and len(headers) == 4


@pytest.mark.parametrize("order", [SpareChats(), Unhashable()])
def test_what_is_finished_is_taken_up(hardware: str, tmp_path: Path, order: Order) -> None:
    first, again = (simulate(hardware, tmp_path, order) for _ in range(2))
    assert first.ok and (first.taken_up, again.taken_up) == (0, 1) and again.results == first.results


def test_objects_of_equal_names_are_kept_apart(hardware: str, tmp_path: Path) -> None:
    first, other = (simulate(hardware, tmp_path, ByLevel(quantum_tokens=quantum)) for quantum in (0, 64))
    assert first.ok and other.ok and other.taken_up == 0
    assert first.results[0]["inputs"] != other.results[0]["inputs"]


def test_a_server_keeps_the_object_beside_its_label_until_another_order_takes_its_place() -> None:
    order = SpareChats()
    serving = Serving(order=order)
    assert serving.order == order.label and serving.loaded_order() is order
    assert serving == Serving(order=SpareChats()) != Serving() and hash(serving) == hash(Serving(order=SpareChats()))
    assert replace(serving, block_size=32).loaded_order() is order
    assert replace(serving, order="mlfq").loaded_order().name == "mlfq"
    assert replace(serving, order=ByLevel()).loaded_order() == ByLevel()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (SpareChats, "^order is SpareChats, a class: give SpareChats"),
        (7, "^order is 7, should be a text"),
        ("spare-chats@0123", "is no order"),
    ],
)
def test_what_is_no_order_is_refused(wrong: Any, message: str) -> None:
    with pytest.raises(WrongValue, match=message):
        Serving(order=wrong)


def test_an_order_without_a_name_is_refused() -> None:
    with pytest.raises(ExtensionError, match="order ByLevel: its name is ''"):
        Serving(order=ByLevel(name=""))


def test_an_object_that_cannot_be_sent_to_other_processes_is_a_clear_error(hardware: str, tmp_path: Path) -> None:
    class Local(SpareChats):
        pass

    with pytest.raises(
        kvpolicy.KVPolicyError, match=r"^order spare-chats: cannot be sent to worker processes .*jobs 0"
    ):
        simulate(hardware, tmp_path, Local(), jobs=1)
    assert simulate(hardware, tmp_path, Local()).ok, "it runs here"


class Careless(SpareChats):
    """Gives what is no rank, or no victims."""

    def __init__(self, rank: Any = None, victims: bool = False) -> None:
        self.wrong, self.no_victims = rank, victims

    def rank(self, request: Progress, view: View) -> Rank:
        return Rank(self.wrong) if self.wrong else super().rank(request, view)  # type: ignore[no-untyped-call, no-any-return]

    def victims(self, waiting: Progress, running: Any, view: View) -> Any:
        return None if self.no_victims else running


@pytest.mark.parametrize(
    ("order", "method"),
    [(Careless((nan,)), "rank gave"), (Careless(("a",)), "rank gave"), (Careless(victims=True), "victims gave None")],
)
def test_an_answer_that_is_wrong_ends_the_run_in_one_line(
    hardware: str, tmp_path: Path, order: Order, method: str
) -> None:
    (failed,) = simulate(hardware, tmp_path, order).failed
    assert failed.error.startswith(f"order {order.label}: {method}"), failed.error


def test_worker_processes_name_the_answer_that_was_wrong(hardware: str, tmp_path: Path) -> None:
    order = Careless((nan,))
    run = Run(jobs=2, cache=tmp_path)
    report = kvpolicy.simulate(
        [MIXED], ["always-swap", "always-recompute"], [TIGHT], hardware, serving=Serving(order=order), run=run
    )
    assert len(report.failed) == 2
    for one in report.failed:
        assert one.error.startswith(f"order {order.label}: rank gave"), one.error


def test_a_line_that_deploys_an_object_is_not_given(hardware: str, tmp_path: Path) -> None:
    run = Run(jobs=0, cache=tmp_path, parts=2)
    advice = kvpolicy.recommend(MIXED, hardware, TIGHT, ["always-swap"], serving=Serving(order=SpareChats()), run=run)
    told = f"the order {SpareChats().label} was given as an object: a server takes it by name, as python:MODULE:FACTORY"
    assert advice.config_line == "" and told in advice.warnings
    named = kvpolicy.recommend(MIXED, hardware, TIGHT, ["always-swap"], serving=Serving(order=OWN), run=run)
    assert f"--order {OWN} --allow-python-policies" in named.config_line
