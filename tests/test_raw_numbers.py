"""Figures on pages are those of the raw numbers of docs/published-results.json, and no raw numbers name a folder."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.test_environment import tool

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
RAW: dict[str, Any] = json.loads((DOCS / "published-results.json").read_text())


def read(name: str) -> str:
    """Without what marks a miss."""
    return (DOCS / name).read_text().replace("**", "").replace(", missed", "")


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def line_of(script: str, name: str) -> dict[str, Any]:
    (found,) = (line for line in RAW[script]["lines"] if line["name"] == name)
    return dict(found)


def listed(values: list[str]) -> str:
    return f"{', '.join(values[:-1])} and {values[-1]}"


# ---- what the pages should say ----


def watermarks() -> Iterator[str]:
    def line(mark: str, what: str) -> dict[str, Any]:
        return line_of("published_watermark", f"watermark {mark}: {what}")

    for mark in ("0", "0.02", "0.05", "0.1", "0.15"):
        count = line(mark, "preemptions")
        cells = [mark, f"{count['published']:.0f}", f"{count['ours']:.0f}", f"{count['error']:+.0%}"]
        over = None if mark == "0" else line(mark, "output tok/s over none's")
        gap = None if mark == "0.15" else line(mark, "ITL p99, ms")
        cells += ["", ""] if over is None else [f"{over['published']:.3f}", f"{over['ours']:.3f}"]
        cells += ["", ""] if gap is None else [f"{gap['published']:.1f}", f"{gap['ours']:.1f}"]
        yield row(*cells)


MEASURED = {
    "mean time in queue, s": "queue_s mean",
    "mean from first scheduled to first token, s": "prefill_s mean",
    "mean time to first token, s": "ttft_s mean",
    "first token p99, s": "ttft_s p99",
    "mean between tokens, s": "itl_s mean",
    "mean end to end, s": "e2e_s mean",
    "end to end p50, s": "e2e_s p50",
    "end to end p99, s": "e2e_s p99",
    "makespan, s": "makespan_s",
    "KV in use, mean over time": "KV in use, %, mean over time",
}


def measured_run() -> Iterator[str]:
    (run,) = (run for run in RAW["fidelity_e2e"] if run["run"].startswith("RTX4090"))
    lines = run["results"]["tables alone, all requests"]
    for name, key in MEASURED.items():
        percent = "%" if "%" in key else ""
        figures = [f"{lines[key][word]:#.4g}{percent}" for word in ("measured", "simulated")]
        yield row(name, *figures, f"{lines[key]['error']:+.1%}")


def two_classes() -> Iterator[str]:
    raw = RAW["published_two_classes"]
    for one in raw["served"]:
        name = re.sub("^urgent", "`urgent`", one["arm"])
        if "watermark" in name or name == "first come, first served":
            continue  # in words
        waits = (f"{one[key]:.3f}" for key in ("ttft_p50_s", "ttft_p99_s"))
        rates = (f"{one[key]:,.0f}" for key in ("online_tok_s", "offline_tok_s"))
        yield row(f"{one['speed']:g}", name, *waits, *rates, str(one["preemptions"]))
    tails, more = ([f"{line['ours']:.2f}" for line in raw["lines"][at::2]] for at in (0, 1))
    kept = [f"{float(one['figures']):.2f}" for one in raw["statements"][1::3]]
    yield row("TTFT p99 under vLLM's priorities over ours", "at least 2", *tails, "2.9")
    yield row("offline tokens/s over those under vLLM's priorities", "at least 0.95", *kept, "")
    yield row("all tokens/s over online alone", "at least 1.5", *more, "2.2")


def kv_waste() -> Iterator[str]:
    script = "published_kv_waste"

    def cell(name: str) -> str:
        line = line_of(script, name)
        return f"{line['published']:.1%} / {line['ours']:.1%}"

    for rule in ("Orca, Max", "Orca, Pow2"):
        states, *rest = (cell(f"{rule}: {what}") for what in ("token states", "reserved", "internal"))
        missed = line_of(script, f"{rule}: token states")
        noted = "" if missed["met"] else f" (bar of {missed['bar']:.0%} missed, {missed['error']:+.1%})"
        yield row(rule, states + noted, *rest, cell(f"{rule}: external and others"))
    yield f"| Orca, Oracle | {cell('Orca, Oracle: token states')} | {cell('Orca, Oracle: reserved')} |"
    yield f"| vLLM | {cell('vLLM: token states')} |"
    saved = [line_of(script, f"parallel sampling, {samples} samples: blocks saved") for samples in (2, 6)]
    published, ours = ([f"{line[word]:.1%}" for line in saved] for word in ("published", "ours"))
    yield row("parallel sampling", " to ".join(published), " and ".join(ours))
    bounds = [one["figures"] for one in RAW[script]["statements"][:2]]
    yield "; ".join(f"between {one.replace(' to ', ' and ')}" for one in bounds)


def overflow() -> Iterator[str]:
    raw = RAW["published_overflow"]
    for figure in ("block-size", "evicted-tokens", "sequence-length"):
        for one in raw[figure]:
            costs = (f"{one[key]:.1f}" for key in ("recompute_ms", "link_ms", "swap_ms"))
            yield row(f"{one['level']:,}", f"{one['evicted_tokens']:,}", *costs)
    runs = [run for run in raw["memory"] if run["policy"] == "always-recompute"]
    yield f"{listed([format(run['overhead_s'], '.2f') for run in runs])} s"
    yield f"{listed([str(run['preempted']) for run in runs])} preemptions"
    yield f"({', '.join(format(run['makespan_s'], '.0f') for run in runs)} s)"


def two_gpus() -> Iterator[str]:
    raw = RAW["published_two_gpus"]
    statements = [*raw["statements"], *raw["without a bar"]]
    names = {
        "prompt of one request": "prompt of one request, 128 to 8192 tokens",
        "token of one request": "token of one request",
        "prompt of batches": "prompts of 2 to 32 requests of 512 tokens",
        "token of batches": "token of 2 to 64 requests",
    }
    for key, name in names.items():
        cells = []
        for table in ("without communication", "all-reduces of dgx", "all-reduces of pairs"):
            (found,) = (one for one in statements if one["text"].startswith(f"{table}: {key}"))
            error, signed, cases = found["figures"].split(", ")
            cells.append(f"{error} ({signed.removeprefix('signed ')}), {cases.partition(' cases')[0]}")
        yield row(name, *cells)


def sheets() -> Iterator[str]:
    for one in RAW["published_sheets"]:
        if one["arm"] == "as it is":
            yield " | ".join(f"{quartiles[1]:+.0%}" for quartiles in one["errors"].values()) + " |"


EXPECTED: dict[str, tuple[str, Callable[[], Iterator[str]]]] = {
    "published_watermark": ("published-results.md", watermarks),
    "fidelity_e2e": ("published-results.md", measured_run),
    "published_two_classes": ("published-results.md", two_classes),
    "published_kv_waste": ("published-results.md", kv_waste),
    "published_overflow": ("published-results.md", overflow),
    "published_two_gpus": ("published-results.md", two_gpus),
    "published_sheets": ("hardware-models.md", sheets),
}


@pytest.mark.parametrize("script", EXPECTED)
def test_the_page_has_the_figures_of_the_file(script: str) -> None:
    page, figures = EXPECTED[script]
    text, expected = re.sub(r"\s*\n\s*", " ", read(page)), list(figures())
    assert len(expected) >= 4
    assert [one for one in expected if one not in text] == []


def test_the_outcomes_on_the_page_are_those_of_the_file() -> None:
    page = read("published-results.md")
    for script in ("published_watermark", "published_kv_waste"):
        bars = [line["met"] for line in RAW[script]["lines"] if line["bar"] is not None]
        (outcome,) = (line for line in page.splitlines() if f"`benchmarks/{script}.py` |" in line)
        assert f"{sum(bars)} of {len(bars)} bars" in outcome
    for script in ("published_two_classes", "published_kv_waste", "published_overflow", "published_two_gpus"):
        holds = [one["holds"] for one in RAW[script]["statements"]]
        (outcome,) = (line for line in page.splitlines() if f"`benchmarks/{script}.py` |" in line)
        assert f"{sum(holds)} of {len(holds)} statements" in outcome, script


def test_every_script_is_in_the_file_and_another_is_refused() -> None:
    gathered = tool("published_results")
    scripts = {path.stem for path in (ROOT / "benchmarks").glob("published_*.py")} - {"published_lines"}
    assert set(RAW) == set(gathered.SCRIPTS) == set(EXPECTED) == scripts | {"fidelity_e2e"}
    assert gathered.text_of(RAW) == (DOCS / "published-results.json").read_text()
    command = [sys.executable, str(ROOT / "tools" / "published_results.py")]
    for given in ("other=a.json", "published_sheets=nowhere.json"):
        refused = subprocess.run([*command, given], capture_output=True, text=True, check=False)
        assert refused.returncode == 2 and f"error: {given}: " in refused.stderr


@pytest.mark.parametrize("name", sorted(path.name for path in DOCS.glob("*.json")))
def test_no_folder_of_a_machine_is_among_the_raw_numbers(name: str) -> None:
    assert re.findall(r"[\s'\"](/[^\s/\"]+/[^\s\"]+)", (DOCS / name).read_text()) == []


def test_a_gathered_message_names_the_file_alone() -> None:
    message = "/some/where/run_meta.json: data_parallel_size is 2, 3/4 of it"
    assert tool("published_results").without_folders([message]) == ["run_meta.json: data_parallel_size is 2, 3/4 of it"]
