"""Ratios over a few blocks: no interval where so few blocks cannot carry one. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from kvpolicy.stats import bootstrap_ratio

FEWEST = 5
"""Blocks. A bootstrap over fewer goes from the least to the greatest, and that is no 95%."""


def ratio_of(
    above: Sequence[float], below: Sequence[float], rng: random.Random, resamples: int = 2000
) -> dict[str, Any]:
    """Geometric mean of the ratios by block; ``low`` and ``high`` None under :data:`FEWEST` blocks. All above 0."""
    if len(above) < FEWEST:
        logs = [math.log(a / b) for a, b in zip(above, below, strict=True)]
        return {"value": math.exp(math.fsum(logs) / len(logs)), "low": None, "high": None, "blocks": len(logs)}
    return bootstrap_ratio(above, below, rng, resamples=resamples).to_dict() | {"blocks": len(above)}


def interval_text(ratio: Mapping[str, Any]) -> str:
    if ratio["low"] is None:
        return f"too few: {ratio['blocks']} of at least {FEWEST}"
    return f"{ratio['low']:.3f} to {ratio['high']:.3f}"
