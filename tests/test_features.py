"""The support matrix is what its tests came to, and its tests exist."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.feature_record import (
    FIGURES,
    NEWEST_ENGINE,
    OUTCOMES,
    RECORD,
    WITHOUT_VLLM,
    Key,
    Marks,
    merged,
    unbacked,
    unrecorded,
    with_figures,
)

ROOT = Path(__file__).resolve().parents[1]


def tool() -> ModuleType:
    """`tools/feature_table.py`, which is no package."""
    spec = importlib.util.spec_from_file_location("feature_table", ROOT / "tools" / "feature_table.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TABLE = tool()
ROWS: list[dict[str, Any]] = json.loads(RECORD.read_text())


def test_the_page_is_what_the_record_says() -> None:
    page = TABLE.PAGE.read_text()
    assert page == TABLE.with_table(page, ROWS), "run `python tools/feature_table.py`"


@pytest.mark.parametrize("test", sorted({row["test"] for row in ROWS}))
def test_every_test_of_the_record_exists_with_its_features(test: str) -> None:
    file, _, name = test.partition("::")
    assert (ROOT / file).is_file(), f"docs/features.json names {file}: record it again"
    functions = [node for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.FunctionDef)]
    found = [node for node in functions if node.name == name.split("::")[-1]]
    assert found, f"{file} has no {name}"
    marked, recorded = plain_features(found[0]), {row["feature"] for row in ROWS if row["test"] == test}
    assert not marked or recorded <= marked, f"{test} is not marked with {recorded - marked}: record it again"


def plain_features(function: ast.FunctionDef) -> set[str]:
    """Features in marks of a test without parameters; empty where it has any, whose marks are known once it is
    collected: `tests/vllm/test_feature_marks.py`."""
    marks = [mark for mark in function.decorator_list if isinstance(mark, ast.Call)]
    called = {ast.unparse(mark.func) for mark in marks}
    if not called <= {"pytest.mark.feature", "pytest.mark.skipif"}:
        return set()
    return {
        text for mark in marks if ast.unparse(mark.func) == "pytest.mark.feature" for text in TABLE.texts(mark.args)
    }


def test_the_record_is_of_versions_that_are_claimed() -> None:
    assert {row["version"] for row in ROWS} <= {*TABLE.VERSIONS, WITHOUT_VLLM}


NUMBERED = {f"0.{minor}" for minor in (*range(24, 32), 33)}
"""Versions of which a row has a number in the place of names. None is to be added: what is recorded has names."""


def test_rows_name_their_cases() -> None:
    numbered = {row["version"] for row in ROWS if any(isinstance(row.get(one), int) for one in OUTCOMES)}
    assert numbered == NUMBERED, "take what is named now out of NUMBERED"


def test_the_page_names_what_was_skipped_where_others_passed() -> None:
    row = {"feature": "f", "version": "0.32", "test": "tests/vllm/test_a.py::t", "how": "engine"}
    rows = [
        row | {"passed": ["a"], "skipped": ["b", "c"]}, row | {"test": "tests/vllm/test_a.py::u", "skipped": [""]},
        row | {"test": "tests/vllm/test_a.py::v", "skipped": 3}, row | {"version": "0.31", "skipped": ["a"]},
        row | {"feature": "g", "passed": ["a"]},
    ]  # fmt: skip
    cells = ["`vllm/test_a.py::t`: b; c", "`vllm/test_a.py::u`", "`vllm/test_a.py::v`: 3"]
    assert TABLE.skipped(rows) == [f"| f | 0.32 | {cell} |" for cell in cells]
    assert "| skipped where the table says more | vLLM | cases |" in TABLE.table(rows)


def test_no_feature_fails() -> None:
    assert not [row for row in ROWS if row.get("failed")]


def test_versions_without_a_real_engine_are_those_of_which_no_engine_was_recorded() -> None:
    """Each by its number: a range would name versions between, of which an engine may have been tested."""
    named = [name.partition(" in a real engine")[0] for name in TABLE.NOT_TESTED if name.startswith("vLLM 0.")]
    without_engine = [version for part in named for version in part.removeprefix("vLLM ").split(", ")]
    with_engine = {row["version"] for row in ROWS if row["how"] == "engine" and row.get("passed")}
    assert sorted(without_engine) == [version for version in TABLE.VERSIONS if version not in with_engine]


def test_the_page_of_families_has_what_was_under_pressure() -> None:
    page = " ".join((ROOT / "docs" / "model-families.md").read_text().split())
    for test in ("test_an_order_under_pressure", "test_two_ranks_under_pressure"):
        rows = [row for row in ROWS if row["test"].endswith(f"::{test}")]
        passed = {case for row in rows for case in row.get("passed", [])}
        assert f"it was run for all {len(passed)} families" in page, test


def test_what_is_marked_and_was_never_recorded_is_named() -> None:
    def unrecorded(rows: list[dict[str, Any]]) -> set[str]:
        lines = TABLE.table(rows)
        begin = next(i for i, line in enumerate(lines) if line.startswith("| marked in tests"))
        return {line.split(" | ")[0].removeprefix("| ") for line in lines[begin + 2 : lines.index("", begin)]}

    marked = {"tensor parallelism", "MLA", "speculation by ngram", "structured output", "LoRA", "chunked prefill"}
    marked |= {"a profile of GDN states", "fp8 KV cache", "resets of the prefix cache"}
    assert marked <= unrecorded([])
    row = {"feature": "MLA", "version": "0.32", "test": "tests/vllm/test_pressed.py::t", "how": "engine", "passed": 1}
    assert marked - unrecorded([row]) == {"MLA"}


def test_a_cell_says_the_most_that_was_shown() -> None:
    def row(how: str, **counts: object) -> dict[str, Any]:
        return {"how": how} | counts

    assert TABLE.cell([]) == ""
    assert TABLE.cell([row("engine", skipped=["a"])]) == ""
    assert TABLE.cell([row("scheduler", passed=1), row("engine", passed=2, skipped=1)]) == "yes"
    assert TABLE.cell([row("refused", passed=1), row("engine", skipped=1)]) == "refused"
    assert TABLE.cell([row("scheduler", passed=1), row("engine", passed=9, failed=1)]) == "**fails**"


MARKED = """
import pytest

