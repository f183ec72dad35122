"""Array types for annotations, arithmetic shared by numbers and arrays, and memory that holds what users wrote."""

from __future__ import annotations

import mmap
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


@overload
def causal_pairs(start: int, end: int) -> int: ...


@overload
def causal_pairs(start: float, end: float) -> float: ...


@overload
def causal_pairs(start: Floats | float, end: Floats) -> Floats: ...


def causal_pairs(start: Any, end: Any) -> Any:
    """(query token, context token) pairs when positions ``start`` to ``end`` are computed, including the diagonal."""
    twice = end * (end + 1) - start * (start + 1)
    return twice // 2 if isinstance(twice, int) else twice / 2


def left_out_of_dumps(pages: mmap.mmap) -> mmap.mmap:
    """The pages, which a core dump of this process leaves out where the system allows it: KV is what users wrote."""
    if hasattr(mmap, "MADV_DONTDUMP"):  # Linux alone has it
        pages.madvise(mmap.MADV_DONTDUMP)
    return pages
