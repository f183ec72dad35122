"""Families of regressors judged on tables of measured operator times: in range, and extrapolated in length."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from lightgbm import LGBMRegressor
from sklearn.ensemble import RandomForestRegressor

from kvpolicy.arrays import Floats, Ints
from kvpolicy.cost.intervals import conformal_margin
from kvpolicy.regression.estimator import AnalyticRegressor, BoostedRegressor, LinearRegressor, grouped_folds
from kvpolicy.simulator.hardware.operator_tables import Table, quantile_bins

OURS = "physics x trees"
MIN_PER_BIN = 30
LENGTH_BINS, LOAD_BINS = 3, 2
MIN_ROWS = 6
TRAINED_SHARE = 4
"""Extrapolation trains up to that fraction of the longest length."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How long the judging may take."""

    folds: int = 5
    max_rows: int = 6000
    forest_trees: int = 100
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a table to learn from, and rows to judge by."""

    table: Table
    seen: Ints
    unseen: Ints


def ours(part: Part, seed: int, extrapolating: bool) -> BoostedRegressor:
    table = part.table
    regressor = BoostedRegressor(table.times.physics, table.columns, random_state=seed)
    lengths = table.times.length[part.seen] if extrapolating else None
    return regressor.fit(table.x[part.seen], table.seconds[part.seen], groups=table.groups[part.seen], lengths=lengths)


def _physics(part: Part, effort: Effort) -> Floats:
    table = part.table
    regressor = AnalyticRegressor(table.times.physics, table.columns)
    return regressor.fit(table.x[part.seen], table.seconds[part.seen]).predict(table.x[part.unseen])


def _linear(part: Part, effort: Effort) -> Floats:
    table = part.table
    return LinearRegressor(table.columns).fit(table.x[part.seen], table.seconds[part.seen]).predict(
        table.x[part.unseen]
    )  # fmt: skip


def _trees(x: Floats, part: Part, effort: Effort) -> Floats:
    """As many trees of as many leaves as ours may have, on log time."""
    like = BoostedRegressor()
    regressor = LGBMRegressor(
        objective="huber", alpha=0.3, n_estimators=like.max_trees, num_leaves=like.leaves,
        learning_rate=like.learning_rate, min_child_samples=like.min_rows_in_leaf, reg_lambda=1.0,
        random_state=effort.seed, deterministic=True, force_col_wise=True, n_jobs=1, verbosity=-1,
    )  # fmt: skip
    regressor.fit(x[part.seen], np.log(part.table.seconds[part.seen]))
    return np.exp(np.asarray(regressor.booster_.predict(x[part.unseen]), np.float64))


def _trees_only(part: Part, effort: Effort) -> Floats:
    return _trees(part.table.x, part, effort)


def _raw_boosting(part: Part, effort: Effort) -> Floats:
    return _trees(part.table.plain, part, effort)


def _random_forest(part: Part, effort: Effort) -> Floats:
    """Vidur's way: a forest over the measured settings, on the time itself."""
    regressor = RandomForestRegressor(n_estimators=effort.forest_trees, random_state=effort.seed, n_jobs=1)
    regressor.fit(part.table.plain[part.seen], part.table.seconds[part.seen])
    return np.asarray(regressor.predict(part.table.plain[part.unseen]), np.float64)


OTHERS: Mapping[str, Callable[[Part, Effort], Floats]] = {
    "physics alone": _physics,
    "trees alone": _trees_only,
    "raw boosting": _raw_boosting,
    "random forest": _random_forest,
    "linear": _linear,
}
"""``trees alone`` sees the same columns as ours; ``raw boosting`` and ``random forest`` the settings in the file."""


def judge(table: Table, effort: Effort, tell: Callable[[str], None]) -> dict[str, Any]:
    """Every figure of one table, for JSON."""
    stratified_folds = grouped_folds(table.groups, _fold_count(table, effort), effort.seed)
    folds = [Part(table, fit_rows, unseen) for fit_rows, unseen in stratified_folds]
    tell("in range")
    row: dict[str, Any] = {
        "file": table.file, "operator": table.operator, "layout": table.layout, "rows": len(table),
        "points": int(table.groups.max()) + 1, "rows_in_file": table.rows_in_file, "left_out": list(table.left_out),
        "noise": table.noise(), "in_range": _scored(folds, effort, False), "extrapolated": None,
    }  # fmt: skip
    longest = float(table.times.length.max())
    short = table.times.length <= longest / TRAINED_SHARE
    if short.sum() >= MIN_ROWS and (~short).any():
        tell("extrapolated")
        part = Part(table, np.flatnonzero(short), np.flatnonzero(~short))
        row["extrapolated"] = _scored([part], effort, True) | {
            "axis": table.times.length_name,
            "trained_up_to": float(table.times.length[short].max()),
            "longest": longest,
        }
    return row


