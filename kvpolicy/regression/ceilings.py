"""Physics over named columns: a sum of ceilings, each the maximum of a few terms.

``seconds = sum over ceilings of max over its terms of constant * column``. A kernel that computes and reads memory at
the same time takes as long as the slower of the two; a launch is added. No constant is below 0, so a prediction never
decreases as a column increases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvpolicy.arrays import Floats
from kvpolicy.regression.nnls import MIN_SHARE, relative_fit

LAUNCH = ""
"""The term that is 1 in every row: its constant is a time."""
MIN_S = 1e-12
"""Lower bound of predictions: logarithms are taken of them."""
MAX_SWITCHES = 12
"""Maximum number of times that each row's largest term is looked up again while constants are fitted."""
KINK_QUANTILES = (0.25, 0.5, 0.75)
"""Shares of the rows at which two terms of a ceiling are equal in the starting values."""
MIN_KINK_GAIN = 0.2
"""Share by which the error must be lower for a fit started with a kink: a kink fitted to noise extrapolates badly."""
ROWS_TO_START_WITH = 500


@dataclass(frozen=True, slots=True)
class Constant:
    """One calibrated constant: seconds per unit of its column."""

    term: str
    value: float
    unit: str


class Physics(Protocol):
    """Physics that a residual can be learned on, before its constants are fitted."""

    def calibrated(self, x: Floats, seconds: Floats, columns: Sequence[str], weight: Floats) -> Calibrated:
        """Fit the constants. ``x``: shape (rows, columns). Raises ValueError for a missing column."""
        ...


