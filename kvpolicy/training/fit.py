"""Fit a cost model to measured states: the family's laws, residuals where they help, intervals from held-out states."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from kvpolicy.cost.intervals import PREDICTED, Intervals, Misses, calibrate, carried_quantities, unbounded
from kvpolicy.cost.model import FittedModel, Provenance
from kvpolicy.cost.store import ForestText
from kvpolicy.datasets.examples import (
    Example,
    examples_of,
    expected_examples_of,
    log_miss,
    noise_floors,
    stratified_folds,
)
from kvpolicy.datasets.profiles import Dataset, State
from kvpolicy.events import KINDS, Kind
from kvpolicy.features import Features
from kvpolicy.stats import quantile
from kvpolicy.training.coverage import coverage
from kvpolicy.training.extrapolation import (
    extrapolated_misses,
    growth_by_scatter,
    inner_coverage,
    residuals_kept,
    with_growth,
)
from kvpolicy.training.family import Costs, Family
from kvpolicy.training.law_fits import fit_others_shares, fit_victim_delays, victim_delay_misses
from kvpolicy.training.model_fit import fit_model, tree_counts
from kvpolicy.training.residual_fit import MIN_STATES

FOLDS = 5
MIN_STATES_FOR_RESIDUAL = 20
"""Minimum number of states for a residual in inner extrapolation."""


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted model, with what is stored and reported beside it."""

    model: FittedModel
    forests: Mapping[Kind, ForestText]
    trees: Mapping[Kind, int]
    notes: tuple[str, ...]
    inner_coverage: Mapping[str, Any]
    """See :func:`kvpolicy.training.extrapolation.inner_coverage`."""


def fit(family: Family, states: Sequence[State], dataset: Dataset, provenance: Provenance, seed: int) -> Fit:
    """Fit to all ``states``. Intervals come from cross-validation: each state is predicted by a fit without it."""
    folds = _folds(states, seed)
    floor_s = noise_floors(states)
    trees: dict[Kind, int] = dict.fromkeys(KINDS, 0)
    notes = []
    if family.trees and len(states) < MIN_STATES:
        notes.append(f"{len(states)} training states are under {MIN_STATES}: physics alone, no residual was learned")
    elif family.trees:
        costs = [(_costs(fitting, dataset, floor_s), _costs(held_out, dataset, floor_s)) for fitting, held_out in folds]
        trees = tree_counts(family, costs, KINDS, seed)
        notes += [
            f"{kind}: a learned residual did not help on unseen states; physics alone"
            for kind in KINDS
            if not trees[kind]
        ]
    misses, fold_models = [], []
    for fitting, held_out in folds:
        fold_model, _ = _fit_once(family, fitting, dataset, provenance, trees, unbounded(), seed)
        misses += misses_of(fold_model, held_out)
        fold_models.append(fold_model)

    def refit(subset: list[State]) -> FittedModel:
        tree_counts = trees if len(subset) >= MIN_STATES_FOR_RESIDUAL else dict.fromkeys(KINDS, 0)
        return _fit_once(family, subset, dataset, provenance, tree_counts, unbounded(), seed)[0]

    extrapolated = extrapolated_misses(states, refit, misses_of)
    kept_residuals = residuals_kept(extrapolated, trees)
    intervals = with_growth(
        calibrate(misses, carried_quantities(kept_residuals)),
        misses,
        extrapolated,
        kept_residuals,
        growth_by_scatter(fold_models, states, kept_residuals),
    )
    notes += _range_notes(intervals, trees, kept_residuals)
    if inf in [side for margins in intervals.inside.values() for margin in margins for side in margin]:
        notes.append(f"{len(states)} training states are too few for 90% intervals: they are infinite")
    model, forests = _fit_once(family, states, dataset, provenance, trees, intervals, seed)
    model = replace(
        model,
        victim_delays=fit_victim_delays(states),
        others_share=fit_others_shares(states),
        step_time=dataset.common_step_time,
        carried=kept_residuals,
    )
    return Fit(model, forests, trees, tuple(notes), inner_coverage(misses, extrapolated, kept_residuals))


def _range_notes(intervals: Intervals, trees: Mapping[Kind, int], kept_residuals: Mapping[Kind, bool]) -> list[str]:
    notes = []
    for kind in KINDS:
        if trees[kind]:
            treatment = "kept at the edge" if kept_residuals[kind] else "left out"
            notes.append(f"{kind}: outside the trained range the learned residual is {treatment}")
    infinite = [quantity for quantity in PREDICTED if intervals.growth[quantity] == inf]
    if infinite:
        notes.append(
            f"{', '.join(infinite)}: intervals outside the trained range are infinite: too few states up to a quarter "
            "or half of the longest length, or beyond it, to measure them"
        )
    return notes


