"""Fits the step-time model of :mod:`kvpolicy.attribution.step_time` to a trace's undisturbed steps."""

from __future__ import annotations

import numpy as np

from kvpolicy.arrays import Floats
from kvpolicy.attribution.step_time import (
    AFTERMATH_STEPS,
    PARTS,
    HeldOutError,
    StepTimeModel,
    medians,
    with_aftermath,
)
from kvpolicy.regression.nnls import relative_fit, typical_floor
from kvpolicy.trace import TraceError

__all__ = ["AFTERMATH_STEPS", "PARTS", "HeldOutError", "StepTimeModel", "fit_step_time", "with_aftermath"]

MIN_STEPS = 20
FOLDS = 5
BLOCK_STEPS = 20
"""Successive steps that are held out together, because neighbouring steps are alike."""


def fit_step_time(design: Floats, duration_s: Floats, fitted_on: str) -> StepTimeModel:
    """Fit a step-time model to undisturbed steps in order of execution; ``design`` from :func:`with_aftermath`.

    Raises TraceError for fewer than :data:`MIN_STEPS` steps.
    """
    if len(duration_s) < MIN_STEPS:
        raise TraceError(
            f"steps: {len(duration_s)} undisturbed steps on {fitted_on}, at least {MIN_STEPS} are needed to "
            "learn how long a step takes when nothing is preempted"
        )
    design = np.column_stack([np.ones(len(design)), design])
    coefficients = relative_fit(design, duration_s, typical_floor(duration_s))
    return StepTimeModel(
        fixed_s=float(coefficients[0]),
        per_part_s=tuple(map(float, coefficients[1:])),
        fitted_on=fitted_on,
        steps=len(duration_s),
        error=_held_out_error(design, duration_s),
    )


def _held_out_error(design: Floats, duration_s: Floats) -> HeldOutError:
    """Error with coefficients fitted on other blocks, and pace from the step's neighbours without the step itself."""
    predicted = np.empty_like(duration_s)
    size = min(BLOCK_STEPS, -(-len(duration_s) // FOLDS))
    fold = np.arange(len(duration_s)) // size % FOLDS
    for held_out_fold in range(FOLDS):
        held_out = fold == held_out_fold
        fitting_s = duration_s[~held_out]
        coefficients = relative_fit(design[~held_out], fitting_s, typical_floor(fitting_s))
        predicted[held_out] = np.maximum(design[held_out] @ coefficients, typical_floor(duration_s))
    predicted = predicted * medians(duration_s / predicted, np.arange(len(predicted)), skip=1)
    residual_s = duration_s - predicted
    return HeldOutError(
        mean_relative=float(np.mean(np.abs(residual_s) / duration_s)),
        mean_s=float(np.mean(np.abs(residual_s))),
        bias_s=float(np.mean(residual_s)),
    )
