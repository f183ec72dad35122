"""Scikit-learn regressors for times: physics x exp(boosted residual), physics alone, and a weighted sum.

Three families behind one protocol: ``fit(X, y, sample_weight=None, groups=None)``, ``predict``. ``X`` holds counts that
are 0 or above (tokens, bytes, FLOPs), ``y`` seconds above 0. Rows of one group (repeats of one measured point) are
never on both sides of a split.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils.validation import check_array, check_consistent_length, check_is_fitted, validate_data

from kvpolicy.arrays import Flags, Floats, Ints
from kvpolicy.regression.ceilings import Calibrated, Ceilings, Constant, Physics
from kvpolicy.regression.conformal import CONFIDENCE, SHARES, Room, carries, excess, growth_of
from kvpolicy.regression.nnls import relative_sum
from kvpolicy.regression.residual import TREE_COUNTS, Growth, Unseen, choose_tree_count, grow

MIN_GROUPS = 20
"""With fewer nothing can be decided on unseen groups, and the residual is left out."""
MIN_SHORT_STATES = 6
"""Groups up to an inner edge: with fewer the physics is not told."""
ROWS_TO_DECIDE_BY = 100_000
"""How many trees there are is decided on about so many rows, whole groups drawn; they are grown on all."""


class _Times(RegressorMixin, BaseEstimator):
    """Checks what all families check. ``columns`` names the columns of ``X`` where it has no names of its own."""

    columns: Sequence[str] | None
    n_features_in_: int

    def fit(self, X: Any, y: Any, sample_weight: Any = None, groups: Any = None, lengths: Any = None) -> Self:
        """Learn. ``lengths``: one per row, above 0, where a fit is to tell how it extrapolates along them.

        Raises ValueError naming the row for a time or length that is not above 0, and for a count below 0.
        """
        x, seconds = validate_data(self, X, y, dtype=np.float64, y_numeric=True, ensure_min_samples=2)
        seconds = np.asarray(seconds, np.float64)
        _refuse(seconds <= 0, seconds, "Times", "above 0 s")
        _refuse((x < 0).any(axis=1), x.min(axis=1), "Negative values in data", "0 or above")
        weight = _weights(sample_weight, seconds)
        group = np.arange(len(x)) if groups is None else _numbered(groups, x)
        length = None if lengths is None else _lengths(lengths, x)
        self.columns_ = self._names(x.shape[1])
        # A row without weight is no row: neither constants, nor leaves, nor folds may know of it.
        some = weight > 0
        if some.sum() < 2:
            raise ValueError(f"sample_weight is zero but for {some.sum()} sample(s); a minimum of 2 is required")
        self._learn(x[some], seconds[some], weight[some], group[some], None if length is None else length[some])
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
        given = self.columns if self.columns is not None else getattr(self, "feature_names_in_", None)
        names = tuple(f"x{i}" for i in range(count)) if given is None else tuple(map(str, given))
        if len(names) != count or len(set(names)) != count:
            raise ValueError(f"columns: {len(set(names))} different names for {count} columns of X")
        return names

    def _learn(self, x: Floats, seconds: Floats, weight: Floats, group: Ints, length: Floats | None) -> None:
        raise NotImplementedError

    def _seconds(self, x: Floats) -> Floats:
        raise NotImplementedError


class LinearRegressor(_Times):
    """A weighted sum of the columns and a constant, none below 0, errors relative."""

    def __init__(self, columns: Sequence[str] | None = None) -> None:
        self.columns = columns

    def _learn(self, x: Floats, seconds: Floats, weight: Floats, group: Ints, length: Floats | None) -> None:
        design = np.column_stack([np.ones(len(x)), x])
        found = relative_sum(design, seconds, weight / seconds**2)
        self.intercept_, self.coef_ = float(found[0]), found[1:]

    def _seconds(self, x: Floats) -> Floats:
        return np.asarray(self.intercept_ + x @ self.coef_, np.float64)


class AnalyticRegressor(_Times):
    """Physics alone, its constants calibrated.

    ``physics``: :class:`~kvpolicy.regression.ceilings.Ceilings` where None.
    """

    def __init__(self, physics: Physics | None = None, columns: Sequence[str] | None = None) -> None:
        self.physics = physics
        self.columns = columns

    @property
    def constants_(self) -> tuple[Constant, ...]:
        """The calibrated constants with their units."""
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

    How many trees, at most ``max_trees``, is decided by grouped cross-validation; none, where they do not help on
    groups that they have not seen. Beyond the trained range either the forest goes on saying what it says at the
    range's edge (``carried_``), or physics is alone, never below the prediction at the edge: whichever missed less in
    inner extrapolation (:mod:`kvpolicy.regression.conformal`) where ``fit`` was given ``lengths``; carried where it
    was not.

    After ``fit``: ``trees_``, ``physics_``, ``constants_``, ``unseen_misses_`` (log(measured / predicted) of each row
    with weight by a fit without its group; NaN for rows not drawn, None where there were too few groups), ``inner_``
    (what inner extrapolation missed; None without ``lengths`` or groups enough).
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
            self._decide(x, seconds, weight, group)
        if self.trees_:
            wanted = np.log(seconds / self.physics_.seconds(x))
            self.booster_ = grow(x, wanted, self.columns_, self.trees_, self._growth(), weight)
        self.range_ = x.min(axis=0), x.max(axis=0)
        self.carried_ = True
        self.inner_: tuple[Inner, ...] | None = None
        if length is not None and self.unseen_misses_ is not None:
            self._look_beyond(x, seconds, weight, group, length)

    def _look_beyond(self, x: Floats, seconds: Floats, weight: Floats, group: Ints, length: Floats) -> None:
        drawn = _drawn(group, ROWS_TO_DECIDE_BY, self.random_state)
        x, seconds, weight, group, length = x[drawn], seconds[drawn], weight[drawn], group[drawn], length[drawn]
        found: list[Inner] = []
        for share in SHARES:
            short = length <= share * length.max()
            if len(np.unique(group[short])) < MIN_SHORT_STATES:
                continue
            physics = self._calibrated(x[short], seconds[short], weight[short])
            booster = None
            if self.trees_ and len(np.unique(group[short])) >= MIN_GROUPS:
                wanted = np.log(seconds[short] / physics.seconds(x[short]))
                booster = grow(x[short], wanted, self.columns_, self.trees_, self._growth(), weight[short])
            span = x[short].min(axis=0), x[short].max(axis=0)
            carried, dropped = (_priced(x[~short], physics, booster, span, keep) for keep in (True, False))
            measured, distance = seconds[~short], np.log(length[~short] / length[short].max())
            found.append(Inner(share, group[~short], distance, np.log(measured / carried), np.log(measured / dropped)))
        if found:
            self.inner_ = tuple(found)
            states = len(np.unique(np.concatenate([one.group for one in found])))
            carried, dropped = (
                np.concatenate([getattr(one, name) for one in found]) for name in ("carried", "dropped")
            )
            self.carried_ = carries(carried.tolist(), dropped.tolist(), states, otherwise=True)

    def growth(self, room: Room, confidence: float = CONFIDENCE) -> float:
        """Room to add to either side of ``room``, that inside the range, per log of how far beyond it a length is.

        ``inf`` where too few points told.
        """
        check_is_fitted(self)
        scores: list[float] = []
        for one in self.inner_ or ():
            missed = one.carried if self.carried_ else one.dropped
            scores += [
                excess(*both) for both in zip(missed.tolist(), [room] * len(missed), one.distance.tolist(), strict=True)
            ]
        points = {int(number) for one in self.inner_ or () for number in one.group}
        return growth_of(scores, len(points), confidence)

    def _decide(self, x: Floats, seconds: Floats, weight: Floats, group: Ints) -> None:
        drawn = _drawn(group, ROWS_TO_DECIDE_BY, self.random_state)
        x, y, weight = x[drawn], seconds[drawn], weight[drawn]
        rows, folds = [], []
        for seen, unseen in _folds(group[drawn], self.folds, self.random_state):
            physics = self._calibrated(x[seen], y[seen], weight[seen])
            wanted = np.log(y / physics.seconds(x))
            booster = grow(x[seen], wanted[seen], self.columns_, self.max_trees, self._growth(), weight[seen])
            rows.append(drawn[unseen])
            folds.append(Unseen(booster, x[unseen], wanted[unseen], weight[unseen]))
        counts = [count for count in TREE_COUNTS if count < self.max_trees] + [self.max_trees]
        self.trees_ = choose_tree_count(folds, counts)
        misses = np.full(len(seconds), np.nan)
        for row, fold in zip(rows, folds, strict=True):
            misses[row] = fold.misses(self.trees_)
        self.unseen_misses_ = misses

    def _growth(self) -> Growth:
        return Growth(
            leaves=self.leaves,
            learning_rate=self.learning_rate,
            min_rows_in_leaf=self.min_rows_in_leaf,
            monotone=frozenset(self.monotone),
            seed=self.random_state,
            threads=self.n_jobs,
        )

    def _seconds(self, x: Floats) -> Floats:
        return _priced(x, self.physics_, self.booster_, self.range_, self.carried_)


@dataclass(frozen=True, slots=True)
class Inner:
    """One fit on what is short, and how far it missed all that is longer: one number per row."""

    share: float
    """Of the longest length: up to there it learned."""
    group: Ints
    distance: Floats
    """log(length / longest learned)."""
    carried: Floats
    """log(measured / predicted) with the forest kept at the range's edge."""
    dropped: Floats


