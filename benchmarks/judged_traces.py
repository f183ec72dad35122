"""Cost models, other regressors and rules judged on traces in which every state was measured under both options."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import log
from typing import Any

import numpy as np
from judged_tables import Effort, errors
from lightgbm import LGBMRegressor
from sklearn.ensemble import RandomForestRegressor

from kvpolicy.arrays import Floats, Ints
from kvpolicy.datasets.examples import MIN_FLOOR_S, examples_of, noise_floors, option_of, stratified_folds
from kvpolicy.datasets.profiles import Dataset, State, read_dataset
from kvpolicy.datasets.threshold import BEST_THRESHOLD, best_threshold
from kvpolicy.evaluation.replay import price
from kvpolicy.events import KINDS, Cost, Kind
from kvpolicy.policy import load
from kvpolicy.regression.ceilings import LAUNCH, Ceilings
from kvpolicy.regression.estimator import AnalyticRegressor, BoostedRegressor, LinearRegressor, grouped_folds
from kvpolicy.training import provenance_of
from kvpolicy.training.family import FAMILIES
from kvpolicy.training.fit import fit

Seconds = dict[Kind, float]
Predictor = Callable[[State], Seconds]

NEAR_BREAK_EVEN = 0.10
FIXED = ("always-recompute", "always-swap")
MIN_TRANSFERS = 20


@dataclass(frozen=True, slots=True)
class Prediction:
    """One unseen state: predicted seconds by option; what was chosen; and the costs with intervals, where there are."""

    state: State
    seconds: Seconds | None
    chosen: Kind
    costs: Mapping[Kind, Cost] | None = None


def judge(name: str, effort: Effort, tell: Callable[[str], None]) -> dict[str, Any]:
    """Every figure of one trace, for JSON."""
    dataset = read_dataset([name])
    states = list(dataset.states)
    folds = _folds(states, effort)
    tell("in range")
    row: dict[str, Any] = {"trace": name, "states": len(states), "in_range": _scored(dataset, folds, effort)}
    longest = max(state.computed_tokens for state in states)
    fit_states = [state for state in states if state.computed_tokens <= longest / 4]
    unseen = [state for state in states if state.computed_tokens > longest / 4]
    tell("extrapolated")
    row["extrapolated"] = _scored(dataset, [(fit_states, unseen)], effort) | {
        "trained_up_to": max(state.computed_tokens for state in fit_states), "longest": longest,
        "trained_states": len(fit_states),
    }  # fmt: skip
    tell("segments")
    row["segment_bytes"] = _segments(dataset, effort)
    return row


def _folds(states: list[State], effort: Effort) -> list[tuple[list[State], list[State]]]:
    hand = stratified_folds(states, effort.folds, random.Random(f"judged {effort.seed}"))
    pairs = list(zip(states, hand, strict=True))
    return [
        ([s for s, h in pairs if h != fold_number], [s for s, h in pairs if h == fold_number])
        for fold_number in range(effort.folds)
    ]


def _scored(
    dataset: Dataset, folds: Sequence[tuple[list[State], list[State]]], effort: Effort
) -> dict[str, dict[str, Any]]:
    fitted_by_name: dict[str, list[Prediction]] = {}
    for fit_states, unseen in folds:
        for family in FAMILIES:
            fitted_by_name.setdefault(family, []).extend(_by_model(family, dataset, fit_states, unseen, effort.seed))
        for name, learn in {"raw boosting": _raw_boosting, "random forest": _random_forest}.items():
            fitted_by_name.setdefault(name, []).extend(_by_regressor(learn, fit_states, unseen, effort))
        for name, rule in _rules(fit_states).items():
            fitted_by_name.setdefault(name, []).extend(Prediction(state, None, rule(state)) for state in unseen)
    floor_s = noise_floors(dataset.states)
    return {"families": {name: _score(predictions, floor_s) for name, predictions in fitted_by_name.items()}}


def _by_model(
    family: str, dataset: Dataset, fit_states: list[State], unseen: list[State], seed: int
) -> list[Prediction]:
    model = fit(FAMILIES[family], fit_states, dataset, provenance_of(family, dataset, fit_states, None), seed).model
    predictions = []
    for state in unseen:
        costs = {}
        for kind in KINDS:
            situation = state.samples[kind][0].situation
            options = [option_of(option_kind, situation.computed_tokens) for option_kind in KINDS]
            costs[kind] = model.predict(situation, options)[KINDS.index(kind)]
        seconds = {kind: costs[kind].engine_s for kind in KINDS}
        predictions.append(Prediction(state, seconds, min(KINDS, key=seconds.__getitem__), costs))
    return predictions


def _by_regressor(
    learn: Callable[[Floats, Floats, Effort], Callable[[Floats], Floats]],
    fit_states: list[State],
    unseen: list[State],
    effort: Effort,
) -> list[Prediction]:
    seconds: list[Seconds] = [{} for _ in unseen]
    for kind in KINDS:
        old, new = examples_of(fit_states)[kind], examples_of(unseen)[kind]
        times = np.maximum([kind_seconds.engine_s for kind_seconds in old], MIN_FLOOR_S)
        predicted = learn(np.array([kind_seconds.x for kind_seconds in old]), times, effort)(
            np.array([kind_seconds.x for kind_seconds in new])
        )
        for kind_seconds, value in zip(seconds, predicted.tolist(), strict=True):
            kind_seconds[kind] = value
    return [
        Prediction(state, kind_seconds, min(KINDS, key=kind_seconds.__getitem__))
        for state, kind_seconds in zip(unseen, seconds, strict=True)
    ]


def _raw_boosting(x: Floats, seconds: Floats, effort: Effort) -> Callable[[Floats], Floats]:
    regressor = LGBMRegressor(
        objective="huber", alpha=0.3, n_estimators=100, num_leaves=31, min_child_samples=5, reg_lambda=1.0,
        random_state=effort.seed, deterministic=True, force_col_wise=True, n_jobs=1, verbosity=-1,
    ).fit(x, np.log(seconds))  # fmt: skip
    return lambda rows: np.exp(np.asarray(regressor.booster_.predict(rows), np.float64))


def _random_forest(x: Floats, seconds: Floats, effort: Effort) -> Callable[[Floats], Floats]:
    regressor = RandomForestRegressor(n_estimators=effort.forest_trees, random_state=effort.seed, n_jobs=1)
    regressor.fit(x, seconds)
    return lambda rows: np.asarray(regressor.predict(rows), np.float64)


def _rules(fit_states: Sequence[State]) -> dict[str, Callable[[State], Kind]]:
    """The fixed actions, and the token threshold that is cheapest on the states it is made from."""
    rule = best_threshold(fit_states)
    return {
        "always recompute": lambda state: "recompute",
        "always swap": lambda state: "swap",
        BEST_THRESHOLD: lambda state: rule.option(state.computed_tokens),
    }


def _score(predictions: Sequence[Prediction], floor_s: Seconds) -> dict[str, Any]:
    """Costs below the noise floor, measured or predicted, count as that much, as in training."""
    scores: dict[str, Any] = {"states": len(predictions), **_choices(predictions)}
    priced = [prediction for prediction in predictions if prediction.seconds is not None]
    if not priced:
        return scores
    for kind in KINDS:
        seconds = np.array([prediction.seconds[kind] for prediction in priced if prediction.seconds is not None])
        typical = np.array([prediction.state.typical_s[kind] for prediction in priced])
        scores[kind] = errors(np.maximum(typical, floor_s[kind]), np.maximum(seconds, floor_s[kind]))
    if priced[0].costs is not None:
        scores["coverage"] = {
            **{kind: _coverage(priced, partial(_holds, kind=kind, floor_s=floor_s)) for kind in KINDS},
            "ratio": _coverage(priced, partial(_holds_ratio, floor_s=floor_s)),
        }
    return scores


def _choices(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Sign accuracy outside +-10% of break-even, and regret over the oracle under the split-half rule."""
    fixed = [load(name) for name in FIXED]
    decided, right, paid, oracle = 0, 0, 0.0, 0.0
    for prediction in predictions:
        mean = prediction.state.mean_s
        if min(mean.values()) <= 0 or abs(log(mean["swap"] / mean["recompute"])) > log(1 + NEAR_BREAK_EVEN):
            decided += 1
            right += prediction.chosen == prediction.state.faster
        prices = price(prediction.state, fixed)
        paid += prices.policy_s[KINDS.index(prediction.chosen)]
        oracle += prices.oracle_s
    return {
        "sign_accuracy": right / decided if decided else None,
        "sign_states": decided,
        "regret": paid / oracle - 1 if oracle > 0 else None,
        "total_s": paid,
        "oracle_s": oracle,
    }