def _fold_count(table: Table, effort: Effort) -> int:
    """Few points are left out one by one."""
    points = int(table.groups.max()) + 1
    return points if points < 4 * effort.folds else effort.folds


def _scored(parts: list[Part], effort: Effort, extrapolating: bool) -> dict[str, Any]:
    rows = np.concatenate([part.unseen for part in parts])
    table = parts[0].table
    predicted: dict[str, Floats] = {}
    fitted = [ours(part, effort.seed, extrapolating) for part in parts]
    predicted[OURS] = np.concatenate(
        [regressor.predict(table.x[part.unseen]) for regressor, part in zip(fitted, parts, strict=True)]
    )
    for name, fit in OTHERS.items():
        predicted[name] = np.concatenate([fit(part, effort) for part in parts])
    trained = max(float(table.times.length[part.seen].max()) for part in parts)
    far = table.times.length[rows] >= 2 * trained
    scores = {name: errors(table.seconds[rows], seconds) for name, seconds in predicted.items()}
    if len(parts) == 1 and far.any():
        for name, seconds in predicted.items():
            scores[name]["from_2x"] = errors(table.seconds[rows][far], seconds[far])
    return {
        "families": scores,
        "trees": [regressor.trees_ for regressor in fitted],
        "constants": [[constant.term, constant.value, constant.unit] for constant in fitted[-1].constants_],
        "residual_carried": [regressor.carried_ for regressor in fitted],
        "coverage": _coverage(parts, fitted, predicted[OURS], extrapolating),
    }


def errors(measured: Floats, predicted: Floats) -> dict[str, Any]:
    """Relative errors, |predicted / measured - 1|; ``bias`` is their signed mean."""
    signed = predicted / measured - 1
    size = np.abs(signed)
    return {
        "n": len(size), "mean": float(size.mean()), "median": float(np.median(size)),
        "p90": float(np.quantile(size, 0.9)), "bias": float(signed.mean()),
    }  # fmt: skip


def _coverage(
    parts: list[Part], fitted: list[BoostedRegressor], predicted: Floats, extrapolating: bool
) -> list[dict[str, Any]]:
    """The 90% interval's share of hits per bin of length x load, by split-conformal widths of the same bin.

    Extrapolated they widen beyond the range, as measured by inner extrapolation; without data for that they are
    infinite, and the bin is not ``bounded``.
    """
    table = parts[0].table
    by_length, by_load = quantile_bins(table.times.length, LENGTH_BINS), quantile_bins(table.times.load, LOAD_BINS)
    cell = by_length * LOAD_BINS + by_load
    hits: dict[int, list[bool]] = {}
    unbounded = set()
    at = 0
    for part, regressor in zip(parts, fitted, strict=True):
        own = predicted[at : at + len(part.unseen)]
        at += len(part.unseen)
        if regressor.unseen_misses_ is None:
            continue
        log_errors = np.log(table.seconds[part.unseen] / own)
        for bin_number in np.unique(cell[part.unseen]).tolist():
            calibration = _calibration(regressor.unseen_misses_, cell[part.seen], by_length[part.seen], bin_number)
            below, above = conformal_margin(calibration)
            in_bin = cell[part.unseen] == bin_number
            if extrapolating:
                widening = regressor.widening((below, above))
                if widening.growth == np.inf:
                    unbounded.add(bin_number)
                ratio = table.times.length[part.unseen][in_bin] / table.times.length[part.seen].max()
                added = np.array([widening.at(far) for far in np.log(ratio).tolist()])
                low, high = below + added, above + added
            else:
                low, high = np.array(below), np.array(above)
            hits.setdefault(bin_number, []).extend(
                ((-low <= log_errors[in_bin]) & (log_errors[in_bin] <= high)).tolist()
            )
    test_rows = np.concatenate([part.unseen for part in parts])
    return [
        {
            "length": _span(table.times.length[test_rows][cell[test_rows] == bin_number]),
            "load": _span(table.times.load[test_rows][cell[test_rows] == bin_number]),
            "n": len(in_bin),
            "covered": sum(in_bin) / len(in_bin),
            "bounded": bin_number not in unbounded,
        }
        for bin_number, in_bin in sorted(hits.items())
    ]


def _calibration(misses: Floats, cell: Ints, by_length: Ints, bin_number: int) -> list[float]:
    """Misses of the bin; of its lengths, or of all, where it has under 30."""
    for rows in (cell == bin_number, by_length == bin_number // LOAD_BINS):
        if rows.sum() >= MIN_PER_BIN:
            return list(misses[rows])
    return list(misses)


def _span(values: Floats) -> list[float]:
    return [float(values.min()), float(values.max())]
