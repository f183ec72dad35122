"""Carrying a model: a few measurements find a known change, more do no harm, and all of it is said."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest

from kvpolicy.cost import CostModel, ModelError, load
from kvpolicy.cost.forest import Forest
from kvpolicy.cost.laws import RecomputeRoofline
from kvpolicy.cost.store import forest_of, forest_texts
from kvpolicy.datasets.profiles import dataset_of
from kvpolicy.events import KINDS, Cost, Option, Preemption
from kvpolicy.trace import TraceError
from kvpolicy.training import calibrate, train
from kvpolicy.training.transfer import damped
from tests.cost.test_laws import victim
from tests.synthetic import HARDWARE, CostLaw, make_trace, options_for

SLOW_LINK = {"kind": "simulated", "bytes_per_s": 2e8, "latency_s": 8e-3}


SLOWER = CostLaw(s_per_token=9e-5, s_per_pair=12e-9, fixed_s=1.2e-3, alone_s=4.5e-3)


@pytest.fixture(scope="module")
def home_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    make_trace(seed=1, states=160, law=CostLaw(bend=0.4)).write(folder / "trace")
    train([folder / "trace"], folder / "model")
    return folder / "model"


def other_trace(folder: Path, **plan: Any) -> Path:
    place = {"hardware": HARDWARE | {"processor": "another"}, "name": "else", "states": 60} | plan
    make_trace(seed=5, **place).write(folder / "trace")
    return folder / "trace"


def test_three_times_slower_is_found_with_four_states(home_model: Path, tmp_path: Path) -> None:
    trace = other_trace(tmp_path, law=replace(SLOWER, bend=0.4))
    report = calibrate(home_model, [trace], tmp_path / "carried", states=4)
    errors = {error.states: error.mean_error["recompute"] for error in report.errors}
    assert errors[0] > 0.9
    assert errors[4] < 0.12
    assert errors[16] < 0.1
    assert "transferred from" in " ".join(report.notes)
    assert "4 states" in report.text().splitlines()[0]
    json.dumps(report.to_dict(), allow_nan=False)


def test_another_link_changes_swap_and_leaves_recompute_alone(home_model: Path, tmp_path: Path) -> None:
    law = CostLaw(bend=0.4, copy_latency_s=8e-3, s_per_byte=1e-8)
    trace = other_trace(tmp_path, law=law, hardware=HARDWARE, link=SLOW_LINK)
    report = calibrate(home_model, [trace], tmp_path / "carried")
    first, later = report.errors[0].mean_error, {error.states: error.mean_error for error in report.errors}
    assert later[4]["swap"] < 0.3 * first["swap"]
    assert later[1]["recompute"] < first["recompute"] + 0.04


def test_where_nothing_changed_measurements_do_no_harm(home_model: Path, tmp_path: Path) -> None:
    trace = other_trace(tmp_path, law=CostLaw(bend=0.4), hardware=HARDWARE)
    for error in calibrate(home_model, [trace], tmp_path / "carried").errors:
        for kind in KINDS:
            assert error.mean_error[kind] < 0.08


def test_a_carried_model_is_a_model_of_its_new_place(home_model: Path, tmp_path: Path) -> None:
    trace = other_trace(tmp_path, law=SLOWER)
    calibrate(home_model, [trace], tmp_path / "carried", states=12)
    made, old = load(tmp_path / "carried"), load(home_model)
    assert made.provenance.hardware["processor"] == "another"
    assert old.state_ids < made.state_ids
    assert made.provenance.held_out["states"] == 20
    for kind in KINDS:
        assert made.intervals is not old.intervals
        assert set(made.ranges[kind]) == set(old.ranges[kind])


def test_one_state_promises_no_interval(home_model: Path, tmp_path: Path) -> None:
    trace = other_trace(tmp_path, law=SLOWER)
    calibrate(home_model, [trace], tmp_path / "carried", states=1)
    loaded = load(tmp_path / "carried")
    one = dataset_of({"made": make_trace(seed=5, states=4)}).states[0].samples["recompute"][0].situation
    assert all(cost.high_s == inf for cost in loaded.predict(one, options_for(one)))


def test_beyond_what_was_measured_elsewhere_nothing_is_promised(home_model: Path, tmp_path: Path) -> None:
    trace = other_trace(tmp_path, law=SLOWER, tokens=(32, 128))
    calibrate(home_model, [trace], tmp_path / "carried")
    loaded = load(tmp_path / "carried")
    assert load(home_model).ranges["recompute"]["recomputed_tokens"][1] > 1000
    for kind, name in (("recompute", "recomputed_tokens"), ("swap", "computed_tokens")):
        assert loaded.ranges[kind][name][1] <= 128
    long = make_trace(seed=9, states=8, tokens=(800, 2000), law=SLOWER)
    for state in dataset_of({"long": long}).states:
        one = state.samples["recompute"][0].situation
        assert all(cost.extrapolated and cost.high_s == inf for cost in loaded.predict(one, options_for(one)))


def test_where_nothing_changed_the_old_range_holds_on(home_model: Path, tmp_path: Path) -> None:
    trace = other_trace(tmp_path, hardware=HARDWARE, tokens=(32, 128), law=CostLaw(bend=0.4))
    calibrate(home_model, [trace], tmp_path / "carried", states=8)
    made, old = load(tmp_path / "carried"), load(home_model)
    assert made.ranges["recompute"]["recomputed_tokens"][1] == old.ranges["recompute"]["recomputed_tokens"][1]
    assert made.intervals.growth == old.intervals.growth


def test_a_model_itself_is_carried_as_its_folder_is(home_model: Path, tmp_path: Path) -> None:
    trace = other_trace(tmp_path, law=SLOWER)
    by_name, by_object = (calibrate(model, [trace], states=12) for model in (home_model, load(home_model)))
    assert load(home_model).residuals, "a forest that has to come along"
    assert by_object.model.digest == by_name.model.digest
    assert by_object.to_dict() == by_name.to_dict() and by_object.source == str(home_model)
    again = calibrate(by_object.model, [trace], states=12)
    assert f"transferred from {by_object.model.name}" in " ".join(again.notes)


def test_a_model_that_cannot_be_carried_is_refused_by_name(home_model: Path) -> None:
    class Guess(CostModel):
        name = "guess"

        def predict(self, situation: Preemption, options: Sequence[Option]) -> tuple[Cost, ...]:
            raise AssertionError

    with pytest.raises(ModelError, match=r"cost model guess is a Guess, which has no laws"):
        calibrate(Guess(), [])
    model = load(home_model)
    bare = replace(model, name="bare", residuals={kind: Forest(one.nodes) for kind, one in model.residuals.items()})
    with pytest.raises(ModelError, match=r"cost model bare: its residual of \w+ has no text"):
        calibrate(bare, [])


def test_few_states_are_all_used_and_none_is_held_out(home_model: Path, tmp_path: Path) -> None:
    report = calibrate(home_model, [other_trace(tmp_path, states=5, law=SLOWER)], tmp_path / "carried")
    assert (report.states, report.held_out_states, report.errors) == (5, 0, ())


@pytest.mark.parametrize("states", [0, -1, 41])
def test_states_that_are_not_there_are_refused(home_model: Path, tmp_path: Path, states: int) -> None:
    with pytest.raises(ValueError, match=r"states is -?\d+, should be from 1 to 40"):
        calibrate(home_model, [other_trace(tmp_path)], tmp_path / "carried", states=states)


def test_a_carried_law_counts_the_chunks_of_its_new_engine(home_model: Path, tmp_path: Path) -> None:
    trace = make_trace(seed=5, hardware=HARDWARE | {"processor": "another"}, name="else", states=6)
    headers = {core: replace(header, token_budget=256) for core, header in trace.headers.items()}
    replace(trace, headers=headers).write(tmp_path / "trace")
    calibrate(home_model, [tmp_path / "trace"], tmp_path / "carried")
    law = load(tmp_path / "carried").laws["recompute"]
    assert isinstance(law, RecomputeRoofline)
    assert law.budget_tokens == 256


def test_noise_is_refused_unless_forced(home_model: Path, tmp_path: Path) -> None:
    trace = other_trace(tmp_path, states=6, variation=0.9)
    with pytest.raises(TraceError, match=r"noise\.variation is 0\.9.*--force"):
        calibrate(home_model, [trace], tmp_path / "carried")
    calibrate(home_model, [trace], tmp_path / "carried", force=True)
    assert load(tmp_path / "carried").provenance.noise["variation"] == 0.9


def test_two_machines_are_refused_without_a_flag_that_there_is_not(home_model: Path, tmp_path: Path) -> None:
    other_trace(tmp_path, states=6)
    make_trace(states=6, name="third").write(tmp_path / "third")
    with pytest.raises(TraceError, match=r"use the traces of one at a time$"):
        calibrate(home_model, [tmp_path / "trace", tmp_path / "third"], tmp_path / "carried")


def test_an_untrained_model_is_calibrated(tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 4, "intermediate_size": 688, "vocab_size": 2048, "torch_dtype": "float32",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    trace = other_trace(tmp_path, states=40, law=CostLaw())
    report = calibrate(f"analytic:H100-SXM:{tmp_path}", [trace], tmp_path / "carried")
    assert report.errors[-1].mean_error["recompute"] < 0.3 < report.errors[0].mean_error["recompute"]
    assert load(tmp_path / "carried").ranges["recompute"]["recomputed_tokens"][0] > 0


def test_a_damped_forest_says_as_much_less(home_model: Path) -> None:
    texts = forest_texts(load(home_model))
    assert texts
    for text in texts.values():
        whole, half = forest_of(text), forest_of(damped(text, 0.5))
        for tokens in (50, 500, 1500):
            assert half.predict(victim(tokens)) == pytest.approx(0.5 * whole.predict(victim(tokens)), abs=1e-12)
