"""Types of arrays, for whoever names one; and arithmetic that numbers and arrays share."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

Count = TypeVar("Count", int, float, Floats)


def causal_pairs(start: Count, end: Count) -> Count:
    """(query token, context token) pairs when positions ``start`` to ``end`` are computed, the diagonal in.

    Whole numbers, also where they come as floats.
    """
    return (end * (end + 1) - start * (start + 1)) // 2
