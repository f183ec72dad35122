"""Physics over named columns: a sum of ceilings, each of them the slowest of a few terms.

``seconds = sum over ceilings of max over its terms of constant * column``: a kernel that computes and reads memory at
the same time is as slow as the slower of the two, a launch comes on top. All constants are 0 or above, so a prediction
never falls where a column grows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from scipy.optimize import nnls

from kvpolicy.arrays import Floats

LAUNCH = ""
"""The term that every row has once: its constant is a time."""
MIN_S = 1e-12
"""No prediction is below: logarithms are taken of it."""
ROUNDS = 15
SWITCHES = 12
"""How often rows may change the term that bounds them while constants are fitted."""
KINKS = (0.25, 0.5, 0.75)
CLEARLY = 0.2
"""By that share a fit begun at a kink has to miss less than one begun without: a kink in noise leads far astray."""
ROWS_TO_BEGIN_WITH = 500
OUTLIER_SCALES = 2.5
"""Relative residuals beyond that many robust standard deviations count only linearly (Huber 1964)."""


@dataclass(frozen=True, slots=True)
class Constant:
    """One calibrated constant: seconds per unit of its column."""

    term: str
    value: float
    unit: str


class Physics(Protocol):
    """What may stand before a residual."""

    def calibrated(self, x: Floats, seconds: Floats, columns: Sequence[str], weight: Floats) -> Calibrated:
        """``x``: shape (rows, columns). Raises ValueError for a column that it needs and is not there."""
        ...


class Calibrated(Protocol):
    """Physics with its constants."""

    @property
    def constants(self) -> tuple[Constant, ...]: ...

    def seconds(self, x: Floats) -> Floats:
        """Above 0, and never falling where a column grows."""
        ...


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The form: terms by column name, a tuple of them per ceiling. No ceilings: a launch plus every column."""

    ceilings: tuple[tuple[str, ...], ...] = ()
    units: Mapping[str, str] | None = None
    """What a column counts; its constant is in seconds per that."""

    def calibrated(self, x: Floats, seconds: Floats, columns: Sequence[str], weight: Floats) -> FittedCeilings:
        """Iteratively reweighted non-negative least squares on relative errors."""
        form = self.ceilings or ((LAUNCH,), *((name,) for name in columns))
        terms = [name for ceiling in form for name in ceiling]
        missing = [name for name in terms if name != LAUNCH and name not in columns]
        if missing:
            raise ValueError(f"physics needs column {missing[0]!r}; there are {', '.join(columns)}")
        position = tuple(-1 if name == LAUNCH else list(columns).index(name) for name in terms)
        groups, at = [], 0
        for ceiling in form:
            groups.append(tuple(range(at, at + len(ceiling))))
            at += len(ceiling)
        design = _design(x, position)
        found = _switched(design, seconds, weight, groups)
        units = self.units or {}
        constants = tuple(
            Constant(name or "launch", float(value), f"s/{units.get(name, name)}" if name else "s")
            for name, value in zip(terms, found, strict=True)
        )
        return FittedCeilings(constants, position, tuple(groups))


@dataclass(frozen=True, slots=True)
class FittedCeilings:
    """Implements :class:`Calibrated`."""

    constants: tuple[Constant, ...]
    position: tuple[int, ...]
    """Column of each constant; -1 for the launch."""
    groups: tuple[tuple[int, ...], ...]
    """Numbers of the constants under one ceiling."""

    def seconds(self, x: Floats) -> Floats:
        values = np.array([constant.value for constant in self.constants])
        return _bounded(_design(x, self.position), values, self.groups)


def _design(x: Floats, position: Sequence[int]) -> Floats:
    return np.column_stack([np.ones(len(x)) if at < 0 else x[:, at] for at in position])


def _bounded(design: Floats, constants: Floats, groups: Sequence[Sequence[int]]) -> Floats:
    slowest = [(design[:, list(group)] * constants[list(group)]).max(axis=1) for group in groups]
    return np.asarray(np.maximum(np.sum(slowest, axis=0), MIN_S), np.float64)


