"""Conversion of values to JSON, which has neither infinity nor NaN."""

from __future__ import annotations

from math import isfinite
from typing import Any


def finite(value: Any) -> Any:
    """The value with None for every non-finite number, and with tuples as lists."""
    if isinstance(value, dict):
        return {name: finite(element) for name, element in value.items()}
    if isinstance(value, list | tuple):
        return [finite(element) for element in value]
    return None if isinstance(value, float) and not isfinite(value) else value
