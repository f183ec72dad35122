"""One fit of a cost model to given examples: a family's laws, and boosted residuals of a given number of trees.

States of a profile (:mod:`kvpolicy.training.fit`) and records of a log (:mod:`kvpolicy.training.log_fits`) are learned
from in the same way; they differ in their folds, intervals and scores.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvpolicy.attribution.step_time import StepTimeModel
from kvpolicy.cost.intervals import Intervals
from kvpolicy.cost.laws import Law
from kvpolicy.cost.model import FittedModel, Provenance
from kvpolicy.cost.store import ForestText, forest_of
from kvpolicy.datasets.examples import ranges_of
from kvpolicy.events import KINDS, Kind
from kvpolicy.training.family import Costs, Family, laws_of
from kvpolicy.training.residual_fit import Fold, Target, choose_tree_count, fit_residual


def tree_counts(
    family: Family, folds: Sequence[tuple[Costs, Costs]], kinds: Iterable[Kind], seed: int
) -> dict[Kind, int]:
    """Number of trees that helps on held-out examples, for each of ``kinds``; 0 where none does.

    ``folds``: costs to fit to, and held-out ones; a fold that holds out no example of an option is left out for it.
    """
    laws = [laws_of(family, fitting) for fitting, _ in folds]

    def folds_of(kind: Kind) -> list[Fold]:
        return [
            Fold(_target(kind, fitting, law), _target(kind, held_out, law))
            for (fitting, held_out), law in zip(folds, laws, strict=True)
            if held_out.examples[kind]
        ]

    return {kind: choose_tree_count(folds_of(kind), seed) for kind in kinds}


def fit_model(
    family: Family,
    costs: Costs,
    provenance: Provenance,
    trees: Mapping[Kind, int],
    intervals: Intervals,
    seed: int,
    step_time: StepTimeModel | None = None,
) -> tuple[FittedModel, dict[Kind, ForestText]]:
    """Fit laws, and residuals with ``trees`` trees. Returns the model and the forests as they are stored."""
    laws = laws_of(family, costs)
    forests = {kind: fit_residual(_target(kind, costs, laws), trees[kind], seed) for kind in KINDS if trees[kind]}
    residuals = {kind: forest_of(text) for kind, text in forests.items()}
    ranges = {kind: ranges_of(costs.examples[kind]) for kind in KINDS}
    model = FittedModel("", provenance, laws, residuals, ranges, dict(costs.floor_s), intervals, step_time=step_time)
    return model, forests


def _target(kind: Kind, costs: Costs, laws: Mapping[Kind, Law]) -> Target:
    return Target(kind, tuple(costs.examples[kind]), laws[kind], costs.floor_s[kind])
