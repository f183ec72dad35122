"""The demo without an engine: both loads simulated on the shipped trace's machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvpolicy import __version__
from kvpolicy.errors import InputError
from kvpolicy.fields import WrongValue
from kvpolicy.study.demo_report import BETTER, DemoReport
from kvpolicy.study.offline_demo import offline_demo, shipped_trace


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("offline") / "demo"


@pytest.fixture(scope="module")
def report(folder: Path) -> DemoReport:
    return offline_demo(folder, quick=True)


def test_an_order_of_service_pays_in_both_loads(report: DemoReport) -> None:
    one, two = report.scenarios
    assert one.ratio("TTFT", one.judged).value < 0.2, "mlfq above capacity"
    assert two.ratio("urgent TTFT", two.judged).value < 0.8
    assert one.verdict("tok/s", one.judged) in (BETTER, "open")


def test_every_arm_does_what_it_is_named_for(report: DemoReport) -> None:
    one, two = report.scenarios
    assert list(one.arms) == ["vllm", "best threshold", "learned", "learned, mlfq:base=32"]
    assert list(two.arms) == ["vllm", "learned", "learned, urgent"]
    for scenario in (one, two):
        stock = scenario.policies["vllm"]
        assert stock["preemptions"]["recompute"] > 0 and stock["preemptions"]["swap"] == stock["moved_bytes"] == 0
        learned = scenario.policies["learned"]
        assert learned["preemptions"]["swap"] > 0 and learned["moved_bytes"] > 0
    assert report.bound.tax is not None and report.bound.tax > 0.05


def test_it_is_written_and_the_same_again(report: DemoReport, folder: Path) -> None:
    again = offline_demo(folder, quick=True)
    assert [one.figures for one in again.scenarios] == [one.figures for one in report.scenarios]
    stored = json.loads((folder / "demo.json").read_text())
    assert stored["kind"] == "offline" and stored["exact"] is None
    assert stored["seed"] == 0 and stored["versions"] == {"kvpolicy": __version__}
    assert stored["evaluate"]["states"] > 10 and stored["scenarios"].keys() == {one.name for one in again.scenarios}
    assert "swap is faster in" in again.text()


def test_what_is_no_offline_demo_is_left_alone(tmp_path: Path) -> None:
    for name in ("demo.html", "demo.json", "llm"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(InputError, match="holds llm, which no offline demo writes: give a new folder"):
        offline_demo(tmp_path, quick=True)
    with pytest.raises(InputError, match="is a file, should be a folder"):
        offline_demo(tmp_path / "llm", quick=True)


def test_another_order_is_that_of_the_last_arm_and_stocks_own_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WrongValue, match="is priority, which other arms have"):
        offline_demo(tmp_path, order="priority")
    one, _ = offline_demo(tmp_path, quick=True, order="las:quantum=32").scenarios
    assert one.judged == "learned, las:quantum=32"


def test_the_shipped_trace_is_found() -> None:
    assert list(shipped_trace().glob("core-*/header.json"))