def _switched(design: Floats, seconds: Floats, weight: Floats, groups: Sequence[Sequence[int]]) -> Floats:
    """Constants under ceilings: each row is fitted by the terms that bound it, which are then looked up anew.

    That finds the nearest of several bests, so it is begun with kinks at several places, on some rows; the best of
    these goes on, on all.
    """
    added = relative_fit(design, seconds, weight)
    if all(len(group) == 1 for group in groups):
        return added
    some = slice(None, None, max(1, len(design) // ROWS_TO_BEGIN_WITH))
    part = (design[some], seconds[some], weight[some])
    first, *others = [_alternated(*part, groups, start, SWITCHES) for start in _starts(design[some], added, groups)]
    best = min(others, key=lambda one: one[1])
    start = best[0] if best[1] < (1 - CLEARLY) * first[1] else first[0]
    return _alternated(design, seconds, weight, groups, start, SWITCHES // 2)[0]


def _starts(design: Floats, added: Floats, groups: Sequence[Sequence[int]]) -> list[Floats]:
    """The constants of the plain sum; and with each ceiling's terms equal where the shares ``KINKS`` of rows end."""
    starts = [added]
    for share in KINKS:
        start = added.copy()
        for group in groups:
            first, *others = group
            for other in others:
                both = (design[:, first] > 0) & (design[:, other] > 0)
                if both.any():
                    ratio = design[both, other] / design[both, first]
                    start[first] = max(added[first], added[other] * float(np.median(ratio))) or 1.0
                    start[other] = start[first] / float(np.quantile(ratio, share))
        starts.append(start)
    return starts


def _alternated(
    design: Floats, seconds: Floats, weight: Floats, groups: Sequence[Sequence[int]], constants: Floats, rounds: int
) -> tuple[Floats, float]:
    """The best constants of all rounds and their mean |log(measured / predicted)|.

    Every step but the last is halved so that rows at a kink do not swing to and fro.
    """

    def missed(some: Floats) -> float:
        return float(np.average(np.abs(np.log(_bounded(design, some, groups) / seconds)), weights=weight))

    best, least = constants, missed(constants)
    for round_ in range(rounds):
        bounding = _bounding(design, constants, groups)
        found = relative_fit(bounding, seconds, weight)
        # A term that bounds no row is not known to be 0, only to be small.
        found = np.where(bounding.any(axis=0), found, constants / 2)
        constants = (constants + found) / 2 if round_ else found
        now = missed(constants)
        if now < least:
            best, least = constants, now
    return best, least


def _bounding(design: Floats, constants: Floats, groups: Sequence[Sequence[int]]) -> Floats:
    """The design with, under each ceiling, the terms other than the slowest at 0."""
    kept = np.zeros_like(design)
    for group in groups:
        members = np.array(group)
        slowest = members[np.argmax(design[:, members] * constants[members], axis=1)]
        rows = np.arange(len(design))
        kept[rows, slowest] = design[rows, slowest]
    return kept


def relative_fit(design: Floats, seconds: Floats, weight: Floats) -> Floats:
    """Constants c >= 0 with ``design @ c`` near ``seconds``, all above 0, in relative terms; outliers held down."""
    expected = seconds
    huber = np.ones(len(seconds))
    constants = np.zeros(design.shape[1])
    for _ in range(ROUNDS):
        before = constants
        constants = _nonnegative(design, seconds, weight * huber / expected**2)
        if np.allclose(constants, before, rtol=1e-6, atol=0.0):
            break
        # A row that every term misses may not take all the weight.
        expected = np.maximum(design @ constants, 0.05 * seconds)
        missed = np.abs(seconds - design @ constants) / expected
        limit = OUTLIER_SCALES * max(1.4826 * float(np.median(missed)), 1e-9)
        huber = np.minimum(1.0, limit / np.maximum(missed, 1e-300))
    return constants


def _nonnegative(design: Floats, values: Floats, weight: Floats) -> Floats:
    root = np.sqrt(weight / weight.max())
    weighted, target = design * root[:, None], values * root
    scale = np.linalg.norm(weighted, axis=0)
    scale[scale == 0] = 1.0
    size = float(np.linalg.norm(target)) or 1.0
    found, _ = nnls(weighted / scale, target / size)
    return np.asarray(found * size / scale, np.float64)