def misses_of(model: FittedModel, states: Sequence[State]) -> list[Misses]:
    """Errors of the model, and of its laws alone, on each state's medians: log(measured / predicted)."""
    examples = expected_examples_of(states)
    misses = []
    for i, state in enumerate(states):
        by_model = {kind: _signed(model, kind, examples[kind][i], model.seconds) for kind in KINDS}
        by_law = {kind: _signed(model, kind, examples[kind][i], model.law_seconds) for kind in KINDS}
        running = examples["recompute"][i].x.running_requests
        misses.append(Misses(state.computed_tokens, running, _with_ratio(by_model), _with_ratio(by_law)))
    return misses


def _signed(model: FittedModel, kind: Kind, example: Example, predict: Callable[[Kind, Features], float]) -> float:
    return log_miss(example.engine_s, predict(kind, example.x), model.floor_s[kind])


def _with_ratio(signed: Mapping[Kind, float]) -> dict[str, float]:
    return dict(signed) | {"ratio": signed["swap"] - signed["recompute"]}


def _folds(states: Sequence[State], seed: int) -> list[tuple[list[State], list[State]]]:
    fold_count = min(FOLDS, len(states))
    fold_of = stratified_folds(states, fold_count, random.Random(seed))
    numbered = list(zip(states, fold_of, strict=True))
    return [
        ([s for s, number in numbered if number != fold], [s for s, number in numbered if number == fold])
        for fold in range(fold_count)
    ]


def _costs(states: Sequence[State], dataset: Dataset, floor_s: Mapping[Kind, float]) -> Costs:
    return Costs(examples_of(states), floor_s, dataset.transfers_of(states), dataset.budget_tokens)


def _fit_once(
    family: Family,
    states: Sequence[State],
    dataset: Dataset,
    provenance: Provenance,
    trees: Mapping[Kind, int],
    intervals: Intervals,
    seed: int,
) -> tuple[FittedModel, dict[Kind, ForestText]]:
    return fit_model(family, _costs(states, dataset, noise_floors(states)), provenance, trees, intervals, seed)


def held_out_scores(model: FittedModel, states: Sequence[State]) -> dict[str, object]:
    """Errors |log(measured / predicted)| on the medians of held-out states; and the coverage of intervals."""
    examples = expected_examples_of(states)
    scores: dict[str, object] = {"states": len(states)}
    misses = misses_of(model, states)
    for kind in KINDS:
        outside = sum(bool(model.outside(kind, example.x)) for example in examples[kind])
        scores[kind] = _error_summary([miss.model[kind] for miss in misses]) | {
            "law_mean_error": _error_summary([miss.law[kind] for miss in misses])["mean_error"],
            "extrapolated": outside,
        }
    scores["coverage"] = {quantity: _coverage(model, examples, misses, quantity) for quantity in PREDICTED}
    delays = {kind: victim_delay_misses(model.victim_delays, states, kind) for kind in model.victim_delays}
    scores["victim_delay"] = {
        kind: _error_summary(log_errors) | {"states": len(log_errors)}
        for kind, log_errors in delays.items()
        if log_errors
    }
    return scores


def _error_summary(signed: Sequence[float]) -> dict[str, float]:
    sizes = [abs(log_error) for log_error in signed]
    return {
        "mean_error": sum(sizes) / len(sizes),
        "p90_error": quantile(sizes, 0.9),
        "bias": sum(signed) / len(signed),
    }


def _coverage(
    model: FittedModel, examples: Mapping[Kind, Sequence[Example]], misses: Sequence[Misses], quantity: str
) -> dict[str, Any]:
    kinds: tuple[Kind, ...] = KINDS if quantity == "ratio" else tuple(kind for kind in KINDS if kind == quantity)
    numbers, held = [], []
    for i, miss in enumerate(misses):
        number = model.intervals.bin_of(miss.computed_tokens, miss.running_requests)
        outside = any(model.outside(kind, examples[kind][i].x) for kind in kinds)
        distance = max(model.distance(kind, examples[kind][i].x) for kind in kinds)
        below, above = model.intervals.room(quantity, number, outside, distance)
        numbers.append(number)
        held.append(-below <= miss.model[quantity] <= above)
    return coverage(model.intervals, numbers, held)
