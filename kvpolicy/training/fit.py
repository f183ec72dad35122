"""From measured states to a cost model: the family's laws, the residual where it pays, intervals from unseen states."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from kvpolicy.cost.forest import Forest
from kvpolicy.cost.intervals import PREDICTED, Intervals, Misses, calibrate, kept_of, unbounded
from kvpolicy.cost.laws import Law
from kvpolicy.cost.model import FittedModel, Provenance
from kvpolicy.cost.store import ForestText
from kvpolicy.datasets.examples import Example, dealt, examples_of, examples_under, log_miss, noise_floors, ranges_of
from kvpolicy.datasets.profiles import Dataset, State
from kvpolicy.events import KINDS, Kind
from kvpolicy.features import FEATURES, Features
from kvpolicy.stats import quantile
from kvpolicy.training.coverage import coverage
from kvpolicy.training.extrapolation import beyond, carried, growing, inner_coverage, unsteady
from kvpolicy.training.family import Costs, Family, laws_of
from kvpolicy.training.law_fits import fit_others_shares, fit_victim_delays, victim_delay_misses
from kvpolicy.training.residual_fit import INPUTS, MIN_STATES, Fold, Target, choose_tree_count, fit_residual

FOLDS = 5
MIN_STATES_FOR_RESIDUAL = 20
"""States that trees are grown on in inner extrapolation."""


@dataclass(frozen=True, slots=True)
class Fit:
    """A model and what has to be stored beside it."""

    model: FittedModel
    forests: Mapping[Kind, ForestText]
    trees: Mapping[Kind, int]
    notes: tuple[str, ...]
    inner_coverage: Mapping[str, Any]
    """See :func:`kvpolicy.training.extrapolation.inner_coverage`."""


def fit(family: Family, states: Sequence[State], dataset: Dataset, provenance: Provenance, seed: int) -> Fit:
    """Fit on all ``states``; intervals from folds, in which each state is predicted by a fit without it."""
    folds = _folds(states, seed)
    floor_s = noise_floors(states)
    trees: dict[Kind, int] = dict.fromkeys(KINDS, 0)
    notes = []
    if family.trees and len(states) < MIN_STATES:
        notes.append(f"{len(states)} training states are under {MIN_STATES}: physics alone, no residual was learned")
    elif family.trees:
        pairs = [(_laws(family, seen, dataset, floor_s), seen, unseen) for seen, unseen in folds]
        for kind in KINDS:
            trees[kind] = choose_tree_count([_fold(kind, *pair, floor_s[kind]) for pair in pairs], seed)
            if not trees[kind]:
                notes.append(f"{kind}: a learned residual did not help on unseen states; physics alone")
    misses, without = [], []
    for seen, unseen in folds:
        one, _ = _fit_once(family, seen, dataset, provenance, trees, unbounded(), seed)
        misses += misses_of(one, unseen)
        without.append(one)

    def refit(some: list[State]) -> FittedModel:
        grown = trees if len(some) >= MIN_STATES_FOR_RESIDUAL else dict.fromkeys(KINDS, 0)
        return _fit_once(family, some, dataset, provenance, grown, unbounded(), seed)[0]

    far = beyond(states, refit, misses_of)
    keep = carried(far, trees)
    intervals = growing(calibrate(misses, kept_of(keep)), misses, far, keep, unsteady(without, states, keep))
    notes += _notes_beyond(intervals, trees, keep)
    if inf in [side for rooms in intervals.inside.values() for room in rooms for side in room]:
        notes.append(f"{len(states)} training states are too few for 90% intervals: they are infinite")
    model, forests = _fit_once(family, states, dataset, provenance, trees, intervals, seed)
    model = replace(
        model,
        victim_delays=fit_victim_delays(states),
        others_share=fit_others_shares(states),
        step_time=dataset.common_step_time,
        carried=keep,
    )
    return Fit(model, forests, trees, tuple(notes), inner_coverage(misses, far, keep))


def _notes_beyond(intervals: Intervals, trees: Mapping[Kind, int], keep: Mapping[Kind, bool]) -> list[str]:
    notes = []
    for kind in KINDS:
        if trees[kind]:
            told = "kept at the edge" if keep[kind] else "left out"
            notes.append(f"{kind}: outside the trained range the learned residual is {told}")
    untold = [of for of in PREDICTED if intervals.growth[of] == inf]
    if untold:
        notes.append(
            f"{', '.join(untold)}: intervals outside the trained range are infinite: too few states up to a quarter "
            "or half of the longest length, or beyond it, to tell"
        )
    return notes


def misses_of(model: FittedModel, states: Sequence[State]) -> list[Misses]:
    """How far the model, and its laws alone, miss each state's medians: log(measured / predicted)."""
    examples = examples_of(states)
    found = []
    for i, state in enumerate(states):
        by_model = {kind: _signed(model, kind, examples[kind][i], model.seconds) for kind in KINDS}
        by_law = {kind: _signed(model, kind, examples[kind][i], model.law_seconds) for kind in KINDS}
        running = examples["recompute"][i].x.running_requests
        found.append(Misses(state.computed_tokens, running, _with_ratio(by_model), _with_ratio(by_law)))
    return found


