"""Fits of a cost model to given examples: a family's laws, and boosted forests on log(measured / law).

States of a profile (:mod:`kvpolicy.training.fit`) and records of a log (:mod:`kvpolicy.training.log_fits`) are learned
from in the same way; they differ in their folds, intervals and scores. Forests are monotone in all features of length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import numpy as np

from kvpolicy.attribution.step_time import StepTimeModel
from kvpolicy.cost.intervals import Intervals, unbounded
from kvpolicy.cost.laws import Law
from kvpolicy.cost.model import FittedModel, Provenance
from kvpolicy.cost.store import ForestText, forest_of
from kvpolicy.datasets.examples import Example, log_miss, ranges_of
from kvpolicy.events import KINDS, Kind
from kvpolicy.features import GROWING
from kvpolicy.regression.residual import Growth, Residual, cross_validated, fold_rows
from kvpolicy.training.family import Costs, Family, laws_of

MIN_EXAMPLES = 40
"""Per option: with fewer there is no residual, because it would learn noise."""
# Waiting requests are no input: they grow without bound under memory pressure and take no part in a step.
INPUTS: dict[Kind, tuple[str, ...]] = {
    "recompute": ("recomputed_tokens", "running_requests", "batch_tokens", "free_blocks"),
    "swap": (
        "save_bytes", "load_bytes", "load_segments", "segment_bytes", "queued_save_bytes", "queued_load_bytes",
        "running_requests", "batch_tokens", "free_blocks",
    ),
}  # fmt: skip

Unit = TypeVar("Unit")
"""What examples are made of: a state or a record."""


@dataclass(frozen=True, slots=True)
class Part:
    """Laws fitted to a part of the data, and forests on their residuals."""

    costs: Costs
    laws: Mapping[Kind, Law]
    seed: int
    boosters: Mapping[Kind, Any] = field(default_factory=dict)

    def residual(self, kind: Kind, examples: Sequence[Example]) -> Residual:
        """What the law of an option misses of some examples."""
        law, floor_s = self.laws[kind], self.costs.floor_s[kind]
        misses = [log_miss(example.engine_s, sum(law.parts(example.x)), floor_s) for example in examples]
        x = np.array([[getattr(example.x, name) for name in INPUTS[kind]] for example in examples], np.float64)
        min_rows = max(5, len(self.costs.examples[kind]) // 20)
        growth = Growth(leaves=8, min_rows_in_leaf=min_rows, monotone=GROWING, seed=self.seed)
        weight = np.array([example.weight for example in examples], np.float64)
        return Residual(x, np.array(misses, np.float64), weight, INPUTS[kind], growth)

    def grown(self, trees: Mapping[Kind, int]) -> Part:
        """The part with a forest of ``trees`` trees for each option that has any."""
        examples = self.costs.examples
        boosters = {kind: self.residual(kind, examples[kind]).grown(trees[kind]) for kind in KINDS if trees[kind]}
        return replace(self, boosters=boosters)

    def forests(self, trees: Mapping[Kind, int]) -> dict[Kind, ForestText]:
        """The first ``trees`` trees of each forest, as they are stored."""
        return {
            kind: ForestText(self.boosters[kind].model_to_string(num_iteration=trees[kind]), INPUTS[kind])
            for kind in KINDS
            if trees[kind]
        }

    def model(
        self,
        trees: Mapping[Kind, int],
        provenance: Provenance,
        intervals: Intervals | None = None,
        step_time: StepTimeModel | None = None,
    ) -> FittedModel:
        """The cost model with the first ``trees`` trees of each forest; ``intervals``: infinite by default."""
        residuals = {kind: forest_of(text) for kind, text in self.forests(trees).items()}
        ranges = {kind: ranges_of(self.costs.examples[kind]) for kind in KINDS}
        floor_s = dict(self.costs.floor_s)
        return FittedModel(
            "", provenance, self.laws, residuals, ranges, floor_s, intervals or unbounded(), step_time=step_time
        )


def fit_part(family: Family, costs: Costs, trees: Mapping[Kind, int], seed: int) -> Part:
    """Fit laws, and forests of ``trees`` trees."""
    return Part(costs, laws_of(family, costs), seed).grown(trees)


@dataclass(frozen=True, slots=True)
class CrossFit(Generic[Unit]):
    """A fit without each fold."""

    trees: Mapping[Kind, int]
    """Number of trees that helps on held-out examples; 0 where none does."""
    folds: tuple[tuple[Part, list[Unit]], ...]
    """Fits, with the states or records that each was not fitted to."""
    notes: tuple[str, ...]

    def models(self, provenance: Provenance) -> list[FittedModel]:
        """One model per fold, with infinite intervals."""
        return [part.model(self.trees, provenance) for part, _ in self.folds]


def cross_fit(
    family: Family,
    units: Sequence[Unit],
    fold_of: Sequence[int],
    costs_of: Callable[[Sequence[Unit]], Costs],
    seed: int,
    name: str,
) -> CrossFit[Unit]:
    """Fit laws without each fold, and choose the number of trees on the folds.

    ``costs_of``: the data of some units. ``name``: what units are called in notes.
    """
    rows = [tuple([units[i] for i in numbers] for numbers in fold) for fold in fold_rows(fold_of)]
    parts, tests = [], []
    for fitting, held_out in rows:
        costs = costs_of(fitting)
        parts.append(Part(costs, laws_of(family, costs), seed))
        tests.append(costs_of(held_out).examples)
    trees: dict[Kind, int] = dict.fromkeys(KINDS, 0)
    notes = []
    for kind in KINDS if family.trees else ():
        count = sum(len(examples[kind]) for examples in tests)
        if count < MIN_EXAMPLES:
            notes.append(f"{kind}: {count} {name} are under {MIN_EXAMPLES}: physics alone, no residual was learned")
            continue
        forests = cross_validated(
            [
                (part.residual(kind, part.costs.examples[kind]), part.residual(kind, examples[kind]))
                for part, examples in zip(parts, tests, strict=True)
            ]
        )
        trees[kind] = forests.trees
        parts = [
            replace(part, boosters={**part.boosters, kind: booster})
            for part, booster in zip(parts, forests.boosters, strict=True)
        ]
        if not trees[kind]:
            notes.append(f"{kind}: a learned residual did not help on unseen {name}; physics alone")
    held_out_units = [held_out for _, held_out in rows]
    return CrossFit(trees, tuple(zip(parts, held_out_units, strict=True)), tuple(notes))
