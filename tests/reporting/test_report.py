"""The report: what it reads out of traces, what it claims, and that one file holds all of it."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from kvpolicy import overflow, trace
from kvpolicy.cli import main
from kvpolicy.overflow import FIGURES
from kvpolicy.reporting.findings import MOMENTS, Finding, findings, lengths, missing, pool_changes
from kvpolicy.reporting.measurements import Mark, Material, ServedRun, material
from kvpolicy.reporting.pipeline import report
from kvpolicy.trace import Trace, TraceError
from tests.synthetic import CostLaw, make_trace
from tests.synthetic_steps import with_steps


def told(found: Material, figure: str) -> dict[str, Finding]:
    return {one.claim: one for one in findings(found, figure, np.random.default_rng(0))}


def relabelled(given: Trace, names: dict[str, str]) -> Trace:
    """With other state ids, in decisions and windows."""
    tables = dict(given.tables)
    for name in ("decisions", "windows"):
        table = tables[name]
        ids = [names.get(one, one) for one in table["state_id"].to_pylist()]
        at = table.schema.get_field_index("state_id")
        tables[name] = table.set_column(at, table.schema.field(at), pa.array(ids, pa.string()))
    return Trace(given.headers, tables)


def test_a_profile_fills_the_figure_of_lengths_and_says_what_it_cannot() -> None:
    found = material(make_trace(states=40, repeats=2))
    assert {figure for figure in FIGURES if not missing(found, figure)} == {"sequence-length"}
    assert "characterize --figure block-size" in missing(found, "block-size")
    assert len(lengths(found)) == 40 * 2 * 2
    assert not findings(found, "memory", np.random.default_rng(0))
    with pytest.raises(ValueError, match="figure is 'heat', should be one of block-size"):
        missing(found, "heat")


def test_a_law_that_grows_is_found_to_grow() -> None:
    found = told(material(make_trace(states=40, repeats=2)), "sequence-length")
    for kind in ("recompute", "swap"):
        assert found[f"the cost of {kind} grows with the number of tokens"].evidence.answer == "yes"


@pytest.mark.parametrize(("s_per_byte", "answer"), [(1e-10, "yes"), (4e-7, "no")])
def test_whether_swap_is_better_for_long_sequences_follows_the_link(s_per_byte: float, answer: str) -> None:
    law = CostLaw(s_per_byte=s_per_byte, copy_latency_s=0.0, s_per_segment=0.0)
    found = told(material(make_trace(states=40, repeats=2, law=law)), "sequence-length")
    one = found["swap costs less than recompute for long sequences"]
    assert one.evidence.answer == answer and one.evidence.count == 14
    assert one.sentence().startswith("holds here: swap costs" if answer == "yes" else "does not hold here: swap costs")


def test_block_sizes_are_told_by_windows_that_are_named_after_them() -> None:
    given = make_trace(states=2, repeats=6, block_sizes=(32, 64))
    names = {
        row["state_id"]: overflow.state_id("block-size", row["block_size"])
        for row in given.rows("decisions", ("state_id", "block_size"))
    }
    found = material(relabelled(given, names))
    assert missing(found, "block-size") == "" and {one.level for one in found.overflows_of("block-size")} == {32, 64}
    claims = told(found, "block-size")
    assert claims["pinned memory beats pageable at blocks of 64"].evidence.answer == "cannot tell"
    assert "accelerator" in claims["pinned memory beats pageable at blocks of 64"].note
    assert claims["the cost of swap falls as blocks grow"].evidence.why.endswith("at 3 are needed")


def test_a_discarded_window_and_its_second_try_are_told_apart() -> None:
    """They have the same labels; the first one's steps are others."""
    given = make_trace(states=20, repeats=1)
    rows = given.rows("windows")
    first = next(row for row in rows if row["arm"] == "swap")
    rows = [row | {"discarded": "a request finished"} if row is first else row for row in rows]
    tables = dict(given.tables) | {"windows": with_cores("windows", rows)}
    whole, less = material(given), material(Trace(given.headers, tables))
    assert len(less.overflows) == len(whole.overflows) - 1
    assert less.left_out == {"overflows in discarded windows": 1}


def with_cores(name: str, rows: Sequence[dict[str, Any]]) -> pa.Table:
    return trace.from_rows(name, rows).append_column("core", pa.array([row["core"] for row in rows], pa.string()))


