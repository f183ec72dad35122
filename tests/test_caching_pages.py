"""docs/caching.md and docs/caching-study.md have the figures of their raw numbers, and each figure is of the rows that
it names."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from importlib import import_module
from math import exp, log
from pathlib import Path
from typing import Any

import pytest

from kvpolicy.json_values import rounded
from kvpolicy.stats import student_interval
from tests.test_environment import ROOT, tool

SENTENCES = tool("caching_sentences")
TABLES = import_module("caching_tables")
BARS = TABLES.bars
PAGES = (TABLES.POLICIES_PAGE, TABLES.STUDY_PAGE)
SAVED = {"lru": 0.2, "lfu": 0.1, "arc": 0.2, "s3fifo": 0.1, "cost": 0.3, "hindsight": 0.4}


@cache
def raw() -> Any:
    return TABLES.Raw.read()


def row(trace: str, draw: str = "seed 0", **saved: float) -> Any:
    return BARS.Row(trace, draw, 0.1, 512, 10, 100, 7.0, SAVED | saved)


# ---- the pages ----


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_those_of_the_raw_numbers(page: Path) -> None:
    text = page.read_text()
    assert TABLES.COMMENT in text and TABLES.drawn(text, raw()) == text


def test_every_table_stands_once_on_a_page() -> None:
    text = "".join(page.read_text() for page in PAGES)
    assert sorted(TABLES.TABLE.findall(text)) == sorted(TABLES.TABLES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_text_says_what_the_raw_numbers_come_to(page: Path) -> None:
    assert SENTENCES.unsaid(page, page.read_text(), raw()) == []


@pytest.mark.parametrize(("page", "least"), [(PAGES[0], 15), (PAGES[1], 35)], ids=[page.name for page in PAGES])
def test_a_figure_that_the_text_has_otherwise_is_told(page: Path, least: int) -> None:
    said = SENTENCES.unsaid(page, "", raw())
    flat = " ".join(page.read_text().replace("**", "").split())
    assert len(said) >= least
    for one in said:
        assert one in SENTENCES.unsaid(page, flat.replace(one, one.swapcase()), raw()), one


def test_the_raw_numbers_are_those_of_both_runs_of_every_trace() -> None:
    held = json.loads(TABLES.POLICIES_RAW.read_text())
    assert TABLES.text_of(held) == TABLES.POLICIES_RAW.read_text() and rounded(held) == held
    draws = {
        name: Counter((TABLES.title(one["trace"]), one["draw"]) for one in held[name]["rows"])
        for name in ("judged", "held-out")
    }
    traces = {name: draw.startswith("part") for name, draw in draws["judged"]}
    assert [*traces] == [*TABLES.TRACES.values()] and [*traces.values()] == [True, True, False, False]
    assert {draw for _, draw in draws["judged"]} == {"part 1 of 1", "seed 0"}
    parts, seeds = ([f"part {one} of 4" for one in (1, 2, 3, 4)], [f"seed {seed}" for seed in range(10, 15)])
    expected = [(trace, draw) for trace, is_part in traces.items() for draw in (parts if is_part else seeds)]
    assert [*draws["held-out"]] == expected
    assert {count for some in draws.values() for count in some.values()} == {6}
    settings = [held[name]["settings"] for name in ("judged", "held-out")]
    assert [one.pop("parts") for one in settings] == [1, 4] and settings[0] == settings[1]
    assert settings[0]["cost_model"] is None and set(settings[0]["versions"]) == {"kvpolicy", "code", "python", "numpy"}


def test_the_parts_of_traces_are_named() -> None:
    text = TABLES.POLICIES_PAGE.read_text()
    for name in {row["trace"] for some in raw().policies.values() for row in some["rows"]}:
        assert f"| {TABLES.title(name)} | `{name}` |" in text


@pytest.mark.parametrize(("script", "page"), [*zip(("caching_policies", "caching_study"), PAGES, strict=True)])
def test_what_the_folder_of_data_must_hold_is_said(script: str, page: Path) -> None:
    source = (ROOT / "benchmarks" / f"{script}.py").read_text()
    needed = set(re.findall(r"\b((?:traces|lengths)/[\w*]+\.(?:jsonl|csv)\.gz)", source))
    assert len(needed) == 3
    for name in needed:
        assert f"`{name}`" in page.read_text(), name


def test_the_interval_at_a_glance_is_that_of_the_page() -> None:
    named = BARS.with_room(BARS.of_target(raw().rows("held-out")))
    said = f"other draws {TABLES.gain_text(named)}, {BARS.gap_share(named):.0%} |"
    assert said in (ROOT / "docs" / "results.md").read_text()


def test_the_raw_numbers_of_the_study_have_what_its_tables_show() -> None:
    held = json.loads(TABLES.STUDY_RAW.read_text())
    assert TABLES.text_of(held) == TABLES.STUDY_RAW.read_text() and rounded(held) == held
    versions = held["settings"]["versions"]
    assert held["settings"]["keep"] == 600.0 and set(versions) == {"kvpolicy", "code", "python", "numpy"}
    assert all(set(run["found"]) == set(TABLES.FIGURES) for run in held["rows"])
    assert all(run["found"]["requests"] == run["arm"]["count"] for run in held["rows"])


# ---- the tools ----


def test_a_comment_that_no_table_can_follow_is_refused() -> None:
    for wrong, why in (("other -->\n\n", "should name one of judged"), ("judged -->\n| old |\n", "an empty line")):
        with pytest.raises(SystemExit, match=why):
            TABLES.drawn(f"{TABLES.COMMENT} {wrong}", TABLES.Raw({}, TABLES.Study([])))


def test_a_first_table_ends_before_what_follows_and_the_next_takes_its_place() -> None:
    names = ("mooncake_arxiv", "mooncake_conversation", "agentic_a", "sharegpt_a")
    one = TABLES.Raw({"judged": {"rows": [TABLES.vars_of(row(name)) for name in names]}}, TABLES.Study([]))
    first = TABLES.drawn(f"{TABLES.COMMENT} judged, bars -->\n\nAnd on.\n", one)
    assert first.endswith("| all | 4 | 4 | 1.500 | 50% | 1.500 | 0 |\n\nAnd on.\n")
    assert TABLES.drawn(first, one) == first
    assert "| Mooncake and agentic sessions, of which the target is | 3 |" in first
    told = TABLES.drawn(f"{TABLES.COMMENT} judged -->\n\n", one).splitlines()
    assert told[4] == "| Mooncake, arXiv | 10 | 0.200 | 0.500 | 1.000 | 0.500 | 1.500 | 2.000 |"


def test_files_are_gathered_under_their_names_without_what_no_table_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TABLES, "POLICIES_RAW", tmp_path / "policies.json")
    monkeypatch.setattr(TABLES, "STUDY_RAW", tmp_path / "study.json")
    found = dict.fromkeys((*TABLES.FIGURES, "fairness"), 1)
    written = {
        "judged": [TABLES.vars_of(row("mooncake_arxiv"))],
        "held-out": [TABLES.vars_of(row("agentic_a"))],
        "study": [{"arm": {"cache": "lru"}, "seed": 0, "found": found}],
    }
    for name, rows in written.items():
        (tmp_path / name).write_text(json.dumps({"settings": {"of": name}, "rows": rows}))
        TABLES.gather({name: tmp_path / name})
    policies, study = (json.loads((tmp_path / name).read_text()) for name in ("policies.json", "study.json"))
    assert policies == {name: {"settings": {"of": name}, "rows": written[name]} for name in ("judged", "held-out")}
    assert len((tmp_path / "policies.json").read_text().splitlines()) == 8
    assert set(study["rows"][0]["found"]) == set(TABLES.FIGURES) and study["settings"] == {"of": "study"}
    with pytest.raises(SystemExit, match=r"judged=.*study: should be what a benchmark of caches wrote"):
        TABLES.gather({"judged": tmp_path / "study"})


def test_a_run_that_is_not_there_is_named() -> None:
    with pytest.raises(SystemExit, match=r"has no run with seed 2 of .*'cache': 'lru'"):
        TABLES.Study([]).found(TABLES.SHAREGPT, "lru", 2)


@pytest.mark.parametrize("given", ["other=a.json", "study=nowhere.json"])
def test_the_tool_says_what_it_takes(given: str) -> None:
    command = [sys.executable, str(ROOT / "tools" / "caching_tables.py"), given]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 2 and f"error: {given}: should be NAME=FILE" in refused.stderr


# ---- the bars ----


def test_the_bars_are_of_the_traces_that_they_name() -> None:
    """ShareGPT's rows stand beside: here they alone miss both bars."""
    named = [row("mooncake_a"), row("agentic_a", cost=0.24, hindsight=0.24)]
    lines = BARS.bars([*named, row("sharegpt_a", cost=0.1)])
    assert "met: Mooncake and agentic sessions" in lines[0] and "(1 of 2), cost saves 1.500 times" in lines[0]
    assert "50% of the gap" in lines[0] and lines[1].startswith("met: ") and lines[1].endswith("less in 0 of 2 rows")
    assert lines[2].startswith("missed: all traces") and "(2 of 3), cost saves 0.866 times" in lines[2]
    assert lines[3].startswith("missed: all traces") and "0.500, at least 0.97 (sharegpt_a, seed 0" in lines[3]
    assert BARS.bars(named) == lines[:2]
    assert BARS.bars([row("sharegpt_a")])[0].startswith("no rows of Mooncake and agentic sessions")
    assert "in none of 1 rows" in BARS.bars([row("agentic_a", hindsight=0.25)])[0]


