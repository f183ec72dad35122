"""The forest's walk, compiled by numba. Apart, so that nothing else needs numba."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numba
import numpy as np

from kvpolicy.cost.compiled import Nodes


def _walk(row: Any, feature: Any, threshold: Any, left: Any, right: Any, leaf: Any, roots: Any) -> float:
    total = 0.0
    for tree in range(len(roots)):
        at = roots[tree]
        while at >= 0:
            at = left[at] if row[feature[at]] <= threshold[at] else right[at]
        total += leaf[~at]
    return total


_compiled = numba.njit(_walk)


def walker(nodes: Nodes) -> Callable[[Sequence[float]], float]:
    """A function of one row, compiled at its first call."""
    whole = [np.array(part, np.int64) for part in (nodes.feature, nodes.left, nodes.right, nodes.roots)]
    feature, left, right, roots = whole
    threshold, leaf = np.array(nodes.threshold, np.float64), np.array(nodes.leaf, np.float64)

    def walk(row: Sequence[float]) -> float:
        return float(_compiled(np.array(row, np.float64), feature, threshold, left, right, leaf, roots))

    return walk