def _signed(model: FittedModel, kind: Kind, example: Example, predict: Callable[[Kind, Features], float]) -> float:
    return log_miss(example.engine_s, predict(kind, example.x), model.floor_s[kind])


def _with_ratio(signed: Mapping[Kind, float]) -> dict[str, float]:
    return dict(signed) | {"ratio": signed["swap"] - signed["recompute"]}


def _folds(states: Sequence[State], seed: int) -> list[tuple[list[State], list[State]]]:
    hands = min(FOLDS, len(states))
    hand = dealt(states, hands, random.Random(seed))
    numbered = list(zip(states, hand, strict=True))
    return [([s for s, h in numbered if h != one], [s for s, h in numbered if h == one]) for one in range(hands)]


def _laws(family: Family, states: Sequence[State], dataset: Dataset, floor_s: dict[Kind, float]) -> dict[Kind, Law]:
    return laws_of(family, Costs(examples_of(states), floor_s, dataset.moves_of(states), dataset.budget_tokens))


def _fold(kind: Kind, laws: Mapping[Kind, Law], seen: list[State], unseen: list[State], floor_s: float) -> Fold:
    def target(states: list[State]) -> Target:
        return Target(kind, examples_under(states, kind), laws[kind], floor_s)

    return Fold(target(seen), target(unseen))


def _fit_once(
    family: Family,
    states: Sequence[State],
    dataset: Dataset,
    provenance: Provenance,
    trees: Mapping[Kind, int],
    intervals: Intervals,
    seed: int,
) -> tuple[FittedModel, dict[Kind, ForestText]]:
    examples, floor_s = examples_of(states), noise_floors(states)
    laws = _laws(family, states, dataset, floor_s)
    forests: dict[Kind, ForestText] = {}
    for kind in KINDS:
        if trees[kind]:
            forests[kind] = fit_residual(Target(kind, examples[kind], laws[kind], floor_s[kind]), trees[kind], seed)
    residuals = {
        kind: Forest.from_text(text.text, [FEATURES.index(name) for name in INPUTS[kind]])
        for kind, text in forests.items()
    }
    ranges = {kind: ranges_of(examples[kind]) for kind in KINDS}
    return FittedModel("", provenance, laws, residuals, ranges, floor_s, intervals), forests


def held_out_scores(model: FittedModel, states: Sequence[State]) -> dict[str, object]:
    """Errors on states the model has not seen, |log(measured / predicted)| of their medians; and coverage."""
    examples = examples_of(states)
    scores: dict[str, object] = {"states": len(states)}
    misses = misses_of(model, states)
    for kind in KINDS:
        outside = sum(bool(model.outside(kind, example.x)) for example in examples[kind])
        scores[kind] = _errors([miss.model[kind] for miss in misses]) | {
            "law_mean_error": _errors([miss.law[kind] for miss in misses])["mean_error"],
            "extrapolated": outside,
        }
    scores["coverage"] = {of: _coverage(model, examples, misses, of) for of in PREDICTED}
    delays = {kind: victim_delay_misses(model.victim_delays, states, kind) for kind in model.victim_delays}
    scores["victim_delay"] = {kind: _errors(some) | {"states": len(some)} for kind, some in delays.items() if some}
    return scores


def _errors(signed: Sequence[float]) -> dict[str, float]:
    sizes = [abs(one) for one in signed]
    return {
        "mean_error": sum(sizes) / len(sizes),
        "p90_error": quantile(sizes, 0.9),
        "bias": sum(signed) / len(signed),
    }


def _coverage(
    model: FittedModel, examples: Mapping[Kind, Sequence[Example]], misses: Sequence[Misses], of: str
) -> dict[str, Any]:
    kinds: tuple[Kind, ...] = KINDS if of == "ratio" else tuple(kind for kind in KINDS if kind == of)
    numbers, held = [], []
    for i, miss in enumerate(misses):
        number = model.intervals.bin_of(miss.computed_tokens, miss.running_requests)
        outside = any(model.outside(kind, examples[kind][i].x) for kind in kinds)
        distance = max(model.distance(kind, examples[kind][i].x) for kind in kinds)
        below, above = model.intervals.room(of, number, outside, distance)
        numbers.append(number)
        held.append(-below <= miss.model[of] <= above)
    return coverage(model.intervals, numbers, held)
