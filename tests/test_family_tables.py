"""docs/model-families.md has the figures of the raw numbers, of every model that it names."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from math import exp, log, sqrt
from statistics import fmean, stdev
from typing import Any

import pytest
from scipy.stats import t as student

from tests.test_environment import ROOT, tool

TABLES = tool("family_tables")
PAGE = TABLES.PAGE.read_text()
IN_ONE_LINE = " ".join(PAGE.split())
ROWS: list[dict[str, Any]] = json.loads(TABLES.SURVIVAL.read_text())
SURVIVAL = {(row["model"], row["setting"], row["output_tokens"]): row for row in ROWS}
OUTPUTS = (300, 1000, 3000)
WITH_STATES = ("granite-4-h-small", "nemotron-h-8b", "qwen3-next-80b-a3b")


def test_tables_are_those_of_the_raw_numbers() -> None:
    assert PAGE.count(TABLES.COMMENT) == 2 and TABLES.drawn(PAGE, ROWS) == PAGE


def test_every_model_of_the_benchmark_is_in_the_file_with_all_its_settings() -> None:
    script = (ROOT / "benchmarks" / "family_survival.py").read_text()
    (shown,) = re.findall(r"\nSHOWN = \(\n(.*?)\n\)", script, re.DOTALL)
    assert re.findall(r'"([^"]+)"', shown) == [*TABLES.MODELS]
    for model in TABLES.MODELS:
        settings = [{setting for name, setting, count in SURVIVAL if (name, count) == (model, one)} for one in OUTPUTS]
        assert "default" in settings[0] and settings[0] == settings[1] == settings[2], model


def test_what_the_page_says_of_victims_that_went_far_is_so() -> None:
    past_windows = [SURVIVAL[model, "default", 3000] for model in ("gpt-oss-20b", "gemma-3-12b", "gemma-4-31b")]
    assert all(row["far"] and not row["far_with_hits"] for row in past_windows)
    states = [row for (model, _, outputs), row in SURVIVAL.items() if model in WITH_STATES and outputs == 3000]
    nothing = [1.0 - row["far_with_hits"] / row["far"] for row in states]
    assert f"{min(nothing):.0%} to {max(nothing):.0%} of such victims found nothing" in IN_ONE_LINE
    taxes = [row["tax"] for row in states]
    assert f"is {min(taxes):.1f} to {max(taxes):.1f} times what all requests have" in IN_ONE_LINE
    mistral = [row for (model, *_), row in SURVIVAL.items() if model == "mistral-7b-v0.1"]
    assert not any(row["far"] for row in mistral)
    long = [SURVIVAL["mistral-7b-v0.1", setting, 8000]["survival"] for setting in ("default", "retention None")]
    assert f"({long[0]:.0%}, with retention `None` {long[1]:.0%})" in IN_ONE_LINE


def test_one_table_of_all_tokens_survives_as_full_attention_does() -> None:
    """Latent KV, and chunks that are stored whole."""
    for outputs in OUTPUTS:
        full = SURVIVAL["llama-3.1-8b", "default", outputs]
        for other in (("deepseek-v3", "default"), ("llama-4-scout", "hybrid manager off")):
            row = SURVIVAL[*other, outputs]
            for figure in ("preemptions", "survival", "tax"):
                assert row[figure] == full[figure], (other, outputs, figure)


@pytest.mark.parametrize(
    ("comment", "said"),
    [
        ("<!-- survival: 300 -->\n", "should name tokens and have an empty line behind it"),
        ("<!-- survival: long -->\n\n", "should name tokens and have an empty line behind it"),
        ("<!-- survival: 77 -->\n\n", "has no rows with outputs of 77"),
    ],
)
def test_a_comment_that_no_table_can_follow_is_refused(comment: str, said: str) -> None:
    with pytest.raises(SystemExit, match=said):
        TABLES.drawn(comment, ROWS)


def test_rows_of_the_page_do_not_go_for_want_of_numbers() -> None:
    with pytest.raises(SystemExit, match="should have rows of gpt-oss-20b, which"):
        TABLES.refuse_partial([row for row in ROWS if row["model"] != "gpt-oss-20b"])
    TABLES.refuse_partial(ROWS)


def test_a_column_of_its_own_has_those_that_found_anything() -> None:
    row = {"model": "gpt-oss-20b", "setting": "default", "output_tokens": 50, "preemptions": 4, "survival": 0.5,
           "far": 2, "far_survival": 0.25, "far_with_hits": 1, "tax": 0.1}  # fmt: skip
    drawn = TABLES.drawn("<!-- survival: 50 -->\n\n| old |\n\nAnd on.\n", [row]).splitlines()
    assert drawn[-3:] == ["| gpt-oss 20B, window of 128 | default | 50% (4) | 0.10 | 25% (2) | 1 |", "", "And on."]
    longer = row | {"output_tokens": 60, "far": 0, "far_survival": None}
    both = TABLES.drawn("<!-- survival: 50 60 -->\n\n", [row, longer]).splitlines()
    assert both[-1] == "| gpt-oss 20B, window of 128 | default | 50% (4) | 0.10 | 50% (4) | 0.10 | none |"


# ---- what swaps gain ----


def test_the_gain_of_swaps_is_that_of_the_runs() -> None:
    """The page's from the file, and the file's ratios from its runs: means over a start's runs, then over starts."""
    found = json.loads(TABLES.LIVE.read_text())
    assert TABLES.with_live_block(PAGE, found) == PAGE and TABLES.text_of(found) == TABLES.LIVE.read_text()
    assert {*TABLES.ARMS, "vllm", "retention None", "hybrid manager off"} == {run["arm"] for run in found["runs"]}
    assert len({run["start"] for run in found["runs"]}) >= 3, "fewer starts have no interval"
    for name, figures in found["ratios"].items():
        arm, over = name.split(" over ")
        for figure, ratio in figures.items():
            logs = [by_start(found["runs"], arm, figure)[start] - by_start(found["runs"], over, figure)[start]
                    for start in by_start(found["runs"], over, figure)]  # fmt: skip
            assert ratio["value"] == pytest.approx(exp(fmean(logs)), rel=1e-4), (name, figure)
            half_width = student.ppf(0.975, len(logs) - 1) * stdev(logs) / sqrt(len(logs))
            assert ratio["high"] == pytest.approx(exp(fmean(logs) + half_width), rel=1e-4), (name, figure)


