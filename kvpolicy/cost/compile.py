"""The arithmetic of predictions compiled by numba. Apart, so that nothing else needs numba."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from functools import cache
from typing import Any

import numba
from numba.extending import register_jitable

from kvpolicy import features
from kvpolicy.cost import kernel, laws
from kvpolicy.cost.kernel import Pair
from kvpolicy.regression import conformal

PARTS: tuple[Callable[..., Any], ...] = (
    features.recompute_row, features.swap_row, features.usable, laws.recompute_seconds, laws.swap_seconds,
    laws.linear_seconds, laws.linear_parts, conformal.distance_beyond, conformal.grown,
    kernel.law_parts, kernel.to_edge, kernel.how_far, kernel.table_value,
    kernel.forest_value, kernel.price, kernel.bin_at, kernel.room_at, kernel.times_exp, kernel.option_cost,
    kernel.fill,
)  # fmt: skip
"""All that :func:`~kvpolicy.cost.kernel.pair` calls, callees first."""

_OPTION = (*["float64"] * 7, "boolean", "float64")
_PAIR = ("boolean", "float64", "float64", *_OPTION, *_OPTION)
SIGNATURE = f"Tuple(({', '.join(_PAIR)}))(int64[::1], float64[::1], {', '.join(['float64'] * 12)})"

UNREADABLE = (
    OSError, RuntimeError, EOFError, ValueError, AttributeError, ImportError, IndexError, pickle.UnpicklingError,
)  # fmt: skip
"""What numba raises where there is no place for its cache, or what is there is damaged."""


@cache
def compiled_pair() -> Callable[..., Pair]:
    """:func:`~kvpolicy.cost.kernel.pair`, compiled: some seconds, much less from numba's cache on disk."""
    for part in PARTS:
        register_jitable(part)
    try:
        return _compile(True)
    except UNREADABLE:
        return _compile(False)


def _compile(kept: bool) -> Callable[..., Pair]:
    # numba's cache knows this file's age and the numbers below, but not the functions that are called: their digest
    # among those numbers keeps it from serving arithmetic that has changed since.
    stamp = _stamp()
    whole = register_jitable(kernel.pair)

    def both(n, c, computed, shared, held, size, block, segment, saves, loads, running, batch, free, waiting):  # type: ignore[no-untyped-def]
        assert stamp
        return whole(n, c, computed, shared, held, size, block, segment, saves, loads, running, batch, free, waiting)

    compiled: Callable[..., Pair] = numba.njit(SIGNATURE, cache=kept)(both)
    return compiled


def _stamp() -> int:
    """A number that another version of any function here has another of; never 0."""
    told = hashlib.sha256()
    for part in (*PARTS, kernel.pair):
        code = part.__code__
        named = {name: part.__globals__.get(name) for name in code.co_names}
        numbers = {name: value for name, value in named.items() if isinstance(value, int | float | tuple)}
        told.update(repr((code.co_code, code.co_names, code.co_varnames, code.co_consts, numbers)).encode())
    return int.from_bytes(told.digest()[:7], "big") + 1
