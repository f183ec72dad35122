"""Numbers are coarser, by less than anybody can measure, and nothing else changes."""

from __future__ import annotations

import pytest

from kvpolicy.trace import SCHEMAS, from_rows
from kvpolicy.trace.resolution import coarse
from tests.trace.test_rows import ROWS


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_only_seconds_and_expected_amounts_change_and_by_less_than_a_clock_tells(name: str) -> None:
    row = {column: value / 3 if isinstance(value, float) else value for column, value in ROWS[name].items()}
    table = from_rows(name, [row, row])
    kept = coarse(table)
    assert kept.schema == table.schema
    for before, after in zip(table.to_pylist(), kept.to_pylist(), strict=True):
        costs = zip(before.pop("costs", []), after.pop("costs", []), strict=True)
        for column, value in before.items():
            assert after[column] == (pytest.approx(value, rel=1e-7, abs=2**-23) if isinstance(value, float) else value)
        for one, other in costs:
            assert other == pytest.approx(one, rel=1e-7)


def test_probabilities_are_as_they_were_and_empty_stays_empty() -> None:
    row = ROWS["decisions"] | {"probabilities": [1 / 3, 2 / 3], "time_s": 1e5 + 1 / 3, "hit_blocks": 1 / 3}
    (kept,) = coarse(from_rows("decisions", [row | {"absence_tokens": None}])).to_pylist()
    assert kept["probabilities"] == [1 / 3, 2 / 3] and kept["absence_tokens"] is None
    assert 0 < abs(kept["time_s"] - (1e5 + 1 / 3)) <= 2**-23
    assert 0 < abs(kept["hit_blocks"] - 1 / 3) < 1e-8
