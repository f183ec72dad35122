"""One fit: the family's laws, forests where trees are asked for, and tree counts from folds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvpolicy.attribution.step_time import HeldOutError, StepTimeModel
from kvpolicy.cost.model import Provenance
from kvpolicy.datasets.examples import examples_of, noise_floors, ranges_of
from kvpolicy.datasets.profiles import Dataset, State, dataset_of
from kvpolicy.events import KINDS, Kind
from kvpolicy.training import provenance_of
from kvpolicy.training.family import FAMILIES, Costs, laws_of
from kvpolicy.training.model_fit import cross_fit, fit_part
from tests.synthetic import CostLaw, fitted_model, make_trace


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return dataset_of({"made": make_trace(states=120, repeats=2, law=CostLaw(bend=0.4))})


NO_TREES: dict[Kind, int] = {"recompute": 0, "swap": 0}


@pytest.fixture(scope="module")
def provenance(dataset: Dataset) -> Provenance:
    return provenance_of("boosted", dataset, dataset.states, None)


def costs(dataset: Dataset, states: Sequence[State]) -> Costs:
    return Costs(examples_of(states), noise_floors(states), dataset.transfers_of(states), dataset.budget_tokens)


def test_a_fit_has_the_familys_laws_and_a_forest_for_each_option_with_trees(
    dataset: Dataset, provenance: Provenance
) -> None:
    every, boosted = costs(dataset, dataset.states), FAMILIES["boosted"]
    trees: dict[Kind, int] = {"recompute": 10, "swap": 0}
    part = fit_part(boosted, every, trees, 0)
    model = part.model(trees, provenance)
    assert model.laws == laws_of(boosted, every)
    assert set(model.residuals) == set(part.forests(trees)) == {"recompute"}
    assert model.ranges == {kind: ranges_of(every.examples[kind]) for kind in KINDS}
    x = every.examples["recompute"][0].x
    assert model.seconds("recompute", x) != model.law_seconds("recompute", x)
    assert model.step_time is None
    step_time = StepTimeModel(1e-3, (0.0,) * 6, "core a", 100, HeldOutError(0.0, 0.0, 0.0))
    assert part.model(NO_TREES, provenance, step_time=step_time).step_time == step_time


def test_a_folds_model_is_the_fit_to_the_other_folds(dataset: Dataset, provenance: Provenance) -> None:
    """Its forests have more trees than are used: the first are those of a smaller forest."""
    fold_of = [number % 3 for number in range(len(dataset.states))]
    crossed = cross_fit(
        FAMILIES["boosted"], dataset.states, fold_of, lambda states: costs(dataset, states), 0, "states"
    )
    assert min(crossed.trees.values()) > 0, "the law has a bend"
    assert crossed.notes == ()
    for fold, (model, (_, held_out)) in enumerate(zip(crossed.models(provenance), crossed.folds, strict=True)):
        assert held_out == list(dataset.states[fold::3])
        others = [state for state, number in zip(dataset.states, fold_of, strict=True) if number != fold]
        alone = fit_part(FAMILIES["boosted"], costs(dataset, others), crossed.trees, 0).model(crossed.trees, provenance)
        assert model.laws == alone.laws
        for kind in KINDS:
            x = held_out[0].mean_features[kind]
            assert model.seconds(kind, x) == alone.seconds(kind, x)


def test_a_fold_without_an_example_of_an_option_says_nothing_about_it(dataset: Dataset) -> None:
    """As in a log whose policy hardly swaps: fold 2 holds no swap."""
    fold_of = [number % 3 for number in range(len(dataset.states))]
    without = {state.name for state in dataset.states[2::3]}

    def hardly_swapped(states: Sequence[State]) -> Costs:
        every = costs(dataset, states)
        swaps = zip(every.examples["swap"], states, strict=True)
        return replace(
            every,
            examples={
                **every.examples,
                "swap": tuple(example for example, state in swaps if state.name not in without),
            },
        )

    crossed = cross_fit(FAMILIES["boosted"], dataset.states, fold_of, hardly_swapped, 0, "states")
    assert crossed.trees["swap"] > 0
    assert all("swap" in part.boosters for part, _ in crossed.folds)


def test_few_examples_get_physics_alone(dataset: Dataset) -> None:
    states, fold_of = dataset.states[:30], [number % 3 for number in range(30)]
    crossed = cross_fit(FAMILIES["boosted"], states, fold_of, lambda some: costs(dataset, some), 0, "states")
    assert crossed.trees == NO_TREES
    assert crossed.notes == tuple(
        f"{kind}: 30 states are under 40: physics alone, no residual was learned" for kind in KINDS
    )


def test_residual_learns_what_no_roofline_knows_and_stays_away_where_there_is_nothing() -> None:
    assert fitted_model("boosted", bend=0.4).residuals
    assert not fitted_model("boosted", bend=0.0).residuals
    assert not fitted_model("boosted", states=40, bend=0.4).residuals


def test_a_residual_counts_examples_by_their_weight(dataset: Dataset) -> None:
    """A tenth of the states cost three times as much. With a large weight the forest follows them."""
    every = costs(dataset, dataset.states)
    part = fit_part(FAMILIES["boosted"], every, NO_TREES, 0)
    trees: dict[Kind, int] = {"recompute": 60, "swap": 0}
    missed = []
    for weight in (1.0, 50.0):
        some = tuple(
            replace(one, engine_s=3 * one.engine_s, weight=weight) if number % 10 == 0 else one
            for number, one in enumerate(every.examples["recompute"])
        )
        weighed = replace(part, costs=replace(every, examples={**every.examples, "recompute": some})).grown(trees)
        misses = weighed.residual("recompute", some).misses(weighed.boosters["recompute"], 60)
        missed.append(sum(misses[::10]) / len(misses[::10]))
    assert missed[1] < 0.5 * missed[0]
