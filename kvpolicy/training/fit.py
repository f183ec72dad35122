"""Fit a cost model to measured states: the family's laws, residuals where they help, intervals from held-out states."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from kvpolicy.cost.intervals import PREDICTED, Intervals, Misses, calibrate, carried_quantities
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
from kvpolicy.training.model_fit import cross_fit, fit_part

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

    def costs_of(subset: Sequence[State]) -> Costs:
        return Costs(
            examples_of(subset), noise_floors(subset), dataset.transfers_of(subset), dataset.budget_tokens,
            dataset.geometry,
        )  # fmt: skip

    fold_of = stratified_folds(states, min(FOLDS, len(states)), random.Random(seed))
    crossed = cross_fit(family, states, fold_of, costs_of, seed, "states")
    trees, notes, fold_models = crossed.trees, list(crossed.notes), crossed.models(provenance)
    misses = [
        miss
        for model, (_, held_out) in zip(fold_models, crossed.folds, strict=True)
        for miss in misses_of(model, held_out)
    ]

    def refit(subset: Sequence[State]) -> FittedModel:
        tree_counts = trees if len(subset) >= MIN_STATES_FOR_RESIDUAL else dict.fromkeys(KINDS, 0)
        return fit_part(family, costs_of(subset), tree_counts, seed).model(tree_counts, provenance)

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
    whole = fit_part(family, costs_of(states), trees, seed)
    model = replace(
        whole.model(trees, provenance, intervals),
        victim_delays=fit_victim_delays(states),
        others_share=fit_others_shares(states),
        step_time=dataset.common_step_time,
        carried=kept_residuals,
    )
    return Fit(model, whole.forests(trees), trees, tuple(notes), inner_coverage(misses, extrapolated, kept_residuals))


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