def _holds(prediction: Prediction, kind: Kind, floor_s: Seconds) -> bool:
    assert prediction.costs is not None
    cost = prediction.costs[kind]
    return cost.low_s <= max(prediction.state.typical_s[kind], floor_s[kind]) <= cost.high_s


def _holds_ratio(prediction: Prediction, floor_s: Seconds) -> bool:
    """Of log(cost of the swap / cost of the recompute)."""
    assert prediction.costs is not None
    cost = prediction.costs["swap"]
    swap_s, recompute_s = (max(prediction.state.typical_s[kind], floor_s[kind]) for kind in ("swap", "recompute"))
    return cost.log_ratio_low <= log(swap_s / recompute_s) <= cost.log_ratio_high


def _coverage(predictions: Sequence[Prediction], holds: Callable[[Prediction], bool]) -> list[dict[str, Any]]:
    """Per bin of length (halves) and load (alone or not): how often what is typical lay in the 90% interval."""
    middle = float(np.median([prediction.state.computed_tokens for prediction in predictions]))
    bins: dict[tuple[str, str], list[Prediction]] = {}
    for prediction in predictions:
        running = prediction.state.samples["recompute"][0].situation.running_requests
        key = (f"{'up to' if prediction.state.computed_tokens <= middle else 'over'} {middle:.0f} tokens",
               "others run" if running else "alone")  # fmt: skip
        bins.setdefault(key, []).append(prediction)
    return [
        {
            "length": key[0], "load": key[1], "n": len(bin_predictions),
            "covered": sum(map(holds, bin_predictions)) / len(bin_predictions),
            "bounded": all(_bounded(prediction) for prediction in bin_predictions),
        }
        for key, bin_predictions in sorted(bins.items())
    ]  # fmt: skip