@pytest.mark.feature("shown")
@pytest.mark.parametrize("version", ["0.30.0", ("0.31.0", 4)])
def test_of_versions(version):
    assert version != WRONG and version[0] != WRONG

@pytest.mark.feature("turned down", refused=True)
def test_of_none():
    pass

@pytest.mark.feature("turned down at first", refused=True, before="0.31")
@pytest.mark.parametrize("version", ["0.30.0", "0.31.0"])
def test_of_some(version):
    pass

@pytest.mark.feature("shown")
def test_skipped():
    pytest.skip("no")
"""


@pytest.mark.parametrize("wrong", ["", "0.31.0"])
def test_outcomes_are_recorded_by_version_and_others_stay(wrong: str, tmp_path: Path) -> None:
    (tmp_path / "test_made.py").write_text(MARKED.replace("WRONG", repr(wrong)))
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  feature: made\n")
    record = tmp_path / "record.json"
    stays = {"feature": "another", "version": "0.24", "test": "tests/test_other.py::test_it", "how": "engine"}
    record.write_text(json.dumps([stays | {"passed": 2}]))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.feature_record", "-p", "no:cacheprovider"]
    environment = os.environ | {"KVPOLICY_FEATURES": str(record), "PYTHONPATH": str(ROOT)}
    subprocess.run([*command, str(tmp_path)], env=environment, cwd=tmp_path, capture_output=True, check=False)
    rows = {(row["feature"], row["version"]): row for row in json.loads(record.read_text())}
    assert rows["another", "0.24"]["passed"] == 2
    assert rows["shown", "0.30"]["passed"] == ["0.30.0"]
    assert rows["shown", "0.31"].get("failed" if wrong else "passed") == ["version1"]
    assert rows["turned down", WITHOUT_VLLM]["how"] == "refused"
    assert rows["shown", WITHOUT_VLLM]["skipped"] == [""]
    at_first = [version for feature, version in rows if feature == "turned down at first"]
    assert at_first == ["0.30"], "from 0.31 on it is served"


CASES_OF_ONE = """
import pytest

@pytest.mark.feature("shown")
@pytest.mark.parametrize("case", ["run", "left out"])
def test_it(case, record_property):
    record_property("exactness", {"family": "f", "case": case, "seed": 5, "amx": False})
    assert case != "fails"

@pytest.mark.feature("shown")
def test_of_one_case():
    pass
"""


def recorded(folder: Path, *arguments: str) -> str:
    """What pytest says, with the project's own record of what is collected."""
    (folder / "conftest.py").write_text("from tests.feature_record import note_marks as pytest_itemcollected\n")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n  feature: made\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.feature_record", "-p", "no:cacheprovider", str(folder)]
    files = {"KVPOLICY_FEATURES": str(folder / "features.json"), "KVPOLICY_EXACTNESS": str(folder / "exactness.json")}
    environment = os.environ | files | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, *arguments], env=environment, cwd=folder, capture_output=True, text=True, check=False
    )
    return done.stdout


def test_cases_without_a_record_are_listed(tmp_path: Path) -> None:
    (tmp_path / "test_made.py").write_text(CASES_OF_ONE)
    recorded(tmp_path, "-q", "-k", "run")
    (row,) = json.loads((tmp_path / "features.json").read_text())
    assert row["passed"] == ["run"]
    listed = recorded(tmp_path, "--collect-only", "-qq").partition("without a record")[2].splitlines()[1:]
    lacking = ("test_it[left out]", "test_of_one_case")
    assert listed[:2] == [f"test_made.py::{test} on {WITHOUT_VLLM}: shown" for test in lacking]
    assert not (tmp_path / "features.json").read_text().count("left out"), "nothing has run"


