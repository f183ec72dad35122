"""docs/model-families.md has the figures of the raw numbers, of every model that it names."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

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


def test_a_column_of_its_own_has_those_that_found_anything() -> None:
    row = {"model": "gpt-oss-20b", "setting": "default", "output_tokens": 50, "preemptions": 4, "survival": 0.5,
           "far": 2, "far_survival": 0.25, "far_with_hits": 1, "tax": 0.1}  # fmt: skip
    drawn = TABLES.drawn("<!-- survival: 50 -->\n\n| old |\n\nAnd on.\n", [row]).splitlines()
    assert drawn[-3:] == ["| gpt-oss 20B, window of 128 | default | 50% (4) | 0.10 | 25% (2) | 1 |", "", "And on."]
    longer = row | {"output_tokens": 60, "far": 0, "far_survival": None}
    both = TABLES.drawn("<!-- survival: 50 60 -->\n\n", [row, longer]).splitlines()
    assert both[-1] == "| gpt-oss 20B, window of 128 | default | 50% (4) | 0.10 | 50% (4) | 0.10 | none |"
