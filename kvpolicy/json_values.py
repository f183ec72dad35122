"""Values as JSON has them, which knows neither infinity nor NaN."""

from __future__ import annotations

from math import isfinite
from typing import Any


def finite(value: Any) -> Any:
    """The value with None for every number that is not finite; tuples as lists."""
    if isinstance(value, dict):
        return {name: finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not isfinite(value) else value
