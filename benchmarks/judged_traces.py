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
    found: dict[str, Any] = {"trace": name, "states": len(states), "in_range": _scored(dataset, folds, effort)}
    longest = max(state.computed_tokens for state in states)
    seen = [state for state in states if state.computed_tokens <= longest / 4]
    unseen = [state for state in states if state.computed_tokens > longest / 4]
    tell("extrapolated")
    found["extrapolated"] = _scored(dataset, [(seen, unseen)], effort) | {
        "trained_up_to": max(state.computed_tokens for state in seen), "longest": longest, "trained_states": len(seen),
    }  # fmt: skip
    tell("segments")
    found["segment_bytes"] = _segments(dataset, effort)
    return found


def _folds(states: list[State], effort: Effort) -> list[tuple[list[State], list[State]]]:
    hand = stratified_folds(states, effort.folds, random.Random(f"judged {effort.seed}"))
    pairs = list(zip(states, hand, strict=True))
    return [([s for s, h in pairs if h != one], [s for s, h in pairs if h == one]) for one in range(effort.folds)]


def _scored(
    dataset: Dataset, folds: Sequence[tuple[list[State], list[State]]], effort: Effort
) -> dict[str, dict[str, Any]]:
    made: dict[str, list[Prediction]] = {}
    for seen, unseen in folds:
        for family in FAMILIES:
            made.setdefault(family, []).extend(_by_model(family, dataset, seen, unseen, effort.seed))
        for name, learn in {"raw boosting": _raw_boosting, "random forest": _random_forest}.items():
            made.setdefault(name, []).extend(_by_regressor(learn, seen, unseen, effort))
        for name, rule in _rules(seen).items():
            made.setdefault(name, []).extend(Prediction(state, None, rule(state)) for state in unseen)
    floor_s = noise_floors(dataset.states)
    return {"families": {name: _score(predictions, floor_s) for name, predictions in made.items()}}


def _by_model(family: str, dataset: Dataset, seen: list[State], unseen: list[State], seed: int) -> list[Prediction]:
    model = fit(FAMILIES[family], seen, dataset, provenance_of(family, dataset, seen, None), seed).model
    found = []
    for state in unseen:
        costs = {}
        for kind in KINDS:
            situation = state.samples[kind][0].situation
            options = [option_of(one, situation.computed_tokens) for one in KINDS]
            costs[kind] = model.predict(situation, options)[KINDS.index(kind)]
        seconds = {kind: costs[kind].engine_s for kind in KINDS}
        found.append(Prediction(state, seconds, min(KINDS, key=seconds.__getitem__), costs))
    return found


def _by_regressor(
    learn: Callable[[Floats, Floats, Effort], Callable[[Floats], Floats]],
    seen: list[State],
    unseen: list[State],
    effort: Effort,
) -> list[Prediction]:
    seconds: list[Seconds] = [{} for _ in unseen]
    for kind in KINDS:
        old, new = examples_of(seen)[kind], examples_of(unseen)[kind]
        times = np.maximum([one.engine_s for one in old], MIN_FLOOR_S)
        predicted = learn(np.array([one.x for one in old]), times, effort)(np.array([one.x for one in new]))
        for one, value in zip(seconds, predicted.tolist(), strict=True):
            one[kind] = value
    return [Prediction(state, one, min(KINDS, key=one.__getitem__)) for state, one in zip(unseen, seconds, strict=True)]


def _raw_boosting(x: Floats, seconds: Floats, effort: Effort) -> Callable[[Floats], Floats]:
    made = LGBMRegressor(
        objective="huber", alpha=0.3, n_estimators=100, num_leaves=31, min_child_samples=5, reg_lambda=1.0,
        random_state=effort.seed, deterministic=True, force_col_wise=True, n_jobs=1, verbosity=-1,
    ).fit(x, np.log(seconds))  # fmt: skip
    return lambda rows: np.exp(np.asarray(made.booster_.predict(rows), np.float64))


def _random_forest(x: Floats, seconds: Floats, effort: Effort) -> Callable[[Floats], Floats]:
    made = RandomForestRegressor(n_estimators=effort.forest_trees, random_state=effort.seed, n_jobs=1)
    made.fit(x, seconds)
    return lambda rows: np.asarray(made.predict(rows), np.float64)


def _rules(seen: Sequence[State]) -> dict[str, Callable[[State], Kind]]:
    """The fixed actions, and the token threshold that is cheapest on the states it is made from."""
    cuts = sorted({state.computed_tokens for state in seen} | {float("inf"), 0.0})

    def cost(cut: float) -> float:
        return sum(s.mean_s["swap" if s.computed_tokens >= cut else "recompute"] for s in seen)

    best = min(cuts, key=cost)
    return {
        "always recompute": lambda state: "recompute",
        "always swap": lambda state: "swap",
        "best threshold": lambda state: "swap" if state.computed_tokens >= best else "recompute",
    }