def test_what_is_named_after_a_level() -> None:
    assert overflow.figure_and_level(overflow.state_id("memory", 30)) == ("memory", 30)
    assert overflow.figure_and_level("b32-003") is None and overflow.figure_and_level("memory/much") is None
    assert overflow.named(["all"]) == overflow.FIGURES
    with pytest.raises(ValueError, match=r"^figure is heat, should be block-size, evicted-tokens, "):
        overflow.named(["heat"])


def served_run(**more: Any) -> ServedRun:
    """Steps of 10 ms, one in ten of 50 ms and bringing somebody back; the host pool mirrors the device's cache."""
    rng = random.Random(0)
    slow = [number % 10 == 0 for number in range(200)]
    duration_s = [0.05 if one else 0.01 for one in slow]
    used = [rng.uniform(0.5, 1.0) for _ in slow]
    made = ServedRun(
        figure="timeline", level=12, arm="swap", repeat=0, makespan_s=sum(duration_s), overhead_s=1.0, unattributed=0,
        preemptions={"recompute": 0, "swap": 3}, requests=32, scaling="", end_s=tuple(np.cumsum(duration_s).tolist()),
        duration_s=tuple(duration_s), decoded=(4,) * 200, used_share=tuple(used),
        host_bytes=tuple((1 - one) * 2**26 for one in used), running=(4,) * 200, waiting=(0,) * 200,
        returning=tuple(slow), preempted=(), resumed=(),
    )  # fmt: skip
    return replace(made, **more)


def with_runs(*runs: ServedRun) -> Material:
    return replace(material(make_trace(states=4, repeats=1)), runs=runs)


def test_spikes_where_requests_come_back_and_a_pool_that_mirrors_the_cache() -> None:
    found = told(with_runs(served_run()), "timeline")
    assert [one.evidence.answer for one in found.values()] == ["yes", "yes"]
    assert len(pool_changes(served_run())) == MOMENTS


def test_spikes_elsewhere_and_a_pool_that_follows_the_cache() -> None:
    run = served_run()
    found = with_runs(replace(run, returning=tuple(not one for one in run.returning), host_bytes=tuple(run.used_share)))
    assert [one.evidence.answer for one in told(found, "timeline").values()] == ["no", "no"]


def test_overhead_that_falls_with_memory_and_is_lowest_at_thirty() -> None:
    cost_s = {10: 9.0, 20: 6.0, 30: 1.0, 40: 2.0, 60: 5.0}
    runs = [
        served_run(figure="memory", level=level, repeat=repeat, arm="recompute", overhead_s=seconds + 0.1 * repeat)
        for level, seconds in cost_s.items()
        for repeat in range(3)
    ]
    found = told(with_runs(*runs), "memory")
    assert [one.evidence.answer for one in found.values()] == ["yes", "yes"]


def run(arguments: list[str]) -> None:
    """The command line, which ends by leaving."""
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 0


