"""Copies that a measuring tool makes beside a preemption, so that it is measured with copies under way.

They belong to no preemption. What they add to steps is learned from the steps that they touch and no preemption does,
and becomes part of what a step would have taken undisturbed (d0). Called by :mod:`kvpolicy.attribution.offline`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvpolicy.arrays import Flags, Floats, Ints
from kvpolicy.attribution.step_time_fit import AFTERMATH_STEPS
from kvpolicy.events import DIRECTIONS
from kvpolicy.regression.nnls import nonnegative_fit

MIN_STEPS = 10
"""Steps with a tool's copy and without a preemption, to learn what such copies add to steps."""
ROUNDS = 20
ERRORS = 2.0
"""An effect below this many standard errors counts as none."""


def effects(start_s: Floats, end_s: Floats, tokens: Ints, copies: Mapping[str, Floats], is_save: Flags) -> Floats:
    """What tool copies do in each step, shape (steps, 2 * directions + 1).

    Per direction, the bytes whose copy begins in the step, and the seconds that copies begun earlier run beside it
    where it computes anything; then the bytes begun in the :data:`AFTERMATH_STEPS` steps before, which leave the caches
    cold.

    ``tokens``: what each step computes. ``copies``: columns ``bytes``, ``submit_s``, ``start_s`` and ``end_s``.
    """
    rows = len(start_s)
    columns = np.zeros((rows, 2 * len(DIRECTIONS) + 1))
    begun_in = np.clip(np.searchsorted(start_s, copies["submit_s"], side="right") - 1, 0, rows - 1)
    for direction, chosen in enumerate((is_save, ~is_save)):
        np.add.at(columns[:, 2 * direction], begun_in[chosen], copies["bytes"][chosen])
        spans = zip(begun_in[chosen], copies["start_s"][chosen], copies["end_s"][chosen], strict=True)
        for begun, copy_start_s, copy_end_s in spans:
            first = max(begun + 1, np.searchsorted(end_s, copy_start_s, side="right"))
            last = max(first, np.searchsorted(start_s, copy_end_s))
            beside = np.minimum(copy_end_s, end_s[first:last]) - np.maximum(copy_start_s, start_s[first:last])
            columns[first:last, 2 * direction + 1] += np.where(tokens[first:last] > 0, np.maximum(0.0, beside), 0.0)
    begun_bytes = columns[:, ::2][:, : len(DIRECTIONS)].sum(axis=1)
    for lag in range(1, AFTERMATH_STEPS + 1):
        columns[lag:, -1] += np.where(tokens[lag:] > 0, begun_bytes[:-lag], 0.0)
    return columns


def seconds_of(columns: Floats, extra_s: Floats, rows: Ints) -> Floats:
    """Seconds that tool copies add to each step. Learned from ``rows``, at least :data:`MIN_STEPS`.

    What a copy adds while it runs beside steps is learned from those steps alone that are neither the one it began in
    nor right after it: in these, effects cannot be told apart, and a step of a recompute may be twenty times as long.

    ``columns``: from :func:`effects`. ``extra_s``: of each of ``rows``, its seconds beyond d0.
    """
    beside = np.arange(columns.shape[1]) % 2 == 1
    seen = columns[rows]
    alone = ~seen[:, ~beside].any(axis=1)
    coefficients = np.zeros(columns.shape[1])
    coefficients[beside] = _significant_fit(seen[alone][:, beside], extra_s[alone])
    remaining_s = extra_s - seen @ coefficients
    coefficients[~beside] = _significant_fit(seen[~alone][:, ~beside], remaining_s[~alone])
    return np.asarray(columns @ coefficients, np.float64)


def _significant_fit(columns: Floats, extra_s: Floats) -> Floats:
    """Coefficients of 0 or above, and 0 unless they are :data:`ERRORS` standard errors above.

    Robust (Huber 1964), because a disturbed machine makes some steps far too long: d0 is a typical step's, too.
    """
    coefficients = np.zeros(columns.shape[1])
    if len(columns) <= len(coefficients):
        return coefficients
    weights = np.ones(len(columns))
    scale_s = 0.0
    for _ in range(ROUNDS):
        coefficients = nonnegative_fit(columns, extra_s, weights)
        distances_s = np.abs(extra_s - columns @ coefficients)
        scale_s = max(1.4826 * float(np.median(distances_s)), 1e-9)
        weights = np.minimum(1.0, scale_s / np.maximum(distances_s, 1e-300))
    unit = np.maximum(np.abs(columns).max(axis=0), 1e-300)
    covariance = np.linalg.pinv((columns / unit).T @ (weights[:, None] * columns / unit))
    errors = scale_s * np.sqrt(np.maximum(0.0, np.diag(covariance))) / unit
    return np.where(coefficients > ERRORS * errors, coefficients, 0.0)
