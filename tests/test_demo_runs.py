"""The tables of demos that were run several times: pooled as the tool says, and the page's are those of raw numbers."""

from __future__ import annotations

import copy
import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from math import exp, log, sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from scipy.stats import t as student

from tests.study.test_demo_report import report, scenario, values

ROOT = Path(__file__).resolve().parent.parent


def tool() -> Any:
    spec = importlib.util.spec_from_file_location("demo_runs", ROOT / "tools" / "demo_runs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RUNS = tool()
NAME = "one class"


ROUNDS = (0.07, 0.13, 0.46, 0.20)
"""Ratios of the times to first token in the rounds of a seed: what they are depends on its requests."""


def demo(folder: Path, ttft: float, rounds: Sequence[float] = (), **changes: Any) -> Path:
    """A demo's folder, as `kvpolicy demo` fills it, whose judged arm has such a time to first token, in round k times
    ``rounds[k]``. ``changes``: of demo.json; None leaves a key out."""
    judged = values(ttft, 1.1, 1.5, noise=0.05)
    if rounds:
        judged["TTFT"] = [2.0 * ttft * factor for factor in rounds]
    one = scenario(values(1.0, 1.0, 1.0, noise=0.02), judged)
    exact = {"exact": True, "tokens": 1000, "ties": 0, "wrong": []}
    workload = {"source": "drawn", "scale": 1.0, "requests": [36] * 4, "device_blocks": 57, "block_size": 32}
    details = {
        "seed": 0,
        "versions": {"kvpolicy": "0.1.0", "vllm": "0.32.0"},
        "machine": {"cpus": 2, "load_before": 0.25, "load_after": 1.5},
        "link": {"kind": "native"},
        "capacity_per_s": 5.0,
        "train": {"out": "/home/somebody/models"},
    }
    whole = report(one, exactness=exact, details=details).to_dict() | changes
    whole["scenarios"][NAME] |= {
        "workload": workload,
        "arms": dict.fromkeys(one.arms, "cheapest:/home/somebody/models"),
    }
    folder.mkdir(parents=True)
    (folder / "demo.json").write_text(json.dumps({name: value for name, value in whole.items() if value is not None}))
    return folder


def runs_of(folder: Path, *ttft: float, **more: Any) -> list[Any]:
    return [RUNS.gathered(demo(folder / str(number), one, **more)) for number, one in enumerate(ttft)]


def test_what_is_gathered_names_neither_machine_nor_path(tmp_path: Path) -> None:
    (run,) = runs_of(tmp_path, 0.5)
    text = RUNS.text_of([run])
    assert json.loads(text) == {"runs": [run]} and "somebody" not in text and str(tmp_path) not in text
    assert (run["seed"], run["load"], run["cpus"], run["tokens"]) == (0, [0.25, 1.5], 2, 1000)
    assert "kvpolicy 0.1.0 on vLLM 0.32.0, 1,000 tokens in all" in "\n".join(RUNS.repeats([run]))
    assert run["scenarios"][NAME]["headline"] == "TTFT" and run["seconds"]["in all"] == pytest.approx(63.4)
    assert run["scenarios"][NAME]["figures"]["learned, mlfq"]["TTFT"] == pytest.approx([0.95, 1.05, 0.95, 1.05])
    assert RUNS.gathered(tmp_path / "0" / "demo.json") == run, "the file, too"


def by_hand(logs: list[float]) -> tuple[float, float, float]:
    half = float(student.ppf(0.975, len(logs) - 1)) * stdev(logs) / sqrt(len(logs))
    return exp(fmean(logs)), exp(fmean(logs) - half), exp(fmean(logs) + half)


def test_rounds_with_the_same_requests_are_one_load(tmp_path: Path) -> None:
    """Three runs of a seed served four loads, not twelve: they say as much of other requests as one run does."""
    runs = runs_of(tmp_path, 1.0, 1.02, 0.97, rounds=ROUNDS)
    found = RUNS.pooled(runs, NAME, "TTFT", "learned, mlfq")
    common = fmean([log(1.0), log(1.02), log(0.97)])
    assert (found.value, found.low, found.high) == pytest.approx(by_hand([log(r) + common for r in ROUNDS]), rel=1e-5)
    single = RUNS.pooled(runs[:1], NAME, "TTFT", "learned, mlfq")
    assert (found.pairs, single.pairs) == (4, 4)
    assert found.high / found.low == pytest.approx(single.high / single.low, rel=1e-4), "no narrower"
    text = "\n".join(RUNS.pooled_tables(runs))
    assert RUNS.shown(found) in text and "interval over 4 loads,\neach served 3 times, " in text
    assert "The loads are of 1 seed." in text


def test_every_load_counts_once_however_often_it_was_served(tmp_path: Path) -> None:
    """Two runs of one seed and one of another: eight loads. Means of stock vLLM are over loads, too."""
    other = (0.3, 0.1, 0.2, 0.6)
    runs = runs_of(tmp_path / "a", 1.0, 1.2, rounds=ROUNDS) + runs_of(tmp_path / "b", 0.9, rounds=other, seed=3)
    found = RUNS.pooled(runs, NAME, "TTFT", "learned, mlfq")
    logs = [log(r) + log(1.2) / 2 for r in ROUNDS] + [log(0.9 * r) for r in other]
    assert (found.value, found.low, found.high) == pytest.approx(by_hand(logs), rel=1e-5) and found.pairs == 8
    text = "\n".join(RUNS.pooled_tables(runs))
    assert "over 8 loads,\neach served 1 to 2 times, " in text and "The loads are of 2 seeds." in text
    assert "| 3 | 3 | " in "\n".join(RUNS.repeats(runs)), "run 3 is of seed 3"


def test_a_seed_that_demo_json_lacks_is_taken_from_the_folder_or_refused(tmp_path: Path) -> None:
    """Earlier versions have it in the file by which a demo is resumed."""
    folder = demo(tmp_path / "earlier", 0.5, seed=None, versions=None)
    with pytest.raises(SystemExit, match=r"demo\.json: should have seed and versions, or state\.json beside it"):
        RUNS.gathered(folder)
    asked = {"seed": 7, "order": "mlfq", "versions": {"kvpolicy": "0.0.9", "vllm": "0.31.0"}}
    (folder / "state.json").write_text(json.dumps({"asked": asked}))
    run = RUNS.gathered(folder)
    assert (run["seed"], run["versions"]) == (7, asked["versions"])


def test_the_page_is_redrawn_between_its_comments(tmp_path: Path) -> None:
    runs = runs_of(tmp_path, 0.4, 0.5)
    page = (
        f"Before.\n\n<!-- demo runs: repeats -->\nold\n{RUNS.END}\n\n<!-- demo runs: pooled -->\n{RUNS.END}\nAfter.\n"
    )
    new = RUNS.drawn(page, runs)
    assert RUNS.drawn(new, runs) == new and "old" not in new and new.startswith("Before.") and new.endswith("After.\n")
    own = RUNS.pooled(runs[1:], NAME, "TTFT", "learned, mlfq")
    assert f"| 2 | 0 | {RUNS.shown(own)} | 5.00 | 0.25; 5% | 63 | 0.2, 1.5 |" in new
    for wrong, why in (
        (page.replace(RUNS.END, "", 1), "should be followed by"),
        (page.replace("pooled", "x"), "one of"),
    ):
        with pytest.raises(SystemExit, match=why):
            RUNS.drawn(wrong, runs)


def test_runs_that_are_no_repeats_of_each_other_are_refused(tmp_path: Path) -> None:
    runs = runs_of(tmp_path, 0.4, 0.5)
    RUNS.refuse_unlike(runs)
    for change, why in (
        ({"machine": {"cpus": 8, "load_before": 0.0, "load_after": 0.0}}, "cpus is 8, should be 2"),
        ({"link": {"kind": "simulated"}}, "link is {'kind': 'simulated'}, should be {'kind': 'native'}"),
    ):
        other = RUNS.gathered(demo(tmp_path / why.split()[0], 0.4, **change))
        with pytest.raises(SystemExit, match=f"run 3: {why}, as in run 1"):
            RUNS.refuse_unlike([*runs, other])
    for name, value in (("requests", [28] * 2), ("device_blocks", 49), ("block_size", 16)):
        other = copy.deepcopy(runs[1])
        other["scenarios"][NAME]["workload"][name] = value
        with pytest.raises(SystemExit, match=f"run 2: {name} of one class is "):
            RUNS.refuse_unlike([runs[0], other])
    other = copy.deepcopy(runs[1])
    del other["scenarios"][NAME]["figures"]["learned"]
    with pytest.raises(SystemExit, match="run 2: arms and figures of one class is "):
        RUNS.refuse_unlike([runs[0], other])
    with pytest.raises(SystemExit, match="run 2: tokens were not those of unmodified vLLM"):
        RUNS.refuse_unlike([runs[0], runs[1] | {"exact": False}])
    with pytest.raises(SystemExit, match=r"demo\.json: kind should be live"):
        RUNS.gathered(demo(tmp_path / "offline", 0.4, kind="offline"))
    with pytest.raises(SystemExit, match=r"nowhere: should be the demo\.json of a demo"):
        RUNS.gathered(tmp_path / "nowhere")


def test_the_tables_of_the_page_are_those_of_the_raw_numbers() -> None:
    page, runs = RUNS.PAGE.read_text(), RUNS.stored()
    assert page.count(RUNS.END) == len(RUNS.TABLES) and RUNS.drawn(page, runs) == page
    RUNS.refuse_unlike(runs)


def test_it_shows_what_it_would_write(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "tools" / "demo_runs.py", "--show", demo(tmp_path / "one", 0.5)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "| 1 | 0 | 0.4" in shown or "| 1 | 0 | 0.5" in shown
    assert "learned, mlfq" in shown
