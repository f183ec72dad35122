"""Scikit-learn regressors for times: physics x exp(boosted residual), physics alone, and a weighted sum.

All have the methods ``fit(X, y, sample_weight=None, groups=None)`` and ``predict``. ``X`` holds counts, 0 or above
(tokens, bytes, FLOPs); ``y`` holds seconds above 0. The rows of one group (repeats of one measured point) are always
in the same fold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils.validation import check_array, check_consistent_length, check_is_fitted, validate_data

from kvpolicy.arrays import Flags, Floats, Ints
from kvpolicy.regression.ceilings import Calibrated, Ceilings, Constant, Physics
from kvpolicy.regression.conformal import (
    CONFIDENCE,
    MIN_EXTRAPOLATED,
    Half,
    Margin,
    Widening,
    carries,
    widening_of,
)
from kvpolicy.regression.nnls import nonnegative_fit
from kvpolicy.regression.residual import TREE_COUNTS, Growth, Residual, cross_validated, fold_rows, inner_rows

MIN_GROUPS = 20
"""With fewer groups the number of trees cannot be chosen on held-out groups, and there is no residual."""
MIN_SHORT_GROUPS = 6
"""Minimum number of groups up to an inner edge to fit the physics to."""
MAX_ROWS_TO_CHOOSE_TREES = 100_000
"""The number of trees is chosen on a sample of about that many rows, drawn by group; the forest is grown on all."""


class _TimeRegressor(RegressorMixin, BaseEstimator):
    """Base class: checks the inputs. ``columns``: names of the columns of ``X``, unless it has names itself."""

    columns: Sequence[str] | None
    n_features_in_: int

    def fit(self, X: Any, y: Any, sample_weight: Any = None, groups: Any = None, lengths: Any = None) -> Self:
        """Fit. ``lengths``: one per row, above 0, to test how the regressor extrapolates to greater lengths.

        Raises ValueError naming the row for a time or length that is not above 0, and for a count below 0.
        """
        x, seconds = validate_data(self, X, y, dtype=np.float64, y_numeric=True, ensure_min_samples=2)
        seconds = np.asarray(seconds, np.float64)
        _refuse(seconds <= 0, seconds, "Times", "above 0 s")
        _refuse((x < 0).any(axis=1), x.min(axis=1), "Negative values in data", "0 or above")
        weight = _weights(sample_weight, seconds)
        group = np.arange(len(x)) if groups is None else _group_numbers(groups, x)
        length = None if lengths is None else _lengths(lengths, x)
        self.columns_ = self._names(x.shape[1])
        # Rows of weight 0 must have no influence on constants, leaves and folds.
        weighted = weight > 0
        if weighted.sum() < 2:
            raise ValueError(f"sample_weight is zero but for {weighted.sum()} sample(s); a minimum of 2 is required")
        self._learn(
            x[weighted],
            seconds[weighted],
            weight[weighted],
            group[weighted],
            None if length is None else length[weighted],
        )
        return self

    def predict(self, X: Any) -> Floats:
        """Seconds, above 0."""
        check_is_fitted(self)
        return self._seconds(validate_data(self, X, dtype=np.float64, reset=False))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.positive_only = True
        tags.target_tags.positive_only = True
        return tags

    def _names(self, count: int) -> tuple[str, ...]:
        declared = self.columns if self.columns is not None else getattr(self, "feature_names_in_", None)
        names = tuple(f"x{i}" for i in range(count)) if declared is None else tuple(map(str, declared))
        if len(names) != count or len(set(names)) != count:
            raise ValueError(f"columns: {len(set(names))} different names for {count} columns of X")
        return names

    def _learn(self, x: Floats, seconds: Floats, weight: Floats, group: Ints, length: Floats | None) -> None:
        raise NotImplementedError

    def _seconds(self, x: Floats) -> Floats:
        raise NotImplementedError


class LinearRegressor(_TimeRegressor):
    """A weighted sum of the columns and a constant, no coefficient below 0, fitted to relative errors."""

    def __init__(self, columns: Sequence[str] | None = None) -> None:
        self.columns = columns

    def _learn(self, x: Floats, seconds: Floats, weight: Floats, group: Ints, length: Floats | None) -> None:
        design = np.column_stack([np.ones(len(x)), x])
        coefficients = nonnegative_fit(design, seconds, weight / seconds**2)
        self.intercept_, self.coef_ = float(coefficients[0]), coefficients[1:]

    def _seconds(self, x: Floats) -> Floats:
        return np.asarray(self.intercept_ + x @ self.coef_, np.float64)


class AnalyticRegressor(_TimeRegressor):
    """Physics alone, with fitted constants.

    ``physics``: :class:`~kvpolicy.regression.ceilings.Ceilings` if None.
    """

    def __init__(self, physics: Physics | None = None, columns: Sequence[str] | None = None) -> None:
        self.physics = physics
        self.columns = columns

    @property
    def constants_(self) -> tuple[Constant, ...]:
        """The fitted constants with their units."""
        check_is_fitted(self)
        return self.physics_.constants

    def _learn(self, x: Floats, seconds: Floats, weight: Floats, group: Ints, length: Floats | None) -> None:
        self.physics_ = self._calibrated(x, seconds, weight)

    def _calibrated(self, x: Floats, seconds: Floats, weight: Floats) -> Calibrated:
        return (self.physics or Ceilings()).calibrated(x, seconds, self.columns_, weight)

    def _seconds(self, x: Floats) -> Floats:
        return self.physics_.seconds(x)


class BoostedRegressor(AnalyticRegressor):
    """Physics x exp(LightGBM), the forest grown on log(measured / physics).

    The number of trees, at most ``max_trees``, is chosen by grouped cross-validation; it is 0 if trees do not help on
    held-out groups. Outside the trained range either the forest keeps its value at the range's edge (``carried_``), or
    physics predicts alone, bounded by the prediction at the edge. If ``fit`` was given ``lengths``, the choice is the
    one with the smaller error in inner extrapolation (:mod:`kvpolicy.regression.conformal`); otherwise the forest is
    carried.

    After ``fit``: ``trees_``, ``physics_``, ``constants_``, ``unseen_misses_`` (log(measured / predicted) of each row
    of positive weight, by a fit without its group; NaN for rows outside the sample, None if there were too few groups),
    ``inner_`` (errors in inner extrapolation; None without ``lengths`` or with too few groups).
    """

    def __init__(
        self,
        physics: Physics | None = None,
        columns: Sequence[str] | None = None,
        monotone: Sequence[str] = (),
        max_trees: int = 100,
        leaves: int = 31,
        learning_rate: float = 0.2,
        min_rows_in_leaf: int = 5,
        folds: int = 5,
        n_jobs: int = 1,
        random_state: int = 0,
    ) -> None:
        super().__init__(physics, columns)
        self.monotone = monotone
        self.max_trees = max_trees
        self.leaves = leaves
        self.learning_rate = learning_rate
        self.min_rows_in_leaf = min_rows_in_leaf
        self.folds = folds
        self.n_jobs = n_jobs
        self.random_state = random_state

    def _learn(self, x: Floats, seconds: Floats, weight: Floats, group: Ints, length: Floats | None) -> None:
        unknown = sorted(set(self.monotone) - set(self.columns_))
        if unknown:
            raise ValueError(f"monotone: there is no column {unknown[0]!r}; there are {', '.join(self.columns_)}")
        self.trees_, self.booster_ = 0, None
        self.unseen_misses_: Floats | None = None
        self.physics_ = self._calibrated(x, seconds, weight)
        if self.max_trees and len(np.unique(group)) >= MIN_GROUPS:
            self._choose_trees(x, seconds, weight, group)
        if self.trees_:
            self.booster_ = self._residual(self.physics_, x, seconds, weight).grown(self.trees_)
        self.range_ = x.min(axis=0), x.max(axis=0)
        self.carried_ = True
        self.inner_: tuple[InnerFit, ...] | None = None
        if length is not None and self.unseen_misses_ is not None:
            self._extrapolate_inside(x, seconds, weight, group, length)

    def _extrapolate_inside(self, x: Floats, seconds: Floats, weight: Floats, group: Ints, length: Floats) -> None:
        drawn = _rows_drawn(group, MAX_ROWS_TO_CHOOSE_TREES, self.random_state)
        x, seconds, weight, group, length = x[drawn], seconds[drawn], weight[drawn], group[drawn], length[drawn]
        inner: list[InnerFit] = []
        for share, short, longer in inner_rows(length):
            groups = len(np.unique(group[short]))
            if groups < MIN_SHORT_GROUPS:
                continue
            fitting = x[short], seconds[short], weight[short]
            physics, booster = self._calibrated(*fitting), None
            if self.trees_ and groups >= MIN_GROUPS:
                booster = self._residual(physics, *fitting).grown(self.trees_)
            span = x[short].min(axis=0), x[short].max(axis=0)
            carried, dropped = (_predict(x[longer], physics, booster, span, keep) for keep in (True, False))
            measured, distance = seconds[longer], np.log(length[longer] / length[short].max())
            inner.append(
                InnerFit(share, group[longer], distance, np.log(measured / carried), np.log(measured / dropped))
            )
        if inner:
            self.inner_ = tuple(inner)
            states = len(np.unique(np.concatenate([inner_fit.group for inner_fit in inner])))
            carried, dropped = (
                np.concatenate([getattr(inner_fit, name) for inner_fit in inner]) for name in ("carried", "dropped")
            )
            self.carried_ = carries(carried.tolist(), dropped.tolist(), states, default=True)

    def widening(self, margin: Margin, confidence: float = CONFIDENCE) -> Widening:
        """What the margins gain beyond the trained range, by log(length / longest trained length).

        ``margin``: below and above, inside the range. Infinite if inner extrapolation reached too few groups.
        """
        check_is_fitted(self)
        inner = self.inner_ or ()
        points = {int(number) for inner_fit in inner for number in inner_fit.group}
        if len(points) < MIN_EXTRAPOLATED:
            return Widening(inf, inf)
        halves = [half for inner_fit in inner for half in inner_fit.halves(self.carried_)]
        return widening_of(halves, margin, confidence)

    def _choose_trees(self, x: Floats, seconds: Floats, weight: Floats, group: Ints) -> None:
        drawn = _rows_drawn(group, MAX_ROWS_TO_CHOOSE_TREES, self.random_state)
        x, y, weight = x[drawn], seconds[drawn], weight[drawn]
        rows = _folds(group[drawn], self.folds, self.random_state)
        physics = [self._calibrated(x[fitting], y[fitting], weight[fitting]) for fitting, _ in rows]
        folds = [
            (
                self._residual(fitted, x[fitting], y[fitting], weight[fitting]),
                self._residual(fitted, x[held_out], y[held_out], weight[held_out]),
            )
            for fitted, (fitting, held_out) in zip(physics, rows, strict=True)
        ]
        counts = [count for count in TREE_COUNTS if count < self.max_trees] + [self.max_trees]
        forests = cross_validated(folds, counts)
        self.trees_, self.unseen_misses_ = forests.trees, np.full(len(seconds), np.nan)
        for booster, (_, held_out), (_, residual) in zip(forests.boosters, rows, folds, strict=True):
            self.unseen_misses_[drawn[held_out]] = residual.misses(booster, self.trees_)

    def _residual(self, physics: Calibrated, x: Floats, seconds: Floats, weight: Floats) -> Residual:
        growth = Growth(
            leaves=self.leaves,
            learning_rate=self.learning_rate,
            min_rows_in_leaf=self.min_rows_in_leaf,
            monotone=frozenset(self.monotone),
            seed=self.random_state,
            threads=self.n_jobs,
        )
        return Residual(x, np.log(seconds / physics.seconds(x)), weight, self.columns_, growth)

    def _seconds(self, x: Floats) -> Floats:
        return _predict(x, self.physics_, self.booster_, self.range_, self.carried_)


@dataclass(frozen=True, slots=True)
class InnerFit:
    """Errors of a fit to the short rows on all longer rows: one number per longer row."""

    share: float
    """It was fitted to the rows up to this share of the longest length."""
    group: Ints
    distance: Floats
    """log(length / longest fitted length)."""
    carried: Floats
    """log(measured / predicted) with the forest's value at the range's edge."""
    dropped: Floats
    """log(measured / predicted) of the physics alone."""

    def halves(self, carried: bool) -> Iterator[Half]:
        """The nearer and the farther half of the rows; only the first where all are at one distance."""
        misses, near = self.carried if carried else self.dropped, self.distance <= np.median(self.distance)
        for is_near, rows in ((True, near), (False, ~near)):
            if rows.any():
                states = len(np.unique(self.group[rows]))
                yield Half(is_near, misses[rows].tolist(), self.distance[rows].tolist(), states)


def _predict(x: Floats, physics: Calibrated, booster: Any, span: tuple[Floats, Floats], carried: bool) -> Floats:
    """Physics times exp(forest), seconds.

    Outside ``span``, if the forest is not carried, physics alone; not below the prediction at the edge for rows only
    above the range, not above it for rows only below the range.
    """
    seconds = physics.seconds(x)
    if booster is None:
        return seconds
    # Thresholds lie between training values: outside the range a forest's value is that at the edge.
    factor = np.exp(np.asarray(booster.predict(x), np.float64))
    above, below = (x > span[1]).any(axis=1), (x < span[0]).any(axis=1)
    if carried or not (above | below).any():
        return np.asarray(seconds * factor, np.float64)
    at_edge = physics.seconds(np.clip(x, *span)) * factor
    alone = np.where(above, np.maximum(seconds, at_edge), np.minimum(seconds, at_edge))
    return np.where(above & below, seconds, np.where(above | below, alone, seconds * factor))


def grouped_folds(groups: Sequence[Any] | Ints, folds: int, seed: int) -> list[tuple[Ints, Ints]]:
    """Row numbers to fit to and to test on, fold by fold; whole groups are assigned at random, in equal numbers."""
    return _folds(np.unique(np.asarray(groups), return_inverse=True)[1], folds, seed)


def _folds(group: Ints, folds: int, seed: int) -> list[tuple[Ints, Ints]]:
    names, number = np.unique(group, return_inverse=True)
    fold_of = np.random.default_rng(seed).permutation(np.arange(len(names)) % min(folds, len(names)))
    return fold_rows(fold_of[number])


def _rows_drawn(group: Ints, max_rows: int, seed: int) -> Ints:
    """All row numbers, or those of randomly drawn groups that hold about ``max_rows`` rows."""
    if len(group) <= max_rows:
        return np.arange(len(group))
    names, number = np.unique(group, return_inverse=True)
    order = np.random.default_rng(seed).permutation(len(names))
    drawn = np.cumsum(np.bincount(number)[order]) <= max_rows
    drawn[: 2 * MIN_GROUPS] = True
    return np.flatnonzero(np.isin(number, order[drawn]))


def _weights(sample_weight: Any, seconds: Floats) -> Floats:
    if sample_weight is None:
        return np.ones(len(seconds))
    weight = np.asarray(check_array(sample_weight, ensure_2d=False, dtype=np.float64, input_name="sample_weight"))
    if weight.ndim == 0:
        return np.full(len(seconds), float(weight))
    if weight.shape != seconds.shape:
        raise ValueError(f"sample_weight.shape == {weight.shape}, expected {seconds.shape}")
    _refuse(weight < 0, weight, "sample_weight", "0 or above")
    return weight


def _group_numbers(groups: Any, x: Floats) -> Ints:
    check_consistent_length(x, groups)
    return np.asarray(np.unique(np.asarray(groups), return_inverse=True)[1], np.int64)


def _lengths(lengths: Any, x: Floats) -> Floats:
    check_consistent_length(x, lengths)
    length = np.asarray(check_array(lengths, ensure_2d=False, dtype=np.float64, input_name="lengths"))
    _refuse(length <= 0, length, "lengths", "above 0")
    return length


def _refuse(wrong: Flags, values: Floats, what: str, expected: str) -> None:
    if wrong.any():
        row = int(np.argmax(wrong))
        raise ValueError(f"{what}: row {row} holds {float(values[row])!r}, should be {expected}")