def _priced(x: Floats, physics: Calibrated, booster: Any, span: tuple[Floats, Floats], carried: bool) -> Floats:
    """Physics times exp(forest). Outside ``span``, where the forest is not carried, physics alone, held above (below)
    the prediction at the edge for rows that are only above (below) it."""
    seconds = physics.seconds(x)
    if booster is None:
        return seconds
    # Thresholds lie between values of training: beyond the edge a forest says what it says there.
    factor = np.exp(np.asarray(booster.predict(x), np.float64))
    above, below = (x > span[1]).any(axis=1), (x < span[0]).any(axis=1)
    if carried or not (above | below).any():
        return np.asarray(seconds * factor, np.float64)
    at_edge = physics.seconds(np.clip(x, *span)) * factor
    alone = np.where(above, np.maximum(seconds, at_edge), np.minimum(seconds, at_edge))
    return np.where(above & below, seconds, np.where(above | below, alone, seconds * factor))


def grouped_folds(groups: Sequence[Any] | Ints, folds: int, seed: int) -> Iterator[tuple[Ints, Ints]]:
    """Row numbers to learn from and to judge by; whole groups are dealt out at random, in equal numbers."""
    return _folds(np.unique(np.asarray(groups), return_inverse=True)[1], folds, seed)


def _folds(group: Ints, folds: int, seed: int) -> Iterator[tuple[Ints, Ints]]:
    names, number = np.unique(group, return_inverse=True)
    hands = min(folds, len(names))
    hand = np.random.default_rng(seed).permutation(np.arange(len(names)) % hands)[number]
    for one in range(hands):
        yield np.flatnonzero(hand != one), np.flatnonzero(hand == one)