def test_an_interval_over_draws_takes_several_of_a_trace() -> None:
    rows = [row("mooncake_a", f"part {part} of 4", cost=0.2 + part / 100) for part in (1, 2, 3, 4)]
    assert BARS.gain_interval(rows[:1]) is None and "over draws" not in BARS.bars(rows[:1])[0]
    of_one_trace = student_interval([log(one.gain("cost")) for one in rows])[1:]
    assert BARS.gain_interval(rows) == pytest.approx([*map(exp, of_one_trace)]), "Student's, of one trace"
    low, high = BARS.gain_interval([*rows, *(row("mooncake_b", f"part {part} of 2", cost=0.3) for part in (1, 2))])
    narrower = (of_one_trace[1] - of_one_trace[0]) * 4 / 6
    assert log(high / low) == pytest.approx(narrower), "draws that are alike add nothing to the variance of the sum"
    many = [row("mooncake_a", f"part {part} of 40", cost=0.2 + (part % 4 + 1) / 100) for part in range(40)]
    low, high = BARS.gain_interval([*many, row("agentic_a", cost=0.2)])
    assert 1.09 < low < BARS.mean_gain(many) < high < 1.15, "nor does a trace with one draw make it wider"
    low, high = BARS.gain_interval(rows)
    assert f"{low:.3f} to {high:.3f} over draws" in BARS.bars(rows)[0]


