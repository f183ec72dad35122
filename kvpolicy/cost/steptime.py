"""d0: how long an engine step of a given composition takes when nothing is preempted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvpolicy.cost.nonnegative import robust_nonnegative_fit
from kvpolicy.trace import TraceError

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]

PARTS = ("scheduled_tokens", "decode_requests", "kv_read_tokens", "chunk_context")
"""What a step is made of, as far as its duration depends on it: columns of ``steps``."""
AFTERMATH_STEPS = 2
"""A prefill leaves the caches to the steps after it cold: on a CPU the first took 50% longer, the second 20%."""
FULL_AFTERMATH_TOKENS = 256
"""A chunk of that many tokens leaves them as cold as any longer one."""

FEWEST_STEPS = 20
FOLDS = 5
BLOCK_STEPS = 20
"""Held-out error is taken over blocks of that many successive steps: neighbours are alike."""
NEIGHBOURS = 16
"""Undisturbed steps that tell how fast the machine is at a moment, half of them before it and half after."""


@dataclass(frozen=True, slots=True)
class HeldOutError:
    """Of predictions for steps that the model was not fitted on."""

    mean_relative: float
    """Mean of |predicted - measured| / measured."""
    mean_s: float
    """Mean of |predicted - measured|, seconds: the floor under every attributed step."""
    bias_s: float
    """Mean of measured - predicted, seconds."""


@dataclass(frozen=True, slots=True)
class StepTimeModel:
    """d0: seconds of an undisturbed step, linear in its parts, no part below zero."""

    fixed_s: float
    per_part_s: tuple[float, ...]
    """Seconds per unit of each of :data:`PARTS`, then per full aftermath of the first and second step before."""
    fitted_on: str
    """``core NAME``, or ``N cores`` where this core had too few undisturbed steps of its own."""
    steps: int
    error: HeldOutError

    def predict(self, parts: Floats) -> Floats:
        """Seconds for each row of ``parts``, shape (steps, 4) in the order of :data:`PARTS`; 0 for an empty step.

        Rows are successive steps: what a step takes depends on what came right before it.
        """
        full = with_aftermath(parts)
        return np.where(parts[:, 0] > 0, self.fixed_s + full @ np.asarray(self.per_part_s), 0.0)

    def price(self, parts: Floats) -> Floats:
        """Seconds that the parts alone add, aftermath left out."""
        return np.asarray(parts @ np.asarray(self.per_part_s[: len(PARTS)]), dtype=np.float64)

    def pace(self, calm: Whole, parts: Floats, duration_s: Floats, row: Whole) -> Floats:
        """How much slower than d0 the machine was around each step ``row``: 1 where it was as fast.

        Machines have faster and slower moments, and a law that is linear in a step's parts is off by a little for
        some compositions. Both show in the undisturbed steps right before and after, which are composed alike: the
        median of measured / predicted over the nearest of them. ``calm``: their rows, ascending.
        """
        return _medians(duration_s[calm] / self.predict(parts)[calm], np.searchsorted(calm, row), skip=0)


def with_aftermath(parts: Floats) -> Floats:
    """``parts`` with a column for each of the :data:`AFTERMATH_STEPS` before: 1 for a chunk of any length, less for
    a short one, 0 where nothing was prefilled."""
    chunk = np.clip((parts[:, 0] - parts[:, 1]) / FULL_AFTERMATH_TOKENS, 0.0, 1.0)
    before = [np.concatenate([np.zeros(min(lag, len(chunk))), chunk[:-lag]]) for lag in range(1, AFTERMATH_STEPS + 1)]
    return np.column_stack([parts, *before])


def fit_step_time(design: Floats, duration_s: Floats, fitted_on: str) -> StepTimeModel:
    """Fit d0 to undisturbed steps in the order they were executed; ``design`` from :func:`with_aftermath`.

    Raises TraceError where there are fewer than :data:`FEWEST_STEPS`.
    """
    if len(duration_s) < FEWEST_STEPS:
        raise TraceError(
            f"steps: {len(duration_s)} undisturbed steps on {fitted_on}, at least {FEWEST_STEPS} are needed to tell "
            "what a step takes when nothing is preempted"
        )
    design = np.column_stack([np.ones(len(design)), design])
    coefficients = robust_nonnegative_fit(design, duration_s)
    return StepTimeModel(
        fixed_s=float(coefficients[0]),
        per_part_s=tuple(map(float, coefficients[1:])),
        fitted_on=fitted_on,
        steps=len(duration_s),
        error=_held_out_error(design, duration_s),
    )


def _held_out_error(design: Floats, duration_s: Floats) -> HeldOutError:
    """Coefficients from other blocks, pace from the step's neighbours without the step itself."""
    predicted = np.empty_like(duration_s)
    size = min(BLOCK_STEPS, -(-len(duration_s) // FOLDS))
    fold = np.arange(len(duration_s)) // size % FOLDS
    for number in range(FOLDS):
        out = fold == number
        coefficients = robust_nonnegative_fit(design[~out], duration_s[~out])
        predicted[out] = np.maximum(design[out] @ coefficients, 0.05 * np.median(duration_s))
    predicted = predicted * _medians(duration_s / predicted, np.arange(len(predicted)), skip=1)
    missed = duration_s - predicted
    return HeldOutError(
        mean_relative=float(np.mean(np.abs(missed) / duration_s)),
        mean_s=float(np.mean(np.abs(missed))),
        bias_s=float(np.mean(missed)),
    )


def _medians(values: Floats, at: Whole, skip: int) -> Floats:
    """Median of the neighbours on both sides of each position, ``skip`` values from the position on left out.

    At an end of ``values`` the side that is short is made up for by the other one.
    """
    half = min(NEIGHBOURS, len(values) - skip) // 2
    first = np.clip(at - half, 0, len(values) - skip - 2 * half)
    index = first[:, None] + np.arange(2 * half)[None, :]
    index += np.where(index >= at[:, None], skip, 0)
    return np.asarray(np.median(values[index], axis=1), dtype=np.float64)
