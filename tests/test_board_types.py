"""The dashboard by Grafana's types. Skipped where node or what `make board` fetches is missing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tools.board_types import BOARD, compiler, errors

FOLDER = Path(__file__).resolve().parent.parent / "out" / "grafana-types"
pytestmark = [
    pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed"),
    pytest.mark.skipif(not compiler(FOLDER).exists(), reason="no @grafana/schema: make board"),
]


def test_the_board_is_of_the_type_dashboard() -> None:
    assert errors(FOLDER, BOARD.read_text()) == ""


def test_what_is_not_of_that_type_is_told() -> None:
    text = BOARD.read_text()
    for right, wrong in (('"schemaVersion"', '"schemaVerison"'), ('"gridPos"', '"gridpos"'), ('"w": 12', '"w": "12"')):
        assert right in text and "error TS" in errors(FOLDER, text.replace(right, wrong)), wrong
