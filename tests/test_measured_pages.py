"""Figures of single measurements on pages are those of the raw numbers that stand beside these, and so are counts over
the runs of the study of caches on a page that has none of its tables."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import median
from typing import Any

import pytest

DOCS = Path(__file__).resolve().parent.parent / "docs"
OWN_TIME = json.loads((DOCS / "own-time.json").read_text())
FILE_TIER = json.loads((DOCS / "file-tier.json").read_text())
STUDY = json.loads((DOCS / "caching-study.json").read_text())
MODELS = {"llama-26m": "26 million", "llama-103m": "103 million"}
GB = 1e9


def said(page: str) -> str:
    """The text of a page, without its line breaks."""
    return " ".join((DOCS / page).read_text().split())


def kind_of(row: dict[str, Any]) -> str:
    return "files below host memory" if row["files_gib"] else "hints" if row["hints"] else "host memory alone"


def test_the_table_of_the_plugins_own_time_is_that_of_the_rows() -> None:
    page, rows = said("bench.md"), OWN_TIME["rows"]
    assert len({(row["model"], kind_of(row), row["prefix_tokens"]) for row in rows}) == len(rows) == 12
    for row in rows:
        share = f"{row['share']:.2%} ({row['low']:.2%} to {row['high']:.2%})"
        times = (f"{row['own_us'] / 1e3:.2f}", f"{row['step_us'] / 1e3:.3g}")
        cells = (MODELS[row["model"]], kind_of(row), f"{row['prefix_tokens']:,}", share, *times)
        assert f"| {' | '.join(cells)} |" in page, row["model"]


def test_the_target_is_met_where_the_page_says_so() -> None:
    bar = OWN_TIME["settings"]["bar"]
    missed = {(row["model"], kind_of(row)) for row in OWN_TIME["rows"] if row["share"] > bar}
    assert missed == {("llama-26m", "files below host memory"), ("llama-26m", "hints")}
    assert OWN_TIME["settings"]["clock"] == "wall"
    unsure = [row for row in OWN_TIME["rows"] if row["share"] <= bar < row["high"]]
    large = [row for row in unsure if row["model"] == "llama-103m"]
    unsure = [row for row in unsure if row not in large]
    assert {(row["model"], kind_of(row)) for row in unsure} == {("llama-26m", "host memory alone")}
    assert [(kind_of(row), row["prefix_tokens"]) for row in large] == [("files below host memory", 256)]
    words = "is met with 103 million parameters, where the interval with files behind 256 tokens ends above it;"
    assert words in said("bench.md")
    words = "With 26 million and host memory alone it is met by the mean, but the intervals end above it"
    assert words in said("bench.md")
    ends = " and ".join(f"{row['high']:.2%}" for row in sorted(unsure, key=lambda row: int(row["prefix_tokens"])))
    words = f"by the mean alone with 26 million and host memory alone, whose intervals reach {ends};"
    where = f"met with 103 million parameters, where one interval of files reaches {large[0]['high']:.2%}"
    assert f"{where}; {words} **missed**" in said("results.md")


def test_the_plugins_own_time_is_said_to_be_without_its_threads() -> None:
    assert "What threads beside the step take is not in it: those that write and read files" in said("bench.md")


def test_the_faults_that_are_said_to_cost_no_token_are_those_of_recorded_tests() -> None:
    row = next(line for line in (DOCS / "results.md").read_text().splitlines() if line.startswith("| tokens and what"))
    files = re.findall(r"`(tests/vllm/\w+\.py)`", row)
    records = [one for one in json.loads((DOCS / "features.json").read_text()) if one["version"] == "0.32"]
    assert len(files) == 3
    for file in files:
        assert any(one["passed"] for one in records if one["test"].startswith(f"{file}::")), file
    drawn = {len(one["passed"]) for one in records if "nothing_wrong_is_found" in one["test"]}
    assert drawn == {60} and "sixty drawn schedules" in row


@pytest.mark.parametrize("threads", [4, 2])
def test_the_speed_of_files_is_that_of_the_pairs(threads: int) -> None:
    (row,) = (row for row in FILE_TIER["rows"] if row["threads"] == threads)
    total = row["blocks"] * row["block_bytes"]
    ratios = [pair["large"] / pair["tier"] for pair in row["seconds"]]
    speeds = [median(total / pair[way] / GB for pair in row["seconds"]) for way in ("tier", "large")]
    span = f"{min(ratios):.3f} to {max(ratios):.3f}"
    assert len(ratios) == 10 and (row["blocks"], row["block_bytes"]) == (512, 2 << 20)
    assert median(ratios) >= FILE_TIER["settings"]["bar"] == 0.8
    words = f"{median(ratios):.3f}"
    page = said("tiers.md")
    if threads == 4:
        assert f"loaded at {words} of it by four threads (median of ten pairs, {span}; " in page
        assert f"{speeds[0]:.2f} of {speeds[1]:.2f} GB/s) and" in page
    else:
        assert f"at {words} by two ({span};" in page


def priced(link: str) -> list[dict[str, Any]]:
    """The study's runs with a cache over that link, deciding by price and with hits loaded whole."""
    as_usual = {"policy": "cheapest:analytic", "link": link, "load_share": 1.0}
    return [row for row in STUDY["rows"] if row["arm"]["cache"] != "none" and as_usual.items() <= row["arm"].items()]


def preempted(rows: list[dict[str, Any]]) -> tuple[int, int]:
    """How many preemptions of these runs were recomputed, and of how many."""
    counts = [row["found"]["preemptions"] for row in rows]
    return sum(count["recompute"] for count in counts), sum(count["recompute"] + count["swap"] for count in counts)


def test_the_preemptions_that_a_hint_could_have_changed_are_the_recomputes_of_the_study() -> None:
    page, rows = said("requests.md"), priced("native")
    recomputed, total = preempted(rows)
    assert recomputed == 0 and {row["arm"]["hints"] for row in rows} == {"none", "sessions", "hindsight"}
    words = f"none of {total:,} preemptions in {len(rows)} runs, with and without hints, was a recompute"
    assert f"it changes no choice over the data sheet's link: {words}." in page
    slow = {float(link) / GB: priced(link) for link in ("2e9", "1e9", "5e8", "2.5e8")}
    assert {row["arm"]["hints"] for some in slow.values() for row in some} == {"none"}
    first, *others = (f"{preempted(some)[0]} of {preempted(some)[1]} {{}} {speed:g}" for speed, some in slow.items())
    told = [f"{first.format('were over')} GB/s", *(one.format("over") for one in others)]
    assert f"without hints, {', '.join(told[:-1])} and {told[-1]}. **Over these links it changes nothing" in page
