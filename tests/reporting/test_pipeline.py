"""`kvpolicy report`: files it writes, arguments it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpolicy.reporting.pipeline import report
from kvpolicy.trace import TraceError


def test_figures_are_written_as_svg_and_png(report_folder: Path) -> None:
    names = {path.name for path in (report_folder / "figures").iterdir()}
    assert {"sequence-length-1.svg", "sequence-length-1.png", "sequence-length-2.svg"} <= names


def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no trace was given"):
        report([], tmp_path / "a.html")
    with pytest.raises(ValueError, match=r"^out is .*a.txt, should end in .html"):
        report([tmp_path], tmp_path / "a.txt")
    with pytest.raises(TraceError, match="no such folder"):
        report([tmp_path / "nothing"], tmp_path / "a.html")
