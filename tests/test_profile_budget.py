"""A recorded profile is replayed with less time, and the page has the figures of the raw numbers."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from kvpolicy.errors import InputError
from kvpolicy.trace import Trace
from kvpolicy.training import split
from kvpolicy_vllm.bench.budget import coarse_first
from tests.test_benchmarks import ROOT, run

SHIPPED = ROOT / "traces" / "cpu-llama-native"
ALL_MINUTES = 1e3


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return import_module("recorded_profile")


@pytest.fixture
def profile(recorded: Any) -> Any:
    return recorded.Profile.of(SHIPPED)


def order_of(measured: dict[str, list[Any]], core: str) -> list[str]:
    """The states that were measured, in the order of their first repeats."""
    windows = [one.window for one in measured[core] if one.is_counted]
    return list(dict.fromkeys(window.state_id for window in windows if not window.state_id.startswith("check-")))


def test_with_time_enough_every_order_measures_all_that_was_recorded(recorded: Any, profile: Any) -> None:
    whole = {engine.core: set(map(id, engine.windows)) for engine in profile.engines}
    assert sum(map(len, whole.values())) == profile.trace.table("windows").num_rows
    for order in recorded.ORDERS:
        measured = recorded.replayed(profile, set(), ALL_MINUTES, order, random.Random(0))
        assert {core: set(map(id, some)) for core, some in measured.items()} == whole, order


def test_the_trace_of_all_windows_is_the_profile(recorded: Any, profile: Any) -> None:
    every = {engine.core: engine.windows for engine in profile.engines}
    cut = recorded.cut(profile.trace, every)
    assert {name: table.num_rows for name, table in cut.tables.items()} == {
        name: table.num_rows for name, table in profile.trace.tables.items()
    }
    halves = {core: windows[: len(windows) // 2] for core, windows in every.items()}
    less = recorded.cut(profile.trace, halves)
    for name in ("windows", "steps", "decisions", "outcomes", "requests", "transfers"):
        assert 0 < less.table(name).num_rows < profile.trace.table(name).num_rows, name
    assert set(less.table("outcomes")["preemption_id"].to_pylist()) == set(
        less.table("decisions")["preemption_id"].to_pylist()
    )


def test_less_time_is_spent_in_the_order_of_the_profile(recorded: Any, profile: Any) -> None:
    """Nothing of a state that is held out, the extremes first, and no longer than was given and one repeat takes."""
    minutes, first = 0.7, profile.engines[0]
    held_out = {state.name for state in split(profile.states, 0)[1]}
    measured = recorded.replayed(profile, held_out, minutes, recorded.LIMITED, random.Random(0))
    assert list(measured) == [first.core], "the second engine would start when the time is over"
    states = order_of(measured, first.core)
    there = [state for state in first.job.states if state.state_id not in held_out]
    assert states == [state.state_id for state in coarse_first(there)][: len(states)] and 12 < len(states) < len(there)
    took_s = profile.start_s + sum(one.end_s - one.begin_s for one in measured[first.core])
    assert 0.0 <= took_s - 60 * minutes < 5.0
    grid = order_of(recorded.replayed(profile, held_out, minutes, recorded.GRID, random.Random(0)), first.core)
    assert grid == [state.state_id for state in there][: len(grid)] != states
    drawn = [
        order_of(recorded.replayed(profile, held_out, minutes, recorded.RANDOM, random.Random(seed)), first.core)
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2] and not held_out & {*states, *grid, *drawn[0], *drawn[2]}


def test_a_profile_that_is_not_whole_is_refused(recorded: Any, profile: Any, tmp_path: Path) -> None:
    trace = profile.trace
    core, header = next(iter(trace.headers.items()))
    left_out = replace(header, noise={**header.noise, "left_out": {"b32-001": 1}})
    with pytest.raises(InputError, match=f"core {core}: left out 1 states"):
        recorded.engines_of(Trace(dict(trace.headers) | {core: left_out}, trace.tables))
    Trace({core: header}, {name: of_core(table, core) for name, table in trace.tables.items()}).write(tmp_path / "one")
    done = run("profile_budget.py", "--profile", str(tmp_path / "one"))
    assert done.returncode == 2 and "has to have engines that were started one after the other" in done.stderr


def of_core(table: pa.Table, core: str) -> pa.Table:
    return table.filter(pc.equal(table["core"], core))


def test_orders_are_compared_by_what_is_learned_from_them(tmp_path: Path) -> None:
    """Half a minute goes into the engine's start: no order measures the states that a model takes."""
    file = tmp_path / "out.json"
    (page := tmp_path / "page.md").write_text("Before.\n\n<!-- profile budget -->\n\n| old |\n\nBehind.\n")
    flags = ("--minutes", "0.5", "2", "--draws=3", f"--json={file}", f"--page={page}")
    done = run("profile_budget.py", "--profile", str(SHIPPED), *flags)
    assert done.returncode == 0, done.stderr
    short, _, _, *long = json.loads(file.read_text())
    assert max(short["states"]) < 12 and short["recompute"] == [None] * 3
    assert [one["order"] for one in long] == ["--minutes", "random", "grid"]
    for one in long:
        assert min(one["states"]) > 40 and all(0.0 < error < 0.5 for error in one["recompute"])
    assert "no model" in done.stdout and "--minutes over random" in done.stdout
    lines = page.read_text().splitlines()
    assert (
        lines[4].startswith("| profile | minutes |") and lines[-2:] == ["", "Behind."] and len(lines) == 4 + 2 + 6 + 2
    )
    refused = run("profile_budget.py", "--draws", "0")
    assert refused.returncode == 2 and "--draws and --minutes should be above 0" in refused.stderr


def test_the_table_on_the_page_is_that_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    budget = import_module("profile_budget")
    results = [budget.Found(**row) for row in json.loads((ROOT / "docs" / "profile-budget.json").read_text())]
    page = (ROOT / "docs" / "own-server.md").read_text()
    assert {one.profile for one in results} >= {folder.name for folder in budget.SHIPPED}
    assert {len(one.states) for one in results} == {20} and budget.drawn(page, results) == page
    first = budget.drawn(f"Before.\n\n{budget.COMMENT}\n\nBehind.\n", results)
    assert first.endswith(" |\n\nBehind.\n") and budget.drawn(first, results) == first, "a page without a table yet"
    for wrong in ("no table", f"{budget.COMMENT}\n| unspaced |\n"):
        with pytest.raises(InputError, match="should stand once"):
            budget.drawn(wrong, results)
