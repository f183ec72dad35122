"""Training: what the report tells, what is held out, and what is refused and how."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kvpolicy import cost, trace
from kvpolicy.datasets.profiles import dataset_of, read_dataset
from kvpolicy.headroom import NO_STEP_TIMES
from kvpolicy.trace import TraceError
from kvpolicy.training import TrainReport, split, train
from kvpolicy.training.family import FAMILIES
from tests.synthetic import CostLaw, Plan, changed, make_trace, without
from tests.synthetic_steps import DECODE_S, FIXED_S, TOKEN_S, with_steps


def trained(tmp_path: Path, made: trace.Trace, **more: Any) -> TrainReport:
    made.write(tmp_path / "trace")
    return train([tmp_path / "trace"], tmp_path / "model", **more)


@pytest.mark.parametrize("family", FAMILIES)
def test_held_out_errors_are_those_the_law_allows(tmp_path: Path, family: str) -> None:
    report = trained(tmp_path, make_trace(states=160), family=family)
    assert (report.training_states, report.held_out_states) == (120, 40)
    worst = 0.02 if family != "linear" else 0.12
    for kind in ("recompute", "swap"):
        assert report.held_out[kind]["mean_error"] < worst
        assert report.held_out["coverage"][kind]["holds"] > 0.75
    json.dumps(report.to_dict(), allow_nan=False)
    assert f"({family})" in report.text()
    assert report.digest == cost.load(tmp_path / "model").digest


def test_coverage_is_reported_by_bin_with_what_so_few_states_can_tell(tmp_path: Path) -> None:
    report = trained(tmp_path, make_trace(states=400))
    for of in ("recompute", "swap", "ratio"):
        result = report.held_out["coverage"][of]
        assert result["low"] <= result["holds"] <= result["high"]
        assert len(result["bins"]) > 2
        assert sum(bin_row["states"] for bin_row in result["bins"]) == result["states"] == report.held_out_states
        assert result["high"] > 0.88
    assert cost.load(tmp_path / "model").provenance.held_out["coverage"] == report.held_out["coverage"]
    text = report.text()
    assert report.prices.sentence() in text and report.prices.unknown == NO_STEP_TIMES
    assert "90% interval holds" in text
    inside, beyond = text.split("90% interval holds beyond the range")
    assert inside.count("  ratio ") == 1 + len(report.held_out["coverage"]["ratio"]["bins"])
    part = report.held_out["beyond"]["ratio"]
    assert part["states"] == part["up_to_2x"]["states"] + part["from_2x"]["states"] > 100
    assert f"{part['holds']:.0%} of {part['states']}" in beyond


def test_the_delays_are_learned_and_scored(tmp_path: Path) -> None:
    """In these traces a victim waits as long as the engine, and each other request too."""
    report = trained(tmp_path, make_trace(states=160))
    for kind in ("recompute", "swap"):
        assert report.held_out["victim_delay"][kind]["mean_error"] < 0.1
        assert report.held_out["victim_delay"][kind]["states"] == 40
        assert cost.load(tmp_path / "model").others_share[kind] == pytest.approx(1.0, abs=0.05)
    assert "victim delay, swap" in report.text()


def test_the_time_of_an_undisturbed_step_goes_with_the_model(tmp_path: Path) -> None:
    assert trained(tmp_path, make_trace(states=40)).out
    assert cost.load(tmp_path / "model").step_time is None
    with_steps(make_trace(states=40)).write(tmp_path / "steps")
    train([tmp_path / "steps"], tmp_path / "model")
    step_time = cost.load(tmp_path / "model").step_time
    assert step_time is not None
    assert step_time.fitted_on == "2 cores"
    decodes = np.array([[4.0, 4.0, 1200.0, 0.0]])
    assert step_time.predict(decodes)[0] == pytest.approx(FIXED_S + 4 * (TOKEN_S + DECODE_S), rel=0.01)


def test_the_residual_pays_where_physics_misses(tmp_path: Path) -> None:
    report = trained(tmp_path, make_trace(states=200, law=CostLaw(bend=0.4)))
    for kind in ("recompute", "swap"):
        assert report.trees[kind] > 0
        assert report.held_out[kind]["mean_error"] < 0.6 * report.held_out[kind]["law_mean_error"]


def test_few_states_fall_back_to_physics_and_it_is_said(tmp_path: Path) -> None:
    report = trained(tmp_path, make_trace(states=40))
    assert report.trees == {"recompute": 0, "swap": 0}
    assert "recompute: 20 states are under 40: physics alone" in report.text()


def test_too_few_states_for_an_interval_are_said(tmp_path: Path) -> None:
    report = trained(tmp_path, make_trace(states=14))
    assert "too few for 90% intervals: they are infinite" in report.text()


@pytest.mark.parametrize("states", [12, 39, 40, 59, 60, 79, 80, 201])
def test_of_forty_states_or_more_at_least_twenty_are_held_out(states: int) -> None:
    every = dataset_of({"made": make_trace(states=states, repeats=1)}).states
    training, held = split(every, 0)
    assert len(training) + len(held) == states
    assert not {id(one) for one in training} & {id(one) for one in held}
    assert len(held) >= (20 if states >= 40 else states // 2)
    assert len(training) >= len(held)


def test_the_same_seed_gives_the_same_model_and_another_another(tmp_path: Path) -> None:
    make_trace(states=80, law=CostLaw(bend=0.4)).write(tmp_path / "trace")
    digests = [train([tmp_path / "trace"], tmp_path / f"m{i}", seed=seed).digest for i, seed in enumerate((0, 0, 1))]
    assert digests[0] == digests[1] != digests[2]


def test_the_model_remembers_its_states_and_no_other(tmp_path: Path) -> None:
    trained(tmp_path, make_trace(states=80))
    model = cost.load(tmp_path / "model")
    known = {name for state in read_dataset([tmp_path / "trace"]).states for name in state.ids}
    assert len(model.state_ids) == 60
    assert model.state_ids < known


def test_natural_preemptions_outside_the_range_are_counted_by_feature(tmp_path: Path) -> None:
    """Natural preemptions of a server, longer than anything the profile forced out."""
    profile = make_trace(states=60, natural_share=0.0, tokens=(32, 500))
    other = make_trace(seed=4, states=60, natural_share=1.0, tokens=(1000, 2000), name="production")
    rows = [row | {"state_id": None, "arm": None, "repeat": None} for row in other.rows("decisions")]
    seen = without(changed(other, "decisions", rows), "windows")
    both = trace.Trace(
        dict(profile.headers) | dict(seen.headers),
        {
            name: pa.concat_tables([one.tables[name] for one in (profile, seen) if name in one.tables])
            for name in ("decisions", "outcomes", "windows", "transfers")
        },
    )
    report = trained(tmp_path, both)
    assert report.natural_preemptions == len(rows)
    assert report.natural_outside["computed_tokens"] == 1.0
    assert report.natural_outside["segment_bytes"] == 0.0
    assert report.natural_extrapolated == 1.0
    assert "computed_tokens: 100.0% outside" in report.text()


def test_costs_below_zero_count_as_the_noise_and_it_is_said(tmp_path: Path) -> None:
    """Copies of some microseconds under attribution noise of a millisecond."""
    law = CostLaw(copy_latency_s=1e-5, s_per_byte=1e-13, s_per_segment=0.0)
    report = trained(tmp_path, make_trace(states=80, law=law, additive_noise_s=1e-3))
    assert report.floor_s["swap"] == pytest.approx(1.2533e-3 / 2, rel=0.3)
    assert report.below_floor["swap"] > 40
    assert "most costs of swap are below that, so that its scores mean little" in report.text()
    assert f"{report.below_floor['swap']} states measured less and count as that much" in report.text()


def test_where_one_option_always_wins_it_is_said(tmp_path: Path) -> None:
    report = trained(tmp_path, make_trace(law=CostLaw(copy_latency_s=0.0, s_per_byte=1e-11)))
    assert report.always_wins == "swap"
    assert "swap costs less in every state: here always choosing it is optimal" in report.text()


def test_noise_over_thirty_percent_only_by_force(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"noise.variation is 0.31, should be at most 0.3"):
        trained(tmp_path, make_trace(states=40, variation=0.31))
    assert train([tmp_path / "trace"], tmp_path / "model", force=True).variation == 0.31


def test_unknown_noise_is_not_taken_for_none(tmp_path: Path) -> None:
    make_trace(states=40).write(tmp_path / "trace")
    header = next((tmp_path / "trace").glob("*/header.json"))
    header.write_text(json.dumps(json.loads(header.read_text()) | {"noise": {}}))
    with pytest.raises(TraceError, match=r"noise\.variation is None"):
        train([tmp_path / "trace"], tmp_path / "model")


def test_a_missing_arm_and_too_few_states_are_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"table decisions has no valid row with arm 'swap'"):
        trained(tmp_path, make_trace(arms=("recompute",)))
    make_trace(states=11).write(tmp_path / "few")
    with pytest.raises(TraceError, match=r"few: 11 states were measured under both options, .* at least 12"):
        train([tmp_path / "few"], tmp_path / "model")
    without(make_trace(), "windows").write(tmp_path / "none")
    with pytest.raises(TraceError, match="no measured state"):
        train([tmp_path / "none"], tmp_path / "model")


@pytest.mark.parametrize(
    ("table", "column", "value", "message"),
    [
        ("windows", "duration_s", -0.5, r"table windows, row 7 of core core-made-32: duration_s is -0.5 s"),
        ("outcomes", "wait_blocks_s", -1.0, r"table outcomes, row 7 of core core-made-32: wait_blocks_s is -1 s"),
        ("outcomes", "victim_delay_s", -1.0, r"table outcomes, row 7 .*victim_delay_s"),
        ("transfers", "end_s", 1.0, r"table transfers, row 7 .*duration_s is -999 s"),
        ("decisions", "held_blocks", 0, r"table decisions, row 7: held_blocks is 0, should be above 0"),
        ("decisions", "repeat", None, r"table decisions, row 7: .*should have an arm .* and a repeat"),
    ],
)
def test_impossible_values_are_refused_by_table_and_row(
    tmp_path: Path, table: str, column: str, value: Any, message: str
) -> None:
    made = make_trace(states=40)
    rows = made.rows(table)
    rows[7][column] = value
    with pytest.raises(TraceError, match=message):
        trained(tmp_path, changed(made, table, rows))


def test_nan_is_refused_by_file_and_row(tmp_path: Path) -> None:
    make_trace(states=40).write(tmp_path / "trace")
    path = next((tmp_path / "trace").glob("core-made-32/outcomes/part-*.parquet"))
    table = pq.read_table(path)
    at = table.schema.get_field_index("engine_s")
    values = table["engine_s"].to_pylist()
    values[3] = float("nan")
    pq.write_table(table.set_column(at, table.schema.field(at), pa.array(values)), path)
    with pytest.raises(TraceError, match=rf"{path.name}, row 3: engine_s is not a finite number"):
        train([tmp_path / "trace"], tmp_path / "model")


def test_discarded_windows_and_unattributed_costs_are_left_out_and_counted(tmp_path: Path) -> None:
    made = make_trace(states=40)
    windows, outcomes, decisions = made.rows("windows"), made.rows("outcomes"), made.rows("decisions")
    swaps = [row for row in windows if row["arm"] == "swap"]
    swaps[0]["discarded"] = "another request was preempted"
    outcomes[20]["engine_s"] = None
    outcomes[21]["ended"] = "aborted"
    decisions[22]["executed"] = "swap" if decisions[22]["arm"] == "recompute" else "recompute"
    for table, rows in (("windows", windows), ("outcomes", outcomes), ("decisions", decisions)):
        made = changed(made, table, rows)
    report = trained(tmp_path, made)
    assert {reason: count for reason, count in report.left_out.items() if count} == {
        "windows that were discarded": 1,
        "preemptions whose cost could not be attributed": 1,
        "preemptions whose outcome is not whole": 1,
        "preemptions in which something else was executed": 1,
    }
    assert "left out: 1 windows that were discarded" in report.text()


def test_mixed_machines_models_and_links_are_refused_by_name(tmp_path: Path) -> None:
    make_trace(states=40).write(tmp_path / "one")
    link = {"kind": "simulated", "bytes_per_s": 1e8, "latency_s": 0.0}
    others = {
        "machines": make_trace(states=40, name="b", hardware=Plan().hardware | {"processor": "another"}),
        "links": make_trace(states=40, name="b", link=link),
    }
    for what, other in others.items():
        other.write(tmp_path / what)
        with pytest.raises(TraceError, match=f"cores core-made-32 and core-b-32 were measured on different {what}"):
            train([tmp_path / "one", tmp_path / what], tmp_path / "model")
    with pytest.raises(TraceError, match="given twice"):
        train([tmp_path / "one", tmp_path / "one"], tmp_path / "model")


def test_mixed_hardware_is_accepted_when_asked_and_noted(tmp_path: Path) -> None:
    make_trace(states=40).write(tmp_path / "one")
    make_trace(states=40, name="b", hardware=Plan().hardware | {"processor": "another"}).write(tmp_path / "other")
    both = [tmp_path / "one", tmp_path / "other"]
    with pytest.raises(TraceError, match=r"different machines: .*\(header\.json\).*--mixed-hardware"):
        train(both, tmp_path / "model")
    report = train(both, tmp_path / "model", mixed_hardware=True)
    assert report.training_states + report.held_out_states == 80
    assert any("mixed hardware" in note and "another" in note for note in report.notes)
    make_trace(states=40, name="c", link={"kind": "simulated", "bytes_per_s": 1e8, "latency_s": 0.0}).write(
        tmp_path / "linked"
    )
    with pytest.raises(TraceError, match="different links"):
        train([tmp_path / "one", tmp_path / "linked"], tmp_path / "model", mixed_hardware=True)


def test_constant_features_are_noted_and_a_single_length_is_refused(tmp_path: Path) -> None:
    make_trace(states=40, block_sizes=(32,)).write(tmp_path / "one")
    notes = train([tmp_path / "one"], tmp_path / "model").notes
    assert any(note.startswith("swap: the same in every state: segment_bytes (32768)") for note in notes), notes
    make_trace(states=40, name="b", tokens=(500, 500)).write(tmp_path / "flat")
    with pytest.raises(TraceError, match="table decisions: computed_tokens is 500 in all 40 states"):
        train([tmp_path / "flat"], tmp_path / "model")


def test_two_traces_of_one_machine_make_one_model(tmp_path: Path) -> None:
    make_trace(states=40).write(tmp_path / "one")
    make_trace(seed=5, states=40, name="b").write(tmp_path / "two")
    report = train([tmp_path / "one", tmp_path / "two"], tmp_path / "model")
    assert report.training_states + report.held_out_states == 80
    assert len(cost.load(tmp_path / "model").provenance.trace_digests) == 2


def test_unknown_family_and_missing_trace_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="family is 'forest', should be one of boosted, linear, analytic or python:"):
        train([tmp_path], tmp_path / "model", family="forest")
    with pytest.raises(TraceError, match="no such folder"):
        train([tmp_path / "nowhere"], tmp_path / "model")
    with pytest.raises(TraceError, match="no trace was given"):
        train([], tmp_path / "model")


def test_costs_that_are_missing_are_attributed_from_the_steps(tmp_path: Path) -> None:
    made = make_trace(states=40)
    known = {row["preemption_id"]: row["engine_s"] for row in made.rows("outcomes")}
    bare = with_steps(made)
    assert not any(row["engine_s"] for row in bare.rows("outcomes"))
    states = dataset_of({"bare": bare}).states
    assert len(states) == 40
    for state in states:
        for some in state.samples.values():
            for sample in some:
                assert sample.engine_s == pytest.approx(known[sample.preemption_id], rel=0.01)
    assert trained(tmp_path, bare).held_out["recompute"]["mean_error"] < 0.05


def test_the_floor_is_in_the_report(tmp_path: Path) -> None:
    report = trained(tmp_path, with_steps(make_trace(states=40)))
    assert "step times: the step-time model is off by" in report.text()
    assert "self-check: none in core-made-32, core-made-64" in report.text()
    assert set(report.to_dict()["floor"]["step_error"]) == {"core-made-32", "core-made-64"}


def test_a_model_that_is_replaced_is_named(tmp_path: Path) -> None:
    assert "replaces" not in trained(tmp_path, make_trace(states=40)).text()
    again = train([tmp_path / "trace"], tmp_path / "model", family="analytic")
    assert again.replaced
    assert "replaces the cost model that was there" in again.text()


def test_a_folder_that_cannot_be_written_to_is_refused_before_traces_are_read(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match="is no cost model"):
        train([tmp_path / "nowhere"], tmp_path / "precious")


def test_a_negative_seed_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="seed is -1, should be 0 or above"):
        train([tmp_path / "nowhere"], tmp_path / "model", seed=-1)


def test_two_token_budgets_are_noted(tmp_path: Path) -> None:
    for name, budget in (("one", 256), ("two", 2048)):
        made = make_trace(states=20, name=name)
        headers = {core: replace(header, token_budget=budget) for core, header in made.headers.items()}
        replace(made, headers=headers).write(tmp_path / name)
    report = train([tmp_path / "one", tmp_path / "two"], tmp_path / "model", family="analytic")
    assert any("several token budgets (2048, 256)" in note for note in report.notes)


@pytest.mark.parametrize(("device", "told"), [("NVIDIA L40S", True), ("cpu", False)])
def test_rates_beyond_the_data_sheet_are_noted(tmp_path: Path, device: str, told: bool) -> None:
    """2e11 operations per second: plausible of something, far under what an L40S does."""
    make_trace(states=40, hardware=Plan().hardware | {"device": device}).write(tmp_path / "trace")
    report = train([tmp_path / "trace"], tmp_path / "model", family="analytic")
    assert any("linear layers is fitted as" in note for note in report.notes) == told


@pytest.mark.parametrize("budget", [256, None])
def test_the_engines_token_budget_makes_chunks(tmp_path: Path, budget: int | None) -> None:
    made = make_trace(states=60)
    headers = {core: replace(header, token_budget=budget) for core, header in made.headers.items()}
    trained(tmp_path, replace(made, headers=headers), family="analytic")
    law = json.loads((tmp_path / "model" / "model.json").read_text())["laws"]["recompute"]
    assert law["budget_tokens"] == budget


def test_of_more_states_than_are_used_a_draw_is_learned_from_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_trace(states=120).write(tmp_path / "trace")
    monkeypatch.setattr("kvpolicy.training.pipeline.MAX_STATES", 40)
    report = train([tmp_path / "trace"], tmp_path / "model")
    every = read_dataset([tmp_path / "trace"]).states
    training, held = split(every, 0)
    assert (len(training), len(held)) == (90, 30)
    assert (report.training_states, report.held_out_states) == (40, 30)
    text = report.text()
    assert "note: 40 of 90 states sampled to train on, over all lengths" in text
    assert "to judge by" not in text
    known = cost.load(tmp_path / "model").state_ids
    assert len(known) == 40 and known < {name for state in training for name in state.ids}