def _drawn(group: Ints, max_rows: int, seed: int) -> Ints:
    """All row numbers, or those of groups drawn at random that hold about as many rows as are wanted."""
    if len(group) <= max_rows:
        return np.arange(len(group))
    names, number = np.unique(group, return_inverse=True)
    order = np.random.default_rng(seed).permutation(len(names))
    kept = np.cumsum(np.bincount(number)[order]) <= max_rows
    kept[: 2 * MIN_GROUPS] = True
    return np.flatnonzero(np.isin(number, order[kept]))


def _weights(given: Any, seconds: Floats) -> Floats:
    if given is None:
        return np.ones(len(seconds))
    weight = np.asarray(check_array(given, ensure_2d=False, dtype=np.float64, input_name="sample_weight"))
    if weight.ndim == 0:
        return np.full(len(seconds), float(weight))
    if weight.shape != seconds.shape:
        raise ValueError(f"sample_weight.shape == {weight.shape}, expected {seconds.shape}")
    _refuse(weight < 0, weight, "sample_weight", "0 or above")
    return weight


def _numbered(groups: Any, x: Floats) -> Ints:
    check_consistent_length(x, groups)
    return np.asarray(np.unique(np.asarray(groups), return_inverse=True)[1], np.int64)


def _lengths(given: Any, x: Floats) -> Floats:
    check_consistent_length(x, given)
    length = np.asarray(check_array(given, ensure_2d=False, dtype=np.float64, input_name="lengths"))
    _refuse(length <= 0, length, "lengths", "above 0")
    return length


def _refuse(bad: Flags, values: Floats, what: str, should: str) -> None:
    if bad.any():
        row = int(np.argmax(bad))
        raise ValueError(f"{what}: row {row} holds {float(values[row])!r}, should be {should}")
