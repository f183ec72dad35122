"""Measured step times under a known law."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvpolicy.arrays import Floats
from kvpolicy.regression.ceilings import LAUNCH, Ceilings

COLUMNS = ("tokens", "pairs", "batch")


PHYSICS = Ceilings(((LAUNCH,), ("tokens",), ("pairs",)), {"tokens": "token"})


def measured(
    rows: int, seed: int = 0, bend: float = 0.3, noise: float = 0.02, most: float = 4000
) -> tuple[Floats, Floats]:
    """Prefill times under a known law, of up to so many tokens, with what no roofline knows of (``bend``)."""
    rng = np.random.default_rng(seed)
    tokens = np.exp(rng.uniform(np.log(16), np.log(most), rows)).round()
    x = np.column_stack([tokens, tokens * (tokens + 1) / 2, rng.uniform(0, 2000, rows)])
    return x, law(x, bend) * np.exp(rng.normal(0, noise, rows))


def law(x: Floats, bend: float = 0.3) -> Floats:
    return np.exp(bend * np.sin(x[:, 2] / 300)) * (1e-3 + 2e-5 * x[:, 0] + 3e-9 * x[:, 1])


def mean_error(made: Any, x: Floats, bend: float = 0.3) -> float:
    return float(np.abs(made.predict(x) / law(x, bend) - 1).mean())