def _score(predictions: Sequence[Prediction], floor_s: Seconds) -> dict[str, Any]:
    """Costs below the noise floor, measured or predicted, count as that much, as in training."""
    found: dict[str, Any] = {"states": len(predictions), **_choices(predictions)}
    priced = [one for one in predictions if one.seconds is not None]
    if not priced:
        return found
    for kind in KINDS:
        seconds = np.array([one.seconds[kind] for one in priced if one.seconds is not None])
        typical = np.array([one.state.typical_s[kind] for one in priced])
        found[kind] = errors(np.maximum(typical, floor_s[kind]), np.maximum(seconds, floor_s[kind]))
    if priced[0].costs is not None:
        found["coverage"] = {
            **{kind: _coverage(priced, partial(_holds, kind=kind, floor_s=floor_s)) for kind in KINDS},
            "ratio": _coverage(priced, partial(_holds_ratio, floor_s=floor_s)),
        }
    return found


def _choices(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Sign accuracy outside +-10% of break-even, and regret over the oracle under the split-half rule."""
    fixed = [load(name) for name in FIXED]
    decided, right, paid, oracle = 0, 0, 0.0, 0.0
    for one in predictions:
        mean = one.state.mean_s
        if min(mean.values()) <= 0 or abs(log(mean["swap"] / mean["recompute"])) > log(1 + NEAR_BREAK_EVEN):
            decided += 1
            right += one.chosen == one.state.faster
        prices = price(one.state, fixed)
        paid += prices.policy_s[KINDS.index(one.chosen)]
        oracle += prices.oracle_s
    return {
        "sign_accuracy": right / decided if decided else None,
        "sign_states": decided,
        "regret": paid / oracle - 1 if oracle > 0 else None,
        "total_s": paid,
        "oracle_s": oracle,
    }


def _holds(one: Prediction, kind: Kind, floor_s: Seconds) -> bool:
    assert one.costs is not None
    cost = one.costs[kind]
    return cost.low_s <= max(one.state.typical_s[kind], floor_s[kind]) <= cost.high_s


def _holds_ratio(one: Prediction, floor_s: Seconds) -> bool:
    """Of log(cost of the swap / cost of the recompute)."""
    assert one.costs is not None
    cost = one.costs["swap"]
    swap_s, recompute_s = (max(one.state.typical_s[kind], floor_s[kind]) for kind in ("swap", "recompute"))
    return cost.log_ratio_low <= log(swap_s / recompute_s) <= cost.log_ratio_high


def _coverage(predictions: Sequence[Prediction], holds: Callable[[Prediction], bool]) -> list[dict[str, Any]]:
    """Per bin of length (halves) and load (alone or not): how often what is typical lay in the 90% interval."""
    middle = float(np.median([one.state.computed_tokens for one in predictions]))
    bins: dict[tuple[str, str], list[Prediction]] = {}
    for one in predictions:
        running = one.state.samples["recompute"][0].situation.running_requests
        key = (f"{'up to' if one.state.computed_tokens <= middle else 'over'} {middle:.0f} tokens",
               "others run" if running else "alone")  # fmt: skip
        bins.setdefault(key, []).append(one)
    return [
        {
            "length": key[0], "load": key[1], "n": len(some), "covered": sum(map(holds, some)) / len(some),
            "bounded": all(_bounded(one) for one in some),
        }
        for key, some in sorted(bins.items())
    ]  # fmt: skip


def _bounded(one: Prediction) -> bool:
    assert one.costs is not None
    return all(cost.high_s < float("inf") for cost in one.costs.values())


# ---- with and without contiguous segment bytes ----

BYTES_ONLY = ("size_bytes",)
WITH_SEGMENTS = ("size_bytes", "segments", "segment_bytes")


def _segments(dataset: Dataset, effort: Effort) -> dict[str, Any]:
    """A copy's own duration from its bytes alone, and from its segments too; whole preemptions held out."""
    found: dict[str, Any] = {}
    for direction in ("save", "load"):
        transfers = [m for m in dataset.transfers if m.direction == direction and m.size_bytes > 0 and m.duration_s > 0]
        if len(transfers) < MIN_TRANSFERS:
            continue
        sizes, segments = np.array([[m.size_bytes, max(m.segments, 1)] for m in transfers], np.float64).T
        seconds = np.array([m.duration_s for m in transfers])
        found[direction] = with_and_without(sizes, segments, seconds, [m.preemption_id for m in transfers], effort)
    return found


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
    found = {}
    for name, made in families.items():
        predicted = np.empty(len(seconds))
        for seen, unseen in grouped_folds(groups, effort.folds, effort.seed):
            predicted[unseen] = made.fit(x[seen], seconds[seen], groups=groups[seen]).predict(x[unseen])
        found[name] = errors(seconds, predicted)
    return found
