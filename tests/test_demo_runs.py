"""The tables of demos that were run several times: pooled as the tool says, and the page's are those of raw numbers."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
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
LOAD = "one class"


def demo(folder: Path, ttft: float, served: str = "36 requests a round, 5.1 a second", **changes: Any) -> Path:
    """A demo's folder, as `kvpolicy demo` fills it, whose judged arm has such a time to first token."""
    one = scenario(values(1.0, 1.0, 1.0, noise=0.02), values(ttft, 1.1, 1.5, noise=0.05))
    exact = {"exact": True, "tokens": 1000, "ties": 0, "wrong": []}
    machine = {"cpus": 2, "load_before": 0.25, "load_after": 1.5}
    details = {"machine": machine, "capacity_per_s": 5.0, "train": {"out": "/home/somebody/models"}}
    whole = report(one, exactness=exact, details=details).to_dict() | changes
    whole["scenarios"][LOAD] |= {"served": served, "arms": dict.fromkeys(one.arms, "cheapest:/home/somebody/models")}
    (core := folder / "traces" / "above-capacity" / "core-1").mkdir(parents=True)
    (core / "header.json").write_text(json.dumps({"engine": "vllm 0.32.0", "run_id": "somebody"}))
    (folder / "demo.json").write_text(json.dumps(whole))
    return folder


def runs_of(folder: Path, *ttft: float) -> list[Any]:
    return [RUNS.gathered(demo(folder / str(number), one)) for number, one in enumerate(ttft)]


def test_what_is_gathered_names_neither_machine_nor_path(tmp_path: Path) -> None:
    (run,) = runs_of(tmp_path, 0.5)
    text = RUNS.text_of([run])
    assert json.loads(text) == {"runs": [run]} and "somebody" not in text and str(tmp_path) not in text
    assert (run["engine"], run["load"], run["cpus"], run["tokens"]) == ("vllm 0.32.0", [0.25, 1.5], 2, 1000)
    assert run["scenarios"][LOAD]["headline"] == "TTFT" and run["seconds"]["in all"] == pytest.approx(63.4)
    assert run["scenarios"][LOAD]["figures"]["learned, mlfq"]["TTFT"] == pytest.approx([0.95, 1.05, 0.95, 1.05])
    assert RUNS.gathered(tmp_path / "0" / "demo.json") == run, "the file, too"


def by_hand(logs: list[float]) -> tuple[float, float, float]:
    half = float(student.ppf(0.975, len(logs) - 1)) * stdev(logs) / sqrt(len(logs))
    return exp(fmean(logs)), exp(fmean(logs) - half), exp(fmean(logs) + half)


def test_few_runs_are_pooled_by_round_and_five_by_run(tmp_path: Path) -> None:
    few, many = [0.4, 0.5, 0.6], [0.4, 0.5, 0.6, 0.45, 0.55]
    for number, ttft in enumerate((few, many)):
        runs = runs_of(tmp_path / str(number), *ttft)
        by_round = [[log(one * factor) for factor in (0.95, 1.05, 0.95, 1.05)] for one in ttft]
        logs = [fmean(one) for one in by_round] if ttft is many else [one for run in by_round for one in run]
        found = RUNS.pooled(runs, LOAD, "TTFT", "learned, mlfq")
        assert (found.value, found.low, found.high) == pytest.approx(by_hand(logs), rel=1e-5)
        assert found.pairs == (5 if ttft is many else 12)
        text = "\n".join(RUNS.pooled_tables(runs))
        assert RUNS.shown(found) in text and ("the 5 runs, of which each counts once" in text) == (ttft is many)


def test_the_page_is_redrawn_between_its_comments(tmp_path: Path) -> None:
    runs = runs_of(tmp_path, 0.4, 0.5)
    page = (
        f"Before.\n\n<!-- demo runs: repeats -->\nold\n{RUNS.END}\n\n<!-- demo runs: pooled -->\n{RUNS.END}\nAfter.\n"
    )
    new = RUNS.drawn(page, runs)
    assert RUNS.drawn(new, runs) == new and "old" not in new and new.startswith("Before.") and new.endswith("After.\n")
    own = RUNS.ratio_of(runs[1], LOAD, "TTFT", "learned, mlfq")
    assert f"| 2 | {RUNS.shown(own)} | 5.00 | 0.25; 5% | 63 | 0.2, 1.5 |" in new
    for wrong, why in (
        (page.replace(RUNS.END, "", 1), "should be followed by"),
        (page.replace("pooled", "x"), "one of"),
    ):
        with pytest.raises(SystemExit, match=why):
            RUNS.drawn(wrong, runs)


def test_runs_that_are_no_repeats_of_each_other_are_refused(tmp_path: Path) -> None:
    runs = runs_of(tmp_path, 0.4, 0.5)
    RUNS.refuse_unlike(runs)
    other = RUNS.gathered(demo(tmp_path / "quick", 0.4, served="28 requests a round, 5.1 a second"))
    with pytest.raises(SystemExit, match="run 3: one class should have the requests, arms and figures of run 1"):
        RUNS.refuse_unlike([*runs, other])
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
    assert "| 1 | 0.4" in shown or "| 1 | 0.5" in shown
    assert "learned, mlfq" in shown