def by_start(runs: list[dict[str, Any]], arm: str, figure: str) -> dict[int, float]:
    """Mean logarithm of a figure."""
    starts = {run["start"] for run in runs}
    return {one: fmean(log(run[figure]) for run in runs if (run["arm"], run["start"]) == (arm, one)) for one in starts}


def live(**changes: Any) -> dict[str, Any]:
    """A run of the benchmark in which only always-swap is another; ``changes`` of it."""
    arms = ("vllm", "retention None", "always-recompute", "always-swap")
    same = {"value": 1.0, "low": 0.9, "high": 1.1}
    pairs = [f"{arm} over vllm" for arm in arms[1:]] + [f"always-swap over {arm}" for arm in arms[1:3]]
    ratios = {pair: dict.fromkeys(TABLES.FIGURES, same) for pair in pairs}
    ratios["always-swap over vllm"] = {figure: {"value": 1.25, "low": 1.2, "high": 1.3} for figure in TABLES.FIGURES}
    runs = [
        {"start": start, "arm": arm, "tok/s": 600.0 + start, "preemptions": {"recompute": 3, "swap": 2},
         "recomputed_tokens": 4000, "moved_bytes": 75_400_000}
        for start in range(3) for arm in arms
    ]  # fmt: skip
    found = {
        "asked": {"requests": 48, "minutes": 9.0}, "versions": {"vllm": "0.32.0"}, "machine": {"cores": 2},
        "price_ratio": 0.381, "blocks": 171, "seconds": 540.0, "loads": [1.24, 3.16], "tokens": 153600, "ties": 0,
        "wrong": 0, "runs": runs, "ratios": ratios,
    }  # fmt: skip
    return found | changes


def test_the_block_says_what_ran_and_what_it_gave() -> None:
    said = " ".join(TABLES.live_block(live()).split())
    assert "With `--requests 48 --minutes 9` on 2 cores (vLLM 0.32.0, 171 blocks, p / d 0.38, 3 starts of every" in said
    assert "load average 1.2 to 3.2, 9 minutes in all), every one of 153,600 tokens was the same." in said
    assert (
        "made 601 tokens/s and preempted 5 times, which recomputed 4,000 tokens; always-swap preempted 5 times" in said
    )
    assert "| plugin, always swap | 1.250 (1.200 to 1.300) | 1.250" in said
    assert "best of vLLM's own settings, its defaults: 1.250 (1.200 to 1.300) of the tokens/s" in said
    better = live()
    better["ratios"]["retention None over vllm"]["tok/s"] = {"value": 1.02, "low": 0.9, "high": 1.1}
    assert "own settings, retention `None`: 1.000 (0.900 to 1.100) of" in " ".join(TABLES.live_block(better).split())
    odd = " ".join(TABLES.live_block(live(ties=2, wrong=1)).split())
    assert "of 153,600 tokens 1 differed and 2 were ties" in odd
    assert json.loads(TABLES.text_of(live())) == live()


def test_a_page_without_its_block_is_refused() -> None:
    with pytest.raises(SystemExit, match="should stand once"):
        TABLES.with_live_block("<!-- live windows -->\nno end", live())
    command = [sys.executable, ROOT / "tools" / "family_tables.py", "--live", "nowhere.json"]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 2 and "error: nowhere.json is no file: --live should name" in refused.stderr