def test_rows_are_kept_as_they_are_read_again(tmp_path: Path) -> None:
    """To six digits, one a line."""
    row_file = import_module("row_file")
    file, settings = tmp_path / "rows.json", {"think": 60.0, "versions": row_file.versions()}
    kept = row_file.RowFile.read(file, settings)
    assert kept.rows == [] and not file.exists()
    made = [kept.add({"saved": {"lru": number / 3, "cost": float("nan")}}) for number in (1.0, 2.0)]
    assert made[0] == {"saved": {"lru": 0.333333, "cost": None}}
    assert row_file.RowFile.read(file, settings).rows == made and len(file.read_text().splitlines()) == 4
    with pytest.raises(ValueError, match=r"was made with think 60\.0, not 5\.0"):
        row_file.RowFile.read(file, settings | {"think": 5.0})
    (tmp_path / "caching").mkdir()
    digests = [row_file.code_digest(tmp_path)]
    for file_name, text in (("base.py", "a = 1"), ("base.py", "a = 2"), ("more.py", "")):
        (tmp_path / "caching" / file_name).write_text(text)
        digests.append(row_file.code_digest(tmp_path))
    assert len({*digests}) == 4 and row_file.versions()["code"] == row_file.code_digest(ROOT / "kvpolicy")
    with pytest.raises(ValueError, match="was made with versions"):
        row_file.RowFile.read(file, settings | {"versions": {"kvpolicy": "0"}})
