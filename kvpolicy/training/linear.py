"""Fitting the linear family: scikit-learn's least squares, no coefficient below 0, on the features as they are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvpolicy.cost.laws import Law, LinearLaw
from kvpolicy.datasets.examples import Example, Examples
from kvpolicy.events import KINDS, Kind
from kvpolicy.regression.nnls import relative_sum

ROUNDS = 10

INPUTS: dict[Kind, tuple[str, ...]] = {
    "recompute": ("recomputed_tokens", "running_requests", "batch_tokens"),
    "swap": ("save_bytes", "load_bytes", "load_segments", "running_requests", "batch_tokens"),
}


def fit_linear(examples: Examples, floor_s: dict[Kind, float]) -> dict[Kind, Law]:
    """One law per option."""
    return {kind: _fit(examples[kind], INPUTS[kind], floor_s[kind]) for kind in KINDS}


def _fit(examples: Sequence[Example], inputs: tuple[str, ...], floor_s: float) -> LinearLaw:
    """Errors count relative to what is predicted, or to the floor where that is more: relative to what was measured,
    single preemptions that noise made cheap would count for all others."""
    cost = np.array([example.engine_s for example in examples])
    design = np.array([[1.0, *(getattr(example.x, name) for name in inputs)] for example in examples])
    expected = np.maximum(cost, max(floor_s, 0.05 * float(np.median(np.abs(cost)))))
    for _ in range(ROUNDS):
        coefficients = relative_sum(design, cost, 1.0 / expected**2)
        expected = np.maximum(design @ coefficients, floor_s)
    return LinearLaw(
        float(coefficients[0]), {name: float(c) for name, c in zip(inputs, coefficients[1:], strict=True) if c > 0}
    )
