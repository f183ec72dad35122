"""The best threshold beside a trained model: chosen where the model was trained, compared where it was not."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest

from kvpolicy.datasets.profiles import dataset_of
from kvpolicy.datasets.threshold import best_threshold
from kvpolicy.training import train
from tests.synthetic import CostLaw, make_trace
from tests.training.survivors import with_survivors


def test_it_is_chosen_on_the_training_states(tmp_path: Path) -> None:
    trace = make_trace(noise=0.1, repeats=3, law=CostLaw(copy_latency_s=8e-3))
    trace.write(tmp_path / "trace")
    report = train([tmp_path / "trace"], family="linear")
    states, trained = dataset_of({"made": trace}).states, report.model.state_ids
    training, held_out = ([state for state in states if bool(state.ids & trained) is part] for part in (True, False))
    assert best_threshold(training).policy != best_threshold(held_out).policy, "else nothing is tested"
    assert report.best_threshold == best_threshold(training).policy
    assert report.against_threshold.states == len(held_out)


def test_the_model_chooses_by_what_was_expected(tmp_path: Path) -> None:
    """What survived is known only when the victim is back."""
    trace = with_survivors(make_trace(repeats=1, law=CostLaw(copy_latency_s=8e-3)))
    trace.write(tmp_path / "trace")
    report = train([tmp_path / "trace"], family="linear")
    held_out = [one for one in dataset_of({"made": trace}).states if not one.ids & report.model.state_ids]
    rule = best_threshold([one for one in dataset_of({"made": trace}).states if one.ids & report.model.state_ids])
    by = {
        name: fmean(
            state.mean_s[min(state.mean_s, key=lambda kind: report.model.seconds(kind, features(state)[kind]))]
            - rule.cost_s(state)
            for state in held_out
        )
        for name, features in (
            ("expected", lambda one: one.expected_features),
            ("found", lambda one: one.mean_features),
        )
    }
    assert by["expected"] != by["found"], "else nothing is tested"
    assert report.against_threshold.mean_s == pytest.approx(by["expected"])