class Outside(HTMLParser):
    """What a page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.svgs = 0

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.svgs += tag == "svg"
        for name, value in attributes:
            wanted = name in ("src", "href", "xlink:href", "srcset", "data")
            if wanted and value and not value.startswith(("#", "data:")):
                self.found.append(f"{tag} {name} {value}")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("matplotlib")
    pytest.importorskip("jinja2")
    folder = tmp_path_factory.mktemp("report")
    make_trace(states=12, repeats=2).write(folder / "native")
    link = {"kind": "simulated", "bytes_per_s": 1e8, "latency_s": 0.005}
    make_trace(seed=1, states=12, repeats=2, link=link, name="slow").write(folder / "slow")
    arguments = ["report", str(folder / "native"), str(folder / "slow"), "--out", str(folder / "page.html")]
    run([*arguments, "--figures", str(folder / "figures"), "--json", str(folder / "found.json")])
    return folder


def test_one_page_that_fetches_nothing(written: Path) -> None:
    text = (written / "page.html").read_text()
    page = Outside()
    page.feed(text)
    assert page.found == [] and page.svgs >= 2
    assert not re.search(r"url\((?!#)|@import|<script", text)
    assert "prefers-color-scheme: dark" in text and 'name="viewport"' in text


def test_every_id_that_is_used_is_there_once(written: Path) -> None:
    """Two figures must not clip or mark each other."""
    text = (written / "page.html").read_text()
    used = {*re.findall(r'xlink:href="#([^"]+)"', text), *re.findall(r"url\(#([^)]+)\)", text)}
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert used and all(ids.count(one) == 1 for one in used)


def test_links_are_labelled_and_what_is_lacking_is_said(written: Path) -> None:
    text = (written / "page.html").read_text()
    assert "native link" in text and "simulated link, 0.1 GB/s and 5 ms" in text
    assert "at least 20 are needed" in text
    assert "Not drawn:" in text
    found = json.loads((written / "found.json").read_text())
    assert set(found) == {"native link", "simulated link, 0.1 GB/s and 5 ms"}


def test_figures_are_written_as_svg_and_png(written: Path) -> None:
    names = {path.name for path in (written / "figures").iterdir()}
    assert {"sequence-length-1.svg", "sequence-length-1.png", "sequence-length-2.svg"} <= names


def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no trace was given"):
        report([], tmp_path / "a.html")
    with pytest.raises(ValueError, match=r"^out is .*a.txt, should end in .html"):
        report([tmp_path], tmp_path / "a.txt")
    with pytest.raises(TraceError, match="no such folder"):
        report([tmp_path / "nothing"], tmp_path / "a.html")


def test_a_served_run_has_its_own_memory_and_its_own_requests() -> None:
    """One engine serves under several memories, one run after the other: the header has the largest."""
    given = with_steps(make_trace(states=12, repeats=1))
    core, header = next(iter(given.headers.items()))
    steps = sorted((row for row in given.rows("steps") if row["core"] == core), key=lambda row: row["step"])
    half = len(steps) // 2
    window = {
        "state_id": "memory/10", "arm": "recompute", "repeat": 0, "cause": "memory", "duration_s": 1.0,
        "first_step": steps[half]["step"], "last_step": steps[-1]["step"], "preemption_id": None, "discarded": "",
        "core": core,
    }  # fmt: skip
    arrivals_s = [steps[0]["start_s"] - 1, steps[half]["start_s"], steps[half + 1]["start_s"]]
    asked = {
        "first_token_s": None, "last_token_s": None, "prompt_tokens": 8, "output_tokens": 8, "preemptions": 0,
        "recomputed_tokens": 0, "loaded_tokens": 0, "finish": "length", "core": core,
    }  # fmt: skip
    requests = [asked | {"request": f"r{number}", "arrival_s": at} for number, at in enumerate(arrivals_s)]
    tables = dict(given.tables) | {
        "windows": with_cores("windows", [*given.rows("windows"), window]),
        "requests": with_cores("requests", requests),
    }
    told = replace(header, noise=dict(header.noise) | {"device_blocks": {"memory/10": 40}}, notes="scaled by half")
    (run,) = material(Trace(dict(given.headers) | {core: told}, tables)).runs
    assert run.used_share == pytest.approx([row["used_blocks"] / 40 for row in steps[half:]])
    assert run.scaling == "scaled by half"
    assert run.requests == 2, "the first was served before"


def test_every_figure_can_be_drawn() -> None:
    pytest.importorskip("matplotlib")
    figures = import_module("kvpolicy.reporting.figures")
    marks = (Mark(0.5, "swap"), Mark(0.7, "recompute"))
    runs = [
        served_run(figure=figure, level=level, arm=arm, repeat=repeat, preempted=marks, resumed=marks)
        for figure, level in (("memory", 10), ("memory", 30), ("timeline", 12))
        for arm in ("recompute", "swap", "learned")
        for repeat in range(2)
    ]
    given = make_trace(states=6, repeats=2, block_sizes=(32, 64))
    rows = given.rows("decisions", ("state_id", "block_size"))
    sizes = material(relabelled(given, {row["state_id"]: f"block-size/{row['block_size']}" for row in rows}))
    evicted = material(relabelled(given, {row["state_id"]: f"evicted-tokens/{row['block_size']}" for row in rows}))
    every = replace(with_runs(*runs), overflows=(*material(given).overflows, *sizes.overflows, *evicted.overflows))
    for figure in FIGURES:
        assert not missing(every, figure)
        once, again = (figures.svg(figures.draw(every, figure), figure) for _ in range(2))
        assert once == again and once.count("<path") > 10, figure
    assert "tokens evicted in one overflow" in figures.svg(figures.draw(every, "evicted-tokens"), "a")
