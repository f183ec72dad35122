"""Carrying a model: a few measurements find a known change, more do no harm, and all of it is said."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest

from kvpolicy.cost import CostModel, ModelError, load
from kvpolicy.cost.forest import Forest
from kvpolicy.cost.laws import LinearLaw, RecomputeRoofline
from kvpolicy.cost.model import Provenance
from kvpolicy.cost.store import forest_of, forest_texts
from kvpolicy.datasets.examples import examples_of
from kvpolicy.datasets.profiles import dataset_of
from kvpolicy.events import KINDS, Cost, Option, Preemption
from kvpolicy.trace import TraceError
from kvpolicy.training import calibrate, train
from kvpolicy.training.error_by_count import doubling, spread
from kvpolicy.training.law_transfer import carry_law, rebased, unknown_beforehand
from kvpolicy.training.transfer import damped
from tests.cost.test_laws import victim
from tests.synthetic import GEOMETRY, HARDWARE, CostLaw, fitted_model, make_trace, options_for

SLOW_LINK = {"kind": "simulated", "bytes_per_s": 2e8, "latency_s": 8e-3}
SLOWER = CostLaw(s_per_token=9e-5, s_per_pair=12e-9, fixed_s=1.2e-3, alone_s=4.5e-3)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    make_trace(seed=1, states=160, law=CostLaw(bend=0.4)).write(folder / "trace")
    train([folder / "trace"], folder / "model")
    return folder / "model"


def elsewhere(folder: Path, **plan: Any) -> Path:
    place = {"hardware": HARDWARE | {"processor": "another"}, "name": "else", "states": 60} | plan
    make_trace(seed=5, **place).write(folder / "trace")
    return folder / "trace"


def test_three_times_slower_is_found_with_four_states(home: Path, tmp_path: Path) -> None:
    trace = elsewhere(tmp_path, law=replace(SLOWER, bend=0.4))
    report = calibrate(home, [trace], tmp_path / "carried", states=4)
    errors = {one.states: one.mean_error["recompute"] for one in report.errors}
    assert errors[0] > 0.9
    assert errors[4] < 0.12
    assert errors[16] < 0.1
    assert "transferred from" in " ".join(report.notes)
    assert "4 states" in report.text().splitlines()[0]
    json.dumps(report.to_dict(), allow_nan=False)


def test_another_link_changes_swap_and_leaves_recompute_alone(home: Path, tmp_path: Path) -> None:
    law = CostLaw(bend=0.4, copy_latency_s=8e-3, s_per_byte=1e-8)
    trace = elsewhere(tmp_path, law=law, hardware=HARDWARE, link=SLOW_LINK)
    report = calibrate(home, [trace], tmp_path / "carried")
    first, later = report.errors[0].mean_error, {one.states: one.mean_error for one in report.errors}
    assert later[4]["swap"] < 0.3 * first["swap"]
    assert later[1]["recompute"] < first["recompute"] + 0.04


def test_where_nothing_changed_measurements_do_no_harm(home: Path, tmp_path: Path) -> None:
    trace = elsewhere(tmp_path, law=CostLaw(bend=0.4), hardware=HARDWARE)
    for one in calibrate(home, [trace], tmp_path / "carried").errors:
        for kind in KINDS:
            assert one.mean_error[kind] < 0.08


def test_a_carried_model_is_a_model_of_its_new_place(home: Path, tmp_path: Path) -> None:
    trace = elsewhere(tmp_path, law=SLOWER)
    calibrate(home, [trace], tmp_path / "carried", states=12)
    made, old = load(tmp_path / "carried"), load(home)
    assert made.provenance.hardware["processor"] == "another"
    assert old.state_ids < made.state_ids
    assert made.provenance.held_out["states"] == 20
    for kind in KINDS:
        assert made.intervals is not old.intervals
        assert set(made.ranges[kind]) == set(old.ranges[kind])


def test_one_state_promises_no_interval(home: Path, tmp_path: Path) -> None:
    trace = elsewhere(tmp_path, law=SLOWER)
    calibrate(home, [trace], tmp_path / "carried", states=1)
    made = load(tmp_path / "carried")
    one = dataset_of({"made": make_trace(seed=5, states=4)}).states[0].samples["recompute"][0].situation
    assert all(cost.high_s == inf for cost in made.predict(one, options_for(one)))


def test_beyond_what_was_measured_elsewhere_nothing_is_promised(home: Path, tmp_path: Path) -> None:
    trace = elsewhere(tmp_path, law=SLOWER, tokens=(32, 128))
    calibrate(home, [trace], tmp_path / "carried")
    made = load(tmp_path / "carried")
    assert load(home).ranges["recompute"]["recomputed_tokens"][1] > 1000
    for kind, name in (("recompute", "recomputed_tokens"), ("swap", "computed_tokens")):
        assert made.ranges[kind][name][1] <= 128
    long = make_trace(seed=9, states=8, tokens=(800, 2000), law=SLOWER)
    for state in dataset_of({"long": long}).states:
        one = state.samples["recompute"][0].situation
        assert all(cost.extrapolated and cost.high_s == inf for cost in made.predict(one, options_for(one)))


def test_where_nothing_changed_the_old_range_holds_on(home: Path, tmp_path: Path) -> None:
    trace = elsewhere(tmp_path, hardware=HARDWARE, tokens=(32, 128), law=CostLaw(bend=0.4))
    calibrate(home, [trace], tmp_path / "carried", states=8)
    made, old = load(tmp_path / "carried"), load(home)
    assert made.ranges["recompute"]["recomputed_tokens"][1] == old.ranges["recompute"]["recomputed_tokens"][1]
    assert made.intervals.growth == old.intervals.growth


def test_a_model_itself_is_carried_as_its_folder_is(home: Path, tmp_path: Path) -> None:
    trace = elsewhere(tmp_path, law=SLOWER)
    by_name, by_object = (calibrate(model, [trace], states=12) for model in (home, load(home)))
    assert load(home).residuals, "a forest that has to come along"
    assert by_object.model.digest == by_name.model.digest
    assert by_object.to_dict() == by_name.to_dict() and by_object.source == str(home)
    again = calibrate(by_object.model, [trace], states=12)
    assert f"transferred from {by_object.model.name}" in " ".join(again.notes)


def test_a_model_that_cannot_be_carried_is_refused_by_name(home: Path) -> None:
    class Guess(CostModel):
        name = "guess"

        def predict(self, situation: Preemption, options: Sequence[Option]) -> tuple[Cost, ...]:
            raise AssertionError

    with pytest.raises(ModelError, match=r"cost model guess is a Guess, which has no laws"):
        calibrate(Guess(), [])
    model = load(home)
    bare = replace(model, name="bare", residuals={kind: Forest(one.nodes) for kind, one in model.residuals.items()})
    with pytest.raises(ModelError, match=r"cost model bare: its residual of \w+ has no text"):
        calibrate(bare, [])


def test_few_states_are_all_used_and_none_is_held_out(home: Path, tmp_path: Path) -> None:
    report = calibrate(home, [elsewhere(tmp_path, states=5, law=SLOWER)], tmp_path / "carried")
    assert (report.states, report.held_out_states, report.errors) == (5, 0, ())


@pytest.mark.parametrize("states", [0, -1, 41])
def test_states_that_are_not_there_are_refused(home: Path, tmp_path: Path, states: int) -> None:
    with pytest.raises(ValueError, match=r"states is -?\d+, should be from 1 to 40"):
        calibrate(home, [elsewhere(tmp_path)], tmp_path / "carried", states=states)


def test_an_outlier_among_the_few_does_not_carry_the_law_away() -> None:
    data = dataset_of({"made": make_trace(noise=0.02, law=SLOWER)})
    few = list(examples_of(data.states)["recompute"][::12])
    law = RecomputeRoofline(0.4e-3, 1.5e-3, 3e-5, 4e-9)
    clean = carry_law(law, few, 1e-6)
    wrong = carry_law(law, [replace(few[0], engine_s=few[0].engine_s * 30), *few[1:]], 1e-6)
    for one in few:
        assert sum(clean.parts(one.x)) == pytest.approx(one.engine_s, rel=0.15)
        assert sum(wrong.parts(one.x)) == pytest.approx(sum(clean.parts(one.x)), rel=0.15)


def test_without_measurements_a_law_stays_what_it_is() -> None:
    law = RecomputeRoofline(0.4e-3, 1.5e-3, 3e-5, 4e-9)
    assert carry_law(law, [], 1e-6) == law


def test_linear_laws_are_scaled_as_a_whole() -> None:
    data = dataset_of({"made": make_trace(noise=0.0, law=SLOWER)})
    law = LinearLaw(0.4e-3, {"recomputed_tokens": 3e-5})
    carried = carry_law(law, examples_of(data.states)["recompute"][::10], 1e-6)
    assert isinstance(carried, LinearLaw)
    assert carried.per_feature_s["recomputed_tokens"] / 3e-5 == pytest.approx(carried.constant_s / 0.4e-3)
    assert carried.constant_s > 2 * law.constant_s


def test_shapes_and_sheets_are_applied_before_any_measurement() -> None:
    """Twice the layers on a device with 3.17 times the compute and 1.64 times the memory bandwidth."""
    law = RecomputeRoofline(1e-3, 2e-3, 3e-5, 4e-9, weight_s=5e-3)
    old = _place("NVIDIA A100-SXM4-80GB", GEOMETRY)
    new = _place("NVIDIA H100 80GB HBM3", replace(GEOMETRY, layers=2 * GEOMETRY.layers))
    made = rebased(law, old, new)
    assert isinstance(made, RecomputeRoofline)
    assert made.s_per_token == pytest.approx(3e-5 * 2 / (989.5 / 312))
    assert made.s_per_pair == pytest.approx(4e-9 * 2 / (989.5 / 312))
    assert made.weight_s == pytest.approx(5e-3 * 2 / (3350 / 2039))
    assert made.fixed_s == law.fixed_s
    assert rebased(law, old, _place("cpu", GEOMETRY)) == law


def test_what_a_mixture_or_a_window_costs_is_carried_as_well() -> None:
    law = RecomputeRoofline(
        1e-3, 0.0, 3e-5, 4e-9, 5e-3, expert_s=2e-3, expert_miss=0.75, s_per_window_pair=1e-9, window_tokens=128.0
    )
    old = _place("cpu", GEOMETRY)
    made = rebased(law, old, _place("cpu", replace(GEOMETRY, layers=2 * GEOMETRY.layers)), budget_tokens=256.0)
    assert isinstance(made, RecomputeRoofline)
    assert (made.expert_s, made.s_per_window_pair) == pytest.approx((4e-3, 2e-9))
    assert (made.expert_miss, made.window_tokens, made.budget_tokens) == (0.75, 128.0, 256.0)
    assert len(unknown_beforehand(law, old, _place("cpu", replace(GEOMETRY, layers=2)))) == 2
    assert unknown_beforehand(law, old, _place("another", GEOMETRY)) == ()


def test_a_carried_law_counts_the_chunks_of_its_new_engine(home: Path, tmp_path: Path) -> None:
    made = make_trace(seed=5, hardware=HARDWARE | {"processor": "another"}, name="else", states=6)
    headers = {core: replace(header, token_budget=256) for core, header in made.headers.items()}
    replace(made, headers=headers).write(tmp_path / "trace")
    calibrate(home, [tmp_path / "trace"], tmp_path / "carried")
    law = load(tmp_path / "carried").laws["recompute"]
    assert isinstance(law, RecomputeRoofline)
    assert law.budget_tokens == 256


def test_noise_is_refused_unless_forced(home: Path, tmp_path: Path) -> None:
    trace = elsewhere(tmp_path, states=6, variation=0.9)
    with pytest.raises(TraceError, match=r"noise\.variation is 0\.9.*--force"):
        calibrate(home, [trace], tmp_path / "carried")
    calibrate(home, [trace], tmp_path / "carried", force=True)
    assert load(tmp_path / "carried").provenance.noise["variation"] == 0.9


def test_two_machines_are_refused_without_a_flag_that_there_is_not(home: Path, tmp_path: Path) -> None:
    elsewhere(tmp_path, states=6)
    make_trace(states=6, name="third").write(tmp_path / "third")
    with pytest.raises(TraceError, match=r"use the traces of one at a time$"):
        calibrate(home, [tmp_path / "trace", tmp_path / "third"], tmp_path / "carried")


def test_an_untrained_model_is_calibrated(tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 4, "intermediate_size": 688, "vocab_size": 2048, "torch_dtype": "float32",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    trace = elsewhere(tmp_path, states=40, law=CostLaw())
    report = calibrate(f"analytic:H100-SXM:{tmp_path}", [trace], tmp_path / "carried")
    assert report.errors[-1].mean_error["recompute"] < 0.3 < report.errors[0].mean_error["recompute"]
    assert load(tmp_path / "carried").ranges["recompute"]["recomputed_tokens"][0] > 0


def _place(device: str, geometry: Any) -> Provenance:
    made = fitted_model("analytic").provenance
    return replace(made, hardware={"device": device}, geometry=geometry)


def test_a_damped_forest_says_as_much_less(home: Path) -> None:
    texts = forest_texts(load(home))
    assert texts
    for text in texts.values():
        whole, half = forest_of(text), forest_of(damped(text, 0.5))
        for tokens in (50, 500, 1500):
            assert half.predict(victim(tokens)) == pytest.approx(0.5 * whole.predict(victim(tokens)), abs=1e-12)


def test_states_to_measure_are_spread_over_length() -> None:
    states = dataset_of({"made": make_trace(states=60)}).states
    some = [state.computed_tokens for state in spread(states, 4, random.Random(0))]
    ordered = sorted(state.computed_tokens for state in states)
    assert some == sorted(some)
    for quarter, tokens in enumerate(some):
        assert ordered[15 * quarter] <= tokens <= ordered[15 * quarter + 14]


def test_numbers_of_measurements_double() -> None:
    assert doubling(1) == (1,)
    assert doubling(16) == (1, 2, 4, 8, 16)
    assert doubling(43) == (1, 2, 4, 8, 16, 32, 43)
