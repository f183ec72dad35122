"""One fit: the family's laws, forests where trees are asked for, and tree counts from folds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpolicy.attribution.step_time import HeldOutError, StepTimeModel
from kvpolicy.cost.intervals import unbounded
from kvpolicy.datasets.examples import examples_of, noise_floors, ranges_of
from kvpolicy.datasets.profiles import Dataset, dataset_of
from kvpolicy.events import KINDS
from kvpolicy.training import provenance_of
from kvpolicy.training.family import FAMILIES, Costs, laws_of
from kvpolicy.training.model_fit import fit_model, tree_counts
from tests.synthetic import CostLaw, make_trace


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return dataset_of({"made": make_trace(states=120, repeats=2, law=CostLaw(bend=0.4))})


def costs(dataset: Dataset, part: slice) -> Costs:
    states = dataset.states[part]
    return Costs(examples_of(states), noise_floors(dataset.states), dataset.transfers_of(states), dataset.budget_tokens)


def test_a_fit_has_the_familys_laws_and_a_forest_for_each_option_with_trees(dataset: Dataset) -> None:
    every, boosted = costs(dataset, slice(None)), FAMILIES["boosted"]
    provenance = provenance_of("boosted", dataset, dataset.states, None)
    model, forests = fit_model(boosted, every, provenance, {"recompute": 10, "swap": 0}, unbounded(), 0)
    assert model.laws == laws_of(boosted, every)
    assert set(model.residuals) == set(forests) == {"recompute"}
    assert model.ranges == {kind: ranges_of(every.examples[kind]) for kind in KINDS}
    x = every.examples["recompute"][0].x
    assert model.seconds("recompute", x) != model.law_seconds("recompute", x)
    assert model.step_time is None
    step_time = StepTimeModel(1e-3, (0.0,) * 6, "core a", 100, HeldOutError(0.0, 0.0, 0.0))
    timed, _ = fit_model(boosted, every, provenance, {"recompute": 0, "swap": 0}, unbounded(), 0, step_time)
    assert timed.step_time == step_time


def test_trees_are_counted_on_folds_that_hold_an_example_of_the_option(dataset: Dataset) -> None:
    parts = [(slice(40, 120), slice(0, 40)), (slice(0, 80), slice(80, 120))]
    folds = [(costs(dataset, fitting), costs(dataset, held_out)) for fitting, held_out in parts]
    counts = tree_counts(FAMILIES["boosted"], folds, KINDS, 0)
    assert min(counts.values()) > 0, "the law has a bend"
    fitting, held_out = folds[1]
    without_swaps = replace(held_out, examples={**held_out.examples, "swap": ()})
    counted = tree_counts(FAMILIES["boosted"], [folds[0], (fitting, without_swaps)], KINDS, 0)
    assert counted["recompute"] == counts["recompute"]
    assert counted["swap"] == tree_counts(FAMILIES["boosted"], folds[:1], ["swap"], 0)["swap"]
    assert tree_counts(FAMILIES["boosted"], folds, ["swap"], 0) == {"swap": counts["swap"]}
