"""Arithmetic that numbers and arrays share."""

from __future__ import annotations

import numpy as np

from kvpolicy.arrays import causal_pairs


def test_pairs_worked_by_hand() -> None:
    """Positions 3 to 6 see 4, 5 and 6 tokens, themselves included."""
    assert causal_pairs(3, 6) == 4 + 5 + 6 and isinstance(causal_pairs(3, 6), int)
    assert causal_pairs(0, 4) == 1 + 2 + 3 + 4 and causal_pairs(5, 5) == 0


def test_columns_count_as_numbers_do() -> None:
    start, end = np.array([0.0, 3.0, 5.0]), np.array([4.0, 6.0, 5.0])
    assert causal_pairs(start, end).tolist() == [10.0, 15.0, 0.0]
