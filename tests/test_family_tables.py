"""docs/model-families.md has the figures of the raw numbers, of every model that it names."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from math import exp, log, sqrt
from statistics import fmean, stdev
from typing import Any

import pytest
from scipy.stats import t as student

from benchmarks.survival_cells import Row, parsed
from tests.test_environment import ROOT, tool
from tests.test_survival_cells import row

TABLES = tool("family_tables")
PAGE = TABLES.PAGE.read_text()
_, ROWS = parsed(TABLES.SURVIVAL)
OUTPUTS = (300, 1000, 3000)


def test_tables_are_those_of_the_raw_numbers() -> None:
    assert PAGE.count(TABLES.COMMENT) == 2 and TABLES.drawn(PAGE, ROWS) == PAGE
    assert TABLES.with_survival_words(PAGE, ROWS) == PAGE


def test_every_model_of_the_benchmark_is_in_the_file_with_all_its_settings() -> None:
    script = (ROOT / "benchmarks" / "family_survival.py").read_text()
    (shown,) = re.findall(r"\nSHOWN = \(\n(.*?)\n\)", script, re.DOTALL)
    assert re.findall(r'"([^"]+)"', shown) == [*TABLES.MODELS]
    for model in TABLES.MODELS:
        settings = [{one.setting for one in ROWS if (one.model, one.output_tokens) == (model, of)} for of in OUTPUTS]
        assert "default" in settings[0] and settings[0] == settings[1] == settings[2], model


def test_rows_are_of_one_load_each_and_of_whole_victims() -> None:
    assert len({one.key for one in ROWS}) == len(ROWS)
    for one in ROWS:
        assert 0 <= one.far_with_hits <= one.with_hits <= one.preemptions and one.far <= one.preemptions, one
        assert 0 <= one.found_tokens <= one.computed_tokens and one.far_found_tokens <= one.far_computed_tokens, one
        assert one.recomputed_tokens == one.computed_tokens - one.found_tokens, one


def test_one_table_of_all_tokens_survives_as_full_attention_does() -> None:
    """Latent KV, and chunks that are stored whole, where the same bytes make as many blocks: of Llama 4 they make one
    less in some loads. Nobody went past a chunk of Llama 4."""
    figures = {one.key: (one.preemptions, one.computed_tokens, one.found_tokens, one.recomputed_tokens) for one in ROWS}
    blocks = {one.key: one.device_blocks for one in ROWS}
    full = {key: of for key, of in figures.items() if key[0] == "llama-3.1-8b"}
    assert {key[2] for key in full} == {*OUTPUTS}
    for key, of in full.items():
        assert figures["deepseek-v3", "default", *key[2:]] == of, key
        whole = ("llama-4-scout", "hybrid manager off", *key[2:])
        assert figures[whole] == of if blocks[whole] == blocks[key] else blocks[whole] == blocks[key] - 1, key
    same = sum(blocks["llama-4-scout", "hybrid manager off", *key[2:]] == blocks[key] for key in full)
    assert f"as in {same} of {len(full)} loads" in " ".join(PAGE.split())
    assert not any(one.far for one in ROWS if one.model == "llama-4-scout")


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
        TABLES.refuse_partial([one for one in ROWS if one.model != "gpt-oss-20b"])
    TABLES.refuse_partial(ROWS)


def test_figures_of_different_loads_do_not_stand_side_by_side() -> None:
    begun = replace(next(one for one in ROWS if one.key[:3] == ("gpt-oss-20b", "default", 300)), seed=999)
    with pytest.raises(
        SystemExit, match=r"seed 999 with outputs of 300 has no rows of .*; gpt-oss-20b, hybrid manager"
    ):
        TABLES.refuse_partial([*ROWS, begun])


def test_a_column_of_its_own_has_those_that_found_anything() -> None:
    drawn = TABLES.drawn("<!-- survival: 50 -->\n\n| old |\n\nAnd on.\n", [row(), row(seed=1)]).splitlines()
    cells = "20% [6% to 44%] of 20 | 0.10 | 10% [0.3% to 45%] of 10"
    assert drawn[-3:] == [f"| gpt-oss 20B, window of 128 | default | {cells} | 2 |", "", "And on."]
    longer = row(output_tokens=60, far=0, far_computed_tokens=0, far_found_tokens=0, far_with_hits=0)
    both = TABLES.drawn("<!-- survival: 50 60 -->\n\n", [row(), longer]).splitlines()
    one = "20% [3% to 56%] of 10 | 0.10"
    assert both[-1] == f"| gpt-oss 20B, window of 128 | default | {one} | {one} | none |"


def every_row() -> list[Row]:
    """What the page says something of: every model once, with outputs of 3,000 tokens, and a long one of 8,000."""
    far = [row(model=model, output_tokens=3000) for model in (*TABLES.WINDOWS, *TABLES.WITH_STATES, TABLES.LONG)]
    long = [row(model=TABLES.LONG, setting=setting, output_tokens=8000) for setting in ("default", "retention None")]
    return [*far, *long]


def test_what_the_page_says_of_victims_that_went_far_is_counted() -> None:
    rows = every_row()
    rows += [replace(one, seed=1, far=20, far_with_hits=0, recomputed_tokens=40_000) for one in rows[3:4]]
    rows += [replace(one, seed=1) for one in rows[:3] + rows[4:7]]
    said = " ".join(TABLES.survival_words(rows).split())
    assert said.startswith("The figures are of 2 loads with outputs of 3,000 and 1 load with outputs of 8,000 tokens.")
    assert "window 2 of 10 with gpt-oss, 2 of 10 with Gemma 3 and 2 of 10 with Gemma 4 found anything again." in said
    assert "states, with either setting, 80% to 96% of the victims" in said, "of 10 two found something, and of 25 one"
    assert "what was computed again is 0.1 to 0.3 times what all requests have" in said
    assert "victims with either setting 10 of 20 had generated more than its window with outputs of 3,000, and" in said
    assert "10 of 20 with 8,000, where 20% [3% to 56%] of 10 survived, with retention `None` 20% [3% to 56%] of" in said
    with pytest.raises(SystemExit, match=r"should have rows of mistral-7b-v0\.1, default, 8000"):
        TABLES.survival_words(rows[:7])
    with pytest.raises(SystemExit, match="`<!-- what survived -->` should stand once"):
        TABLES.with_survival_words("No block.", rows)


def test_loads_are_counted_by_the_outputs_that_they_have() -> None:
    rows = [row(output_tokens=of, seed=seed) for of in (300, 1000) for seed in range(10)] + [row(output_tokens=8000)]
    told = "The figures are of 10 loads with outputs of 300 and 1,000 and 1 load with outputs of 8,000 tokens."
    assert TABLES.loads_words(rows) == told
    assert TABLES.loads_words(rows[:20]) == "The figures are of 10 loads with outputs of 300 and 1,000 tokens."


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
    assert f"| plugin, always swap, over | {' | '.join(TABLES.FIGURES.values())} |" in said
    assert "| plugin, always recompute | 1.000 (0.900 to 1.100) | 1.000" in said.partition("always swap, over")[2]
    over = "over retention `None` and plugin, always recompute"
    times = "the mean end-to-end time"
    assert f"be told of tokens/s {over}, and of {times} over vLLM's defaults, {over[5:]}." in said, "1.25 is slower"
    told = live()
    better = {"tok/s": {"value": 1.2, "low": 1.1, "high": 1.3}, "e2e": {"value": 0.8, "low": 0.7, "high": 0.9}}
    for pair in told["ratios"]:
        told["ratios"][pair] = told["ratios"][pair] | better
    assert "swaps gain tokens/s and mean end-to-end time over each" in TABLES.live_block(told)
    odd = " ".join(TABLES.live_block(live(ties=2, wrong=1)).split())
    assert "of 153,600 tokens 1 differed and 2 were ties" in odd
    assert json.loads(TABLES.text_of(live())) == live()


def test_a_page_without_its_block_is_refused() -> None:
    with pytest.raises(SystemExit, match="should stand once"):
        TABLES.with_live_block("<!-- live windows -->\nno end", live())
    command = [sys.executable, ROOT / "tools" / "family_tables.py", "--live", "nowhere.json"]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 2 and "error: nowhere.json is no file: --live should name" in refused.stderr


# ---- what is said after a swap and after a recompute ----


def compared(**changes: Any) -> list[dict[str, Any]]:
    """Rows of every family with all cases identical, but for ``changes`` of Llama 4's recompute."""
    at = {"at a block's end": [256], "inside a block": [229], "twice": [229, 291], "in its prefill": [64]}
    row = {
        "version": "0.32", "dtype": "float32", "kind": "swap", "seed": 5, "amx": False, "prompt_tokens": 150,
        "output_tokens": 150, "identical": True, "first_different": None, "difference": 0.0,
    }  # fmt: skip
    recompute = row | {"case": "recomputed", "kind": "recompute", "at": [229]}
    rows = [
        one | {"family": family}
        for family in TABLES.COMPARED
        for one in [*(row | {"case": case, "at": lengths} for case, lengths in at.items()), recompute]
    ]
    more = [recompute | {"family": TABLES.ROUNDED, "seed": seed, "at": lengths, "case": f"recomputed at {lengths}"}
            for seed in (5, 6) for lengths in ([155], [229], [229, 291])]  # fmt: skip
    changed = ("llama-4", "recomputed")
    return [one | changes if (one["family"], one["case"]) == changed else one for one in [*rows, *more]]


