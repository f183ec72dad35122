"""From measured states to a cost model: the family's laws, the residual where it pays, intervals from unseen states."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from kvpolicy.cost.analytic import fit_analytic
from kvpolicy.cost.boosted import FEWEST_STATES, INPUTS, Fold, Target, choose_tree_count, fit_residual
from kvpolicy.cost.compiled import Forest
from kvpolicy.cost.dataset import Dataset, State
from kvpolicy.cost.examples import Example, dealt, examples_of, log_miss, noise_floors, ranges_of
from kvpolicy.cost.intervals import PREDICTED, Intervals, Misses, calibrate
from kvpolicy.cost.laws import Law
from kvpolicy.cost.linear import fit_linear
from kvpolicy.cost.model import FittedModel, Provenance
from kvpolicy.cost.store import ForestText
from kvpolicy.events import KINDS, Kind
from kvpolicy.features import FEATURES, Features

FOLDS = 5
NO_INTERVALS = Intervals((), dict.fromkeys(PREDICTED, (inf,)), dict.fromkeys(PREDICTED, (inf,)), (0,))


@dataclass(frozen=True, slots=True)
class Fit:
    """A model and what has to be stored beside it."""

    model: FittedModel
    forests: Mapping[Kind, ForestText]
    trees: Mapping[Kind, int]
    notes: tuple[str, ...]


def fit(family: str, states: Sequence[State], dataset: Dataset, provenance: Provenance, seed: int) -> Fit:
    """Fit on all ``states``; intervals from folds, in which each state is predicted by a fit without it."""
    folds = _folds(states, seed)
    floor_s = noise_floors(states)
    trees: dict[Kind, int] = dict.fromkeys(KINDS, 0)
    notes = []
    if family == "boosted" and len(states) < FEWEST_STATES:
        notes.append(f"{len(states)} training states are under {FEWEST_STATES}: physics alone, no residual was learned")
    elif family == "boosted":
        pairs = [(_laws(family, seen, dataset, floor_s), seen, unseen) for seen, unseen in folds]
        for kind in KINDS:
            trees[kind] = choose_tree_count([_fold(kind, *pair, floor_s[kind]) for pair in pairs], seed)
            if not trees[kind]:
                notes.append(f"{kind}: a learned residual did not help on unseen states; physics alone")
    misses = []
    for seen, unseen in folds:
        one, _ = _fit_once(family, seen, dataset, provenance, trees, NO_INTERVALS, seed)
        misses += misses_of(one, unseen)
    intervals = calibrate(misses)
    if inf in [width for widths in intervals.inside.values() for width in widths]:
        notes.append(f"{len(states)} training states are too few for 90% intervals: they are infinite")
    model, forests = _fit_once(family, states, dataset, provenance, trees, intervals, seed)
    return Fit(model, forests, trees, tuple(notes))


def misses_of(model: FittedModel, states: Sequence[State]) -> list[Misses]:
    """How far the model, and its laws alone, miss each state's medians: absolute values on the log scale."""
    examples = examples_of(states)
    found = []
    for i, state in enumerate(states):
        by_model = {kind: _signed(model, kind, examples[kind][i], model.seconds) for kind in KINDS}
        by_law = {kind: _signed(model, kind, examples[kind][i], model.law_seconds) for kind in KINDS}
        found.append(Misses(state.computed_tokens, _with_ratio(by_model), _with_ratio(by_law)))
    return found


def _signed(model: FittedModel, kind: Kind, example: Example, predict: Callable[[Kind, Features], float]) -> float:
    return log_miss(example.engine_s, predict(kind, example.x), model.floor_s[kind])


def _with_ratio(signed: Mapping[Kind, float]) -> dict[str, float]:
    return {kind: abs(signed[kind]) for kind in KINDS} | {"ratio": abs(signed["swap"] - signed["recompute"])}


def _folds(states: Sequence[State], seed: int) -> list[tuple[list[State], list[State]]]:
    hands = min(FOLDS, len(states))
    hand = dealt(states, hands, random.Random(seed))
    numbered = list(zip(states, hand, strict=True))
    return [([s for s, h in numbered if h != one], [s for s, h in numbered if h == one]) for one in range(hands)]


def _laws(family: str, states: Sequence[State], dataset: Dataset, floor_s: dict[Kind, float]) -> dict[Kind, Law]:
    examples = examples_of(states)
    if family == "linear":
        return fit_linear(examples, floor_s)
    return fit_analytic(examples, dataset.moves_of(states), floor_s)


def _fold(kind: Kind, laws: Mapping[Kind, Law], seen: list[State], unseen: list[State], floor_s: float) -> Fold:
    def target(states: list[State]) -> Target:
        return Target(kind, examples_of(states)[kind], laws[kind], floor_s)

    return Fold(target(seen), target(unseen))


def _fit_once(
    family: str,
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
        signed = [_signed(model, kind, example, model.seconds) for example in examples[kind]]
        law = [miss.law[kind] for miss in misses]
        scores[kind] = {
            "mean_error": sum(map(abs, signed)) / len(signed),
            "p90_error": quantile(list(map(abs, signed)), 0.9),
            "bias": sum(signed) / len(signed),
            "law_mean_error": sum(law) / len(law),
            "extrapolated": sum(bool(model.outside(kind, example.x)) for example in examples[kind]),
        }
    scores["coverage"] = {of: _coverage(model, examples, misses, of) for of in PREDICTED}
    return scores


def _coverage(
    model: FittedModel, examples: Mapping[Kind, Sequence[Example]], misses: Sequence[Misses], of: str
) -> float:
    inside = 0
    for i, miss in enumerate(misses):
        kinds: tuple[Kind, ...] = KINDS if of == "ratio" else tuple(kind for kind in KINDS if kind == of)
        outside = any(model.outside(kind, examples[kind][i].x) for kind in kinds)
        inside += miss.model[of] <= model.intervals.half_width(of, miss.computed_tokens, outside)
    return inside / len(misses)


def quantile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between order statistics."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    return ordered[low] + (at - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])
