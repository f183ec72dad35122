"""The progress bar of a grid: on a terminal alone."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from kvpolicy.study.progress import MAX_CHARACTERS, bar


@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_counts_on_a_terminal_and_nowhere_else(terminal: bool) -> None:
    shown = StringIO()
    with bar(Console(file=shown, force_terminal=terminal, width=200)) as update:
        update(3, 12, "w" * (MAX_CHARACTERS + 1))
    text = shown.getvalue()
    assert ("3/12" in text) is terminal
    assert text.count("w") % MAX_CHARACTERS == 0, "long words are cut"
