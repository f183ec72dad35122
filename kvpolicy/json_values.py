"""Conversion of values to JSON, which has neither infinity nor NaN."""

from __future__ import annotations

from collections.abc import Collection
from math import isfinite
from typing import Any


def finite(value: Any) -> Any:
    """The value with None for every non-finite number, and with tuples as lists."""
    if isinstance(value, dict):
        return {name: finite(element) for name, element in value.items()}
    if isinstance(value, list | tuple):
        return [finite(element) for element in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def rounded(value: Any, digits: int = 6, left_out: Collection[str] = ()) -> Any:
    """The value with every float to ``digits`` significant digits, without the entries of these names."""
    if isinstance(value, dict):
        return {name: rounded(one, digits, left_out) for name, one in value.items() if name not in left_out}
    if isinstance(value, list | tuple):
        return [rounded(one, digits, left_out) for one in value]
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value