def test_figures_of_a_test_that_passed_are_recorded(tmp_path: Path) -> None:
    (tmp_path / "test_made.py").write_text(CASES_OF_ONE.replace('"left out"', '"fails"'))
    recorded(tmp_path, "-q")
    figures = {"family": "f", "case": "run", "seed": 5, "amx": False, "version": WITHOUT_VLLM}
    assert FIGURES == "exactness" and json.loads((tmp_path / "exactness.json").read_text()) == [figures]


def test_figures_of_one_kind_of_cpu_stand_side_by_side() -> None:
    """Newer ones in the place of those of the same case and prompt; nothing is done to other families and versions."""
    row = {"version": "0.32", "family": "f", "case": "a", "seed": 5, "amx": True, "difference": 0.1}
    stay = [row | {"version": "0.31"}, row | {"family": "g"}]
    assert with_figures([*stay, row], [row | {"difference": 0.2}]) == [stay[0], row | {"difference": 0.2}, stay[1]]
    assert with_figures([*stay, row], [row | {"seed": 6}]) == [stay[0], row, row | {"seed": 6}, stay[1]]
    other = row | {"case": "b", "amx": False}
    assert with_figures([*stay, row], [other]) == [stay[0], other, stay[1]]


def test_a_case_is_recorded_once_a_row_names_it() -> None:
    """Whatever it came to. Of a row with a number none is."""
    cases: dict[Key, set[str]] = {("f", NEWEST_ENGINE, "t"): {"a", "b", ""}, ("g", NEWEST_ENGINE, "t"): {"a"}}
    rows = [ROW | {"version": NEWEST_ENGINE, "passed": ["a"], "skipped": ["b"]}]
    assert unrecorded(rows, cases) == [f"t on {NEWEST_ENGINE}: f", f"t[a] on {NEWEST_ENGINE}: g"]
    assert len(unrecorded([ROW | {"version": NEWEST_ENGINE, "passed": 3}], cases)) == 4


def test_a_row_is_backed_by_a_mark_of_its_test() -> None:
    """By feature, way and version; nothing is known of a test that was not collected."""
    marks: Marks = {
        "t": [(pytest.mark.feature("f").mark, "engine"), (pytest.mark.feature("g", before="0.32").mark, "refused")],
        "u": [],
    }
    backed = [ROW, ROW | {"feature": "g", "how": "refused", "version": "0.31"}, ROW | {"test": "not collected"}]
    others = [{"feature": "g"}, {"how": "scheduler"}, {"feature": "g", "how": "refused"}, {"test": "u"}]
    stale = [ROW | other for other in others]
    assert unbacked(backed + stale, marks) == stale


ROW: dict[str, Any] = {"feature": "f", "version": "0.32", "test": "t", "how": "engine"}


@pytest.mark.parametrize("passed", [4, ["a", "b"]])
def test_skipping_a_test_forgets_nothing(passed: object) -> None:
    row = ROW | {"passed": passed}
    assert merged([row], {("f", "0.32", "t"): ("engine", {"a": "skipped", "b": "skipped"})}) == [row]


def test_a_number_of_skipped_cases_goes_once_they_are_skipped_by_name() -> None:
    (row,) = merged([ROW | {"skipped": 2}], {("f", "0.32", "t"): ("engine", {"a": "skipped", "b": "skipped"})})
    assert row == ROW | {"skipped": ["a", "b"]}


def test_pieces_of_a_test_add_up() -> None:
    """Of cases that the test has still, and with the newest outcome of each."""
    row = ROW | {"passed": ["a", "b", "gone"], "skipped": ["c"]}
    new = {("f", "0.32", "t"): ("engine", {"b": "failed", "c": "passed", "d": "skipped"})}
    expected = ROW | {"passed": ["a", "c"], "failed": ["b"], "skipped": ["d"]}
    assert merged([row], new, {"t": {"f": {"a", "b", "c", "d"}}}) == [expected]
    (alone,) = merged([row], new)
    assert alone["passed"] == ["a", "c", "gone"], "nothing is known of the cases that were not collected"


def test_a_number_without_names_goes_once_its_test_is_run_again() -> None:
    (row,) = merged([ROW | {"passed": 4}], {("f", "0.32", "t"): ("engine", {"a": "passed", "b": "skipped"})})
    assert row == ROW | {"passed": ["a"], "skipped": ["b"]}


def test_what_a_test_backs_no_more_goes_once_it_is_run_again() -> None:
    row = ROW | {"how": "refused", "passed": [""]}
    others, named = [row | {"test": "u"}, row | {"feature": "g"}], {"g": {""}}
    ran = {("g", "0.32", "t"): ("refused", {"": "passed"})}
    assert merged([row, *others], ran, {"t": named, "u": named}) == others
    both = {"t": {"f": {""}} | named}
    assert merged([row], {("g", "0.33", "t"): ("engine", {"": "passed"})}, both)[0] == row
    assert merged([row], ran, both) == [row, row | {"feature": "g"}], "one of its parameters backs it"
