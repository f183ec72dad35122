"""JSON whose numbers are numbers: what is read from a file that a user can edit goes through here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import isfinite
from typing import Any

MOST_WHOLE = 2**53
"""Whole numbers beyond it are not exact as floats."""
SHOWN = 24


def loads(text: str) -> Any:
    """Like ``json.loads``; raises ValueError for what it refuses, and for any NaN, infinite or too large number.

    The error names the field, with dots between the names on the way to it.
    """
    value = json.loads(text)
    for field, number in _numbers(value, ""):
        if isinstance(number, float) and not isfinite(number):
            raise ValueError(f"field {field} is {number!r}, which is no number")
        if abs(number) > MOST_WHOLE and isinstance(number, int):
            raise ValueError(f"field {field} is {str(number)[:SHOWN]}..., a whole number too large")
    return value


def _numbers(value: Any, field: str) -> Iterator[tuple[str, int | float]]:
    if isinstance(value, int | float):
        yield field, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _numbers(inner, f"{field}.{name}" if field else name)
    elif isinstance(value, list):
        for inner in value:
            yield from _numbers(inner, field)
