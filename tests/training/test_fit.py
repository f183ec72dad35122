"""Fits of one family to the states of a profile: errors on each state, residuals, and what is noted."""

from __future__ import annotations

from dataclasses import replace
from math import inf, log

import pytest

from kvpolicy.cost.laws import RecomputeRoofline
from kvpolicy.datasets.examples import examples_of
from kvpolicy.datasets.profiles import dataset_of
from kvpolicy.training.family import FAMILIES
from kvpolicy.training.fit import Fit, fit, held_out_scores, misses_of
from kvpolicy.training.law_transfer import scaled_by
from tests.synthetic import fitted_model, make_trace
from tests.training.survivors import LAW, with_survivors


def fitted(family: str, states: int) -> Fit:
    dataset = dataset_of({"made": make_trace(states=states, repeats=3)})
    return fit(FAMILIES[family], dataset.states, dataset, fitted_model("analytic").provenance, 0)


def test_a_miss_is_the_log_of_measured_over_predicted() -> None:
    model = fitted_model("analytic")
    states = dataset_of({"other": make_trace(seed=5, states=4)}).states
    examples = examples_of(states)
    for number, miss in enumerate(misses_of(model, states)):
        for kind in ("recompute", "swap"):
            example = examples[kind][number]
            assert miss.model[kind] == pytest.approx(log(example.engine_s / model.seconds(kind, example.x)), abs=1e-9)
        assert miss.model["ratio"] == pytest.approx(miss.model["swap"] - miss.model["recompute"])


def test_errors_are_summed_up_by_size_and_bias() -> None:
    """A model that predicts twice as much as another errs by log 2 more on average."""
    model = fitted_model("linear")
    states = dataset_of({"other": make_trace(seed=5, states=12, noise=0.0)}).states
    dear = replace(model, laws={kind: scaled_by(law, 2.0) for kind, law in model.laws.items()})
    plain, doubled = held_out_scores(model, states), held_out_scores(dear, states)
    for kind in ("recompute", "swap"):
        assert doubled[kind]["bias"] == pytest.approx(plain[kind]["bias"] - log(2), abs=0.02)  # type: ignore[index]
        assert doubled[kind]["mean_error"] > plain[kind]["mean_error"]  # type: ignore[index]


def test_laws_are_of_what_was_lost_and_judged_by_what_was_expected() -> None:
    data = dataset_of({"made": with_survivors(make_trace(repeats=1))})
    fitted = fit(FAMILIES["analytic"], data.states, data, fitted_model("analytic").provenance, 0)
    law = fitted.model.laws["recompute"]
    assert isinstance(law, RecomputeRoofline)
    assert law.s_per_token == pytest.approx(LAW.s_per_token, rel=0.01)
    state = data.states[-1]
    missed = misses_of(fitted.model, [state])[0].model["recompute"]
    expected_s = fitted.model.seconds("recompute", state.expected_features["recompute"])
    assert missed == pytest.approx(log(state.typical_s["recompute"] / expected_s))
    errors = held_out_scores(fitted.model, data.states)["recompute"]
    assert isinstance(errors, dict) and errors["mean_error"] > 0.1


def test_few_states_get_physics_alone_and_unbounded_intervals() -> None:
    fitting = fitted("boosted", 8)
    assert not fitting.model.residuals and set(fitting.trees.values()) == {0}
    assert any("physics alone, no residual was learned" in note for note in fitting.notes)
    assert any("8 training states are too few for 90% intervals" in note for note in fitting.notes)
    assert inf in {side for margins in fitting.model.intervals.inside.values() for margin in margins for side in margin}


def test_a_family_without_trees_has_no_word_about_them() -> None:
    fitting = fitted("linear", 14)
    assert not any("residual" in note for note in fitting.notes)