class Calibrated(Protocol):
    """Physics with fitted constants."""

    @property
    def constants(self) -> tuple[Constant, ...]: ...

    def seconds(self, x: Floats) -> Floats:
        """Predictions, above 0 and never decreasing as a column increases."""
        ...


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The form of the sum: per ceiling a tuple of terms, named by columns. Default: a launch plus all columns."""

    ceilings: tuple[tuple[str, ...], ...] = ()
    units: Mapping[str, str] | None = None
    """Unit of each column; its constant is in seconds per unit."""

    def calibrated(self, x: Floats, seconds: Floats, columns: Sequence[str], weight: Floats) -> FittedCeilings:
        """Fit by iteratively reweighted non-negative least squares on relative errors."""
        form = self.ceilings or ((LAUNCH,), *((name,) for name in columns))
        terms = [name for ceiling in form for name in ceiling]
        missing = [name for name in terms if name != LAUNCH and name not in columns]
        if missing:
            raise ValueError(f"physics needs column {missing[0]!r}; there are {', '.join(columns)}")
        positions = tuple(-1 if name == LAUNCH else list(columns).index(name) for name in terms)
        groups, offset = [], 0
        for ceiling in form:
            groups.append(tuple(range(offset, offset + len(ceiling))))
            offset += len(ceiling)
        design = _design(x, positions)
        values = _fit_constants(design, seconds, weight, groups)
        units = self.units or {}
        constants = tuple(
            Constant(name or "launch", float(value), f"s/{units.get(name, name)}" if name else "s")
            for name, value in zip(terms, values, strict=True)
        )
        return FittedCeilings(constants, positions, tuple(groups))


@dataclass(frozen=True, slots=True)
class FittedCeilings:
    """Implements :class:`Calibrated`."""

    constants: tuple[Constant, ...]
    position: tuple[int, ...]
    """Column of each constant; -1 for the launch."""
    groups: tuple[tuple[int, ...], ...]
    """Per ceiling, the indices of its constants."""

    def seconds(self, x: Floats) -> Floats:
        values = np.array([constant.value for constant in self.constants])
        return _bounded(_design(x, self.position), values, self.groups)


def _design(x: Floats, positions: Sequence[int]) -> Floats:
    return np.column_stack([np.ones(len(x)) if column < 0 else x[:, column] for column in positions])


def _bounded(design: Floats, constants: Floats, groups: Sequence[Sequence[int]]) -> Floats:
    slowest = [(design[:, list(group)] * constants[list(group)]).max(axis=1) for group in groups]
    return np.asarray(np.maximum(np.sum(slowest, axis=0), MIN_S), np.float64)


def _fit_constants(design: Floats, seconds: Floats, weight: Floats, groups: Sequence[Sequence[int]]) -> Floats:
    """Constants of all ceilings: fit each row with the largest term of every ceiling, then look these terms up again.

    This finds a local optimum. It is therefore started with kinks at several places, on a sample of the rows; the best
    result is the start of the fit to all rows.
    """
    plain_sum = positive_fit(design, seconds, weight)
    if all(len(group) == 1 for group in groups):
        return plain_sum
    rows = slice(None, None, max(1, len(design) // ROWS_TO_START_WITH))
    sample = (design[rows], seconds[rows], weight[rows])
    first, *kinked = [
        _alternate(*sample, groups, start, MAX_SWITCHES) for start in _starts(design[rows], plain_sum, groups)
    ]
    best_kinked = min(kinked, key=lambda fitted: fitted[1])
    start = best_kinked[0] if best_kinked[1] < (1 - MIN_KINK_GAIN) * first[1] else first[0]
    return _alternate(design, seconds, weight, groups, start, MAX_SWITCHES // 2)[0]


def _starts(design: Floats, plain_sum: Floats, groups: Sequence[Sequence[int]]) -> list[Floats]:
    """Starting values: the constants of the plain sum, and those with a kink at each of the ``KINK_QUANTILES``."""
    starts = [plain_sum]
    for share in KINK_QUANTILES:
        start = plain_sum.copy()
        for group in groups:
            first, *others = group
            for other in others:
                both = (design[:, first] > 0) & (design[:, other] > 0)
                if both.any():
                    ratio = design[both, other] / design[both, first]
                    start[first] = max(plain_sum[first], plain_sum[other] * float(np.median(ratio))) or 1.0
                    start[other] = start[first] / float(np.quantile(ratio, share))
        starts.append(start)
    return starts


def _alternate(
    design: Floats, seconds: Floats, weight: Floats, groups: Sequence[Sequence[int]], constants: Floats, rounds: int
) -> tuple[Floats, float]:
    """The best constants of all rounds, with their mean |log(measured / predicted)|.

    Every step but the first is halved, so that rows at a kink do not oscillate.
    """

    def mean_error(values: Floats) -> float:
        return float(np.average(np.abs(np.log(_bounded(design, values, groups) / seconds)), weights=weight))

    best, lowest_error = constants, mean_error(constants)
    for number in range(rounds):
        bounding = _bounding(design, constants, groups)
        fitted = positive_fit(bounding, seconds, weight)
        # A term that is the largest in no row is small, but not known to be 0.
        fitted = np.where(bounding.any(axis=0), fitted, constants / 2)
        constants = (constants + fitted) / 2 if number else fitted
        error = mean_error(constants)
        if error < lowest_error:
            best, lowest_error = constants, error
    return best, lowest_error


def _bounding(design: Floats, constants: Floats, groups: Sequence[Sequence[int]]) -> Floats:
    """The design with all terms but the largest of each ceiling set to 0."""
    bounding = np.zeros_like(design)
    for group in groups:
        members = np.array(group)
        slowest = members[np.argmax(design[:, members] * constants[members], axis=1)]
        rows = np.arange(len(design))
        bounding[rows, slowest] = design[rows, slowest]
    return bounding


def positive_fit(design: Floats, seconds: Floats, weight: Floats) -> Floats:
    """:func:`kvpolicy.regression.nnls.relative_fit` of times that are all above 0, with a bound on the weight of a row
    that no term explains."""
    return relative_fit(design, seconds, MIN_SHARE * seconds, weight)
