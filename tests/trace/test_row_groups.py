"""Footers tell which row groups may hold what is wanted, and from when to when a core recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpolicy.trace import row_groups
from kvpolicy.trace.row_groups import core_rows, extent_of, scan
from tests.trace.test_window import CLOCK_S, HOUR_S, HOURS, write_log


def test_a_core_recorded_from_its_first_row_to_its_last(tmp_path: Path) -> None:
    write_log(tmp_path)
    extent = extent_of(tmp_path / "core-log")
    assert extent is not None
    assert extent.first_s == CLOCK_S + 30.0
    assert extent.last_s == CLOCK_S + HOURS * HOUR_S - 900.0 + 30.0 + 10.0, "its last outcome"


def test_what_no_preemption_is_asked_for_opens_no_row_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_log(tmp_path)
    monkeypatch.setattr(row_groups, "read_rows", None)
    assert list(core_rows(tmp_path / "core-log", "outcomes", ids=[])) == []
    assert list(scan(tmp_path, "outcomes", preemptions=())) == []
