"""What the support matrix says of a test is what the test is marked with, and it has all of its cases. Seen of those
that are collected with this one: the marks of parameters, and which they are, are not known before."""

from __future__ import annotations

import pytest

from tests.feature_record import (
    MARKS,
    NEWEST_ENGINE,
    RECORD,
    WITHOUT_VLLM,
    collected,
    installed_version,
    read,
    unbacked,
    unrecorded,
)

NUMBERED_TESTS = frozenset(
    {
        "tests/vllm/test_soak_tables.py::test_drawn_schedules_of_every_family_are_clean",
    }
)
"""Tests of which a row of 0.32 has a number in the place of its cases' names, or lacks some: they were recorded before
names were, and leave this list when they are recorded again. Nothing may come to it."""


def test_every_recorded_feature_is_still_marked(request: pytest.FixtureRequest) -> None:
    rows, marks = read(RECORD), request.config.stash[MARKS]
    if not marks.keys() & {row["test"] for row in rows}:
        pytest.skip("no test of the record was collected beside this one")
    assert not unbacked(rows, marks), "record these tests again: python -m pytest -p tests.feature_record TEST..."


def test_every_case_is_recorded(request: pytest.FixtureRequest) -> None:
    """Those of the long suite, too, so that a "yes" of the matrix is that of all its cases. What was skipped is on the
    page."""
    if installed_version() != NEWEST_ENGINE:
        pytest.skip(f"not every case is recorded on another version than {NEWEST_ENGINE}")
    cases = {key: names for key, names in collected(request.config).items() if key[1] in (NEWEST_ENGINE, WITHOUT_VLLM)}
    if not cases:
        pytest.skip("no test with a feature was collected beside this one")
    rows = read(RECORD)
    named = [
        test
        for test in NUMBERED_TESTS & {test for *_, test in cases}
        if not unrecorded(rows, {key: names for key, names in cases.items() if key[2] == test})
    ]
    assert not named, f"take these out of NUMBERED_TESTS, as all of their cases are recorded: {sorted(named)}"
    missing = unrecorded(rows, {key: names for key, names in cases.items() if key[2] not in NUMBERED_TESTS})
    assert not missing, "\n".join(["record these: python -m pytest -p tests.feature_record TEST...", *missing])