def _bounded(prediction: Prediction) -> bool:
    assert prediction.costs is not None
    return all(cost.high_s < float("inf") for cost in prediction.costs.values())


# ---- with and without contiguous segment bytes ----

BYTES_ONLY = ("size_bytes",)
WITH_SEGMENTS = ("size_bytes", "segments", "segment_bytes")


def _segments(dataset: Dataset, effort: Effort) -> dict[str, Any]:
    """A copy's own duration from its bytes alone, and from its segments too; whole preemptions held out."""
    scores: dict[str, Any] = {}
    for direction in ("save", "load"):
        transfers = [m for m in dataset.transfers if m.direction == direction and m.size_bytes > 0 and m.duration_s > 0]
        if len(transfers) < MIN_TRANSFERS:
            continue
        sizes, segments = np.array([[m.size_bytes, max(m.segments, 1)] for m in transfers], np.float64).T
        seconds = np.array([m.duration_s for m in transfers])
        scores[direction] = with_and_without(sizes, segments, seconds, [m.preemption_id for m in transfers], effort)
    return scores


def made_up_copies(effort: Effort, copies: int = 1200) -> dict[str, Any]:
    """The same for copies made up under a known law, seeded, in pieces of 4 KiB to 2 MiB: not a measurement.

    Traces of one engine hold one or two piece sizes; what the feature is for needs many.
    """
    rng = np.random.default_rng(effort.seed)
    piece = 4096.0 * 2 ** rng.integers(0, 10, copies)
    segments = np.ceil(np.exp(rng.uniform(np.log(1e6), np.log(1e9), copies)) / piece)
    seconds = (2e-5 + piece * segments / 2.2e10 + 3e-6 * segments) * np.exp(rng.normal(0, 0.02, copies))
    return with_and_without(piece * segments, segments, seconds, np.arange(copies).tolist(), effort)


def with_and_without(
    sizes: Floats, segments: Floats, seconds: Floats, preemptions: Sequence[Any], effort: Effort
) -> dict[str, Any]:
    groups = np.unique(np.asarray(preemptions), return_inverse=True)[1]
    x = np.column_stack([sizes, segments, sizes / segments])
    return {
        "n": len(seconds),
        "segment_bytes": np.unique(x[:, 2]).tolist()[:20],
        "without": _held_out(x[:, :1], BYTES_ONLY, seconds, groups, effort),
        "with": _held_out(x, WITH_SEGMENTS, seconds, groups, effort),
    }


def _held_out(x: Floats, columns: tuple[str, ...], seconds: Floats, groups: Ints, effort: Effort) -> dict[str, Any]:
    physics = Ceilings(((LAUNCH,), *((name,) for name in columns if name != "segment_bytes")))
    families = {
        "physics x trees": BoostedRegressor(physics, columns, min_rows_in_leaf=20),
        "physics alone": AnalyticRegressor(physics, columns),
        "linear": LinearRegressor(columns),
    }
    scores = {}
    for name, regressor in families.items():
        predicted = np.empty(len(seconds))
        for fit_rows, unseen in grouped_folds(groups, effort.folds, effort.seed):
            predicted[unseen] = regressor.fit(x[fit_rows], seconds[fit_rows], groups=groups[fit_rows]).predict(
                x[unseen]
            )
        scores[name] = errors(seconds, predicted)
    return scores
