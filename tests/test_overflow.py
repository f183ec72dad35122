"""Names of figures and of the states that belong to them."""

from __future__ import annotations

import pytest

from kvpolicy import overflow


def test_names_of_states_hold_figure_and_level() -> None:
    assert overflow.figure_and_level(overflow.state_id("memory", 30)) == ("memory", 30)
    assert overflow.figure_and_level("b32-003") is None and overflow.figure_and_level("memory/much") is None
    assert overflow.named(["all"]) == overflow.FIGURES
    with pytest.raises(ValueError, match=r"^figure is heat, should be block-size, evicted-tokens, "):
        overflow.named(["heat"])
