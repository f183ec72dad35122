"""`kvpolicy export`: a file that a viewer opens, or one line that says what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvpolicy.cli import main
from tests.synthetic import make_trace


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_trace(states=2, repeats=1).write(tmp_path / "trace")
    for out, status in ((tmp_path / "run.json", 0), (tmp_path / "run.pftrace", 2)):
        with pytest.raises(SystemExit) as left:
            main(["export", str(tmp_path / "trace"), "--perfetto", str(out)])
        assert left.value.code == status
    said = capsys.readouterr()
    assert "run.json" in said.out and "events" in said.out
    assert "run.pftrace: trace events are written to a file that ends in .json or .json.gz" in said.err
    assert json.loads((tmp_path / "run.json").read_text())["traceEvents"]
