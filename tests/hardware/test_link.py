"""Links given as text."""

from __future__ import annotations

import pytest

from kvpolicy.hardware.link import SimulatedLink


@pytest.mark.parametrize("text", ["", "fast", "0", "-1", "1e9,-1", "1e9,0,0", "inf", "nan"])
def test_a_wrong_link_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="should be BYTES_PER_S"):
        SimulatedLink.parse(text)


def test_a_link_survives_its_flag() -> None:
    link = SimulatedLink(2.3e8, 0.0071)
    assert SimulatedLink.parse(link.text) == link
