"""The time of one step from its parts, alone and as a table."""

from __future__ import annotations

import numpy as np
import pytest

from kvpolicy.attribution.step_time import StepTimeModel, aftermath, step_seconds, with_aftermath
from tests.attribution.live_engine import MODEL


def test_one_step_is_priced_as_a_table_of_steps() -> None:
    rows = np.array([[300.0, 2, 500, 44000], [5, 5, 900, 0], [0, 0, 0, 0], [64, 4, 700, 1800], [3, 3, 40, 0]])
    expected, before = MODEL.predict(rows), [0.0, 0.0]
    for row, seconds in zip(rows.tolist(), expected, strict=True):
        assert step_seconds(MODEL.fixed_s, MODEL.per_part_s, tuple(row), *before) == pytest.approx(seconds, rel=1e-12)
        before = [aftermath(row[0], row[1]), before[0]]
    assert StepTimeModel.from_dict(MODEL.to_dict()) == MODEL


def test_a_step_that_is_absent_leaves_no_aftermath() -> None:
    """Chunks of 256 and 128 tokens; of the steps 0 to 9, 2 and 5 to 7 are absent."""
    parts = np.array([[256.0, 0, 0, 0], [1, 1, 0, 0], [128, 0, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0]])
    left = with_aftermath(parts, np.array([0, 1, 3, 4, 8, 9]))[:, 4:]
    assert left.tolist() == [[0, 0], [1, 0], [0, 0], [0.5, 0], [0, 0], [0, 0]]
    assert with_aftermath(parts)[:, 4:].tolist() == [[0, 0], [1, 0], [0, 1], [0.5, 0], [0, 0.5], [0, 0]]
    assert with_aftermath(parts[:0]).shape == (0, 6)