def test_the_table_of_exactness_is_that_of_the_record() -> None:
    assert TABLES.with_exact_block(PAGE, json.loads(TABLES.EXACTNESS.read_text())) == PAGE, (
        "run `python tools/family_tables.py`"
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "identical"),
        ({"identical": False, "difference": 2.11e-6}, "same text, log-probabilities differ by up to 2.2e-6"),
        (
            {"identical": False, "first_different": 104, "difference": 0.15},
            "another text from token 104 on, log-probabilities differ by up to 0.15 before",
        ),
        ({"identical": False, "first_different": 80}, "another text from the first token after it (token 80)"),
    ],
)
def test_a_cell_says_by_how_much_a_recompute_differs(changes: dict[str, Any], said: str) -> None:
    assert f"| Llama 4, chunks of 64 | float32 | identical | {said} |" in TABLES.exact_block(compared(**changes))


def test_the_block_says_of_what_its_figures_are() -> None:
    said = " ".join(TABLES.exact_block(compared()).split())
    assert "vLLM 0.32's CPU build and a CPU without AMX, with a prompt of 150 tokens and an output of 150" in said
    assert "a block's end (256 computed tokens), inside a block (229), twice (229 and 291), and in its prefill" in said
    assert "the output after 6 of 6 recomputes of Llama was identical: of requests with 2 prompts" in said
    assert "after one preemption at 155 and 229 computed tokens, and after two preemptions, at 229 and 291 (" in said
    whole = [row for row in compared() if (row["family"], row["case"]) != ("glm-4.7", "in its prefill")]
    assert "| float32 | identical; not preempted in its prefill | identical |" in TABLES.exact_block(whole)
    different = {"identical": False, "first_different": 90, "difference": 0.1}
    other = [row | different if row["case"] == "twice" else row for row in compared()]
    assert "| twice: another text from token 90 on, log-prob" in TABLES.exact_block(other)


def test_what_the_table_of_exactness_lacks_is_named() -> None:
    rows = compared()
    with pytest.raises(SystemExit, match=r"should have rows of vLLM 0\.32 of gemma-3, recomputed"):
        TABLES.exact_block([row for row in rows if (row["family"], row["case"]) != ("gemma-3", "recomputed")])
    with pytest.raises(SystemExit, match="COMPARED should have a title of another"):
        TABLES.exact_block([*rows, rows[0] | {"family": "another"}])
    with pytest.raises(SystemExit, match="should have rows of test_recomputes_of_full_attention_in_bfloat16"):
        TABLES.exact_block([row for row in rows if "recomputed at" not in row["case"]])
    for changes in ({"amx": True}, {"at": [228]}, {"prompt_tokens": 151}):
        with pytest.raises(SystemExit, match="should be of one kind of CPU, one request and one length a case"):
            TABLES.exact_block(compared(**changes))
