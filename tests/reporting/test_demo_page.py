"""A demo's page: what it says of the headline, and that it stands alone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import kvpolicy
from kvpolicy.errors import InputError
from kvpolicy.headroom import Headroom, Work, headroom
from kvpolicy.study.demo_report import DemoReport, ScenarioReport

pytest.importorskip("matplotlib")
FACTORS = (0.99, 1.01, 0.99, 1.01)
RUNS = Path(__file__).resolve().parent.parent.parent / "docs" / "demo-runs.json"


def scenario(name: str, headline: str, other: str, ratio: float) -> ScenarioReport:
    arms = {"vllm": (1.0, 1.0), "learned": (1.0, 1.0), "learned, mlfq <b>": (ratio, 1.2)}
    return ScenarioReport(
        name=name,
        served="96 requests",
        headline=headline,
        arms=dict.fromkeys(arms, "a policy"),
        figures={
            arm: {headline: [2.0 * first * f for f in FACTORS] if arm != "vllm" else [2.0] * 4,
                  other: [100.0 * second * f for f in FACTORS] if arm != "vllm" else [100.0] * 4}
            for arm, (first, second) in arms.items()
        },
        policies={key: {"preemptions": {"recompute": 4, "swap": 3}} for key in arms},
    )  # fmt: skip


BOUND = headroom(Work(1000, 200, 10.0, 0.5, 12.0), saved_s=0.25)


def write(folder: Path, ratio: float = 0.1, bound: Headroom = BOUND, **more: Any) -> Path:
    scenarios = (
        scenario("one class", "TTFT", "tok/s", ratio), scenario("two classes", "urgent TTFT", "batch e2e", 1.0),
    )  # fmt: skip
    report = DemoReport("live", scenarios, bound, {"profile": 60.0}, str(folder), **more)
    (folder / "demo.json").write_text(json.dumps(report.to_dict()))
    return folder


def write_run(folder: Path) -> Path:
    """A measured run of docs/demo-runs.json as `kvpolicy demo` leaves it: four arms with five figures, and three with
    four."""
    run = json.loads(RUNS.read_text())["runs"][0]
    scenarios = tuple(
        ScenarioReport(
            name=name,
            served=one["served"],
            headline=one["headline"],
            arms=dict.fromkeys(one["figures"], "cheapest:out/demo/models/native"),
            figures=one["figures"],
            policies={arm: {"preemptions": counts} for arm, counts in one["preemptions"].items()},
        )
        for name, one in run["scenarios"].items()
    )
    seconds = {phase: s for phase, s in run["seconds"].items() if phase != "in all"}
    exactness = {"exact": True, "tokens": run["tokens"], "ties": 0, "wrong": []}
    machine = dict(zip(("load_before", "load_after"), run["load"], strict=True)) | {"cpus": run["cpus"]}
    report = DemoReport("live", scenarios, BOUND, seconds, str(folder), exactness, {"machine": machine})
    (folder / "demo.json").write_text(json.dumps(report.to_dict()))
    return folder


def page(folder: Path) -> str:
    out = folder / "demo.html"
    assert kvpolicy.report([folder], out, figures=folder / "figures").text() == f"written: {out} and 4 figure files"
    return out.read_text()


def test_the_headline_says_how_many_times_or_that_it_could_not_be_told(tmp_path: Path) -> None:
    text = page(write(tmp_path))
    assert "10 times shorter" in text and text.count("could not be told</p>") == 1
    assert "measured: x 0.1 (0.0" in text and "How it was measured" in text
    assert "12 times longer" in page(write(tmp_path, ratio=12.0))


def test_the_table_of_the_chart_names_its_figures(tmp_path: Path) -> None:
    text = page(write(tmp_path))
    assert "<td>time to first token</td><td>learned</td><td>0.9999</td><td>0.9817 to 1.018</td>" in text


def test_figures_are_marked_better_worse_or_open(tmp_path: Path) -> None:
    text = page(write(tmp_path))
    rows = dict(re.findall(r"<tr><td>([^<]*)</td>(.*)</tr>", text))
    assert re.findall(r'td class="(\w*)"', rows["time to first token"]) == ["", "open", "yes"]
    assert re.findall(r'td class="(\w*)"', rows["tokens/s"]) == ["", "open", "yes"], "more is better"
    assert re.findall(r'td class="(\w*)"', rows["batch: end-to-end time"]) == ["", "open", "no"]
    assert rows["preempted (swapped)"].count("7 (3)") == 3


def test_the_page_stands_alone_and_escapes_names(tmp_path: Path) -> None:
    text = page(write(tmp_path))
    assert not re.search(r'(src|href)="(?!#)', text) and "prefers-color-scheme: dark" in text
    assert "learned, mlfq &lt;b&gt;" in text and "mlfq <b>" not in text
    assert "20%" in text and "none were generated" in text


def test_tokens_and_machine_are_told_where_there_were_any(tmp_path: Path) -> None:
    exactness = {"exact": True, "tokens": 5000, "ties": 1, "wrong": []}
    machine = {"cpus": 2, "load_before": 0.25, "load_after": 1.0}
    text = page(write(tmp_path, exactness=exactness, details={"machine": machine}))
    assert "the same:\n5000 compared, 1 ties" in text and "2 processors, load 0.2 before" in text


def test_what_preemptions_cost_is_said_to_be_unknown_where_it_is(tmp_path: Path) -> None:
    """Not an empty card."""
    text = page(write(tmp_path, bound=headroom(Work(0, 0, None, None, None), None, "no step was <recorded>")))
    cost = text.partition("What preemptions cost here")[2].partition("</dl>")[0]
    assert "<dd>no step was &lt;recorded&gt;</dd>" in cost and cost.count("<dt>") == 1


def test_tokens_that_differ_stand_before_what_pays(tmp_path: Path) -> None:
    text = page(write(tmp_path, exactness={"exact": False, "tokens": 9, "ties": 0, "wrong": ["request 3"]}))
    assert text.index("NOT EXACT") < text.index("It pays") and "NOT THE SAME" in text


def test_what_is_no_demo_is_refused(tmp_path: Path) -> None:
    (tmp_path / "demo.json").write_text('{"scenarios": {}}')
    with pytest.raises(
        InputError, match=r"demo\.json: field headline is missing; should be what `kvpolicy demo` writes"
    ):
        kvpolicy.report([tmp_path], tmp_path / "x.html")
    (tmp_path / "demo.json").write_text("[")
    with pytest.raises(InputError, match=r"demo\.json: is no JSON: .*; should be what `kvpolicy demo` writes"):
        kvpolicy.report([tmp_path], tmp_path / "x.html")
    with pytest.raises(InputError, match="has a demo: a page shows one demo"):
        kvpolicy.report([tmp_path, tmp_path], tmp_path / "x.html")
