"""What comes of a trace: rows that cannot be are refused by table and row, strange ones are not; the floor is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvpolicy.datasets.examples import examples_of, option_of
from kvpolicy.datasets.profiles import dataset_of
from kvpolicy.datasets.validation import COUNTS
from kvpolicy.events import KINDS
from kvpolicy.trace import Trace, TraceError
from tests.synthetic import changed, make_trace
from tests.synthetic_steps import with_steps

Row = dict[str, Any]
CHECK: Row = {
    "arm": "swap", "block_size": 32, "pairs": 10, "attributed_s": 0.0249, "low_s": 2e-3, "high_s": 7e-3,
    "verdict": "disagrees",
}  # fmt: skip


def with_change(table: str, change: Callable[[Row], Any], row: int = 7) -> Trace:
    made = make_trace(states=20)
    rows = made.rows(table)
    change(rows[row])
    return changed(made, table, rows)


def with_noise(noise: Row) -> Trace:
    made = make_trace(states=20)
    headers = {core: replace(header, noise=noise) for core, header in made.headers.items()}
    return Trace(headers, made.tables)


@pytest.mark.parametrize("name", COUNTS)
def test_counts_below_zero_are_refused_by_row(name: str) -> None:
    trace = with_change("decisions", lambda row: row.update({name: -1}))
    with pytest.raises(TraceError, match=rf"made: table decisions, row 7: {name} is -1, should be 0 or above"):
        dataset_of({"made": trace})


def test_a_negative_count_is_refused_in_a_natural_preemption_too() -> None:
    trace = with_change("decisions", lambda row: row.update(state_id=None, cause="memory", running_requests=-3))
    with pytest.raises(TraceError, match=r"row 7: running_requests is -3"):
        dataset_of({"made": trace})


@pytest.mark.parametrize("engine_s", [-5.0, 1e12])
def test_a_cost_beyond_the_whole_trace_is_refused_by_row(engine_s: float) -> None:
    trace = with_change("outcomes", lambda row: row.update(engine_s=engine_s))
    with pytest.raises(TraceError, match=r"table outcomes, row 7 of core core-made-32: engine_s is .* within the 2 s"):
        dataset_of({"made": trace})


@pytest.mark.parametrize("engine_s", [float("nan"), float("inf")])
def test_a_cost_that_is_no_number_is_refused_in_memory_too(engine_s: float) -> None:
    made = make_trace(states=20)
    outcomes = made.table("outcomes")
    at = outcomes.schema.get_field_index("engine_s")
    values = outcomes["engine_s"].to_pylist()
    values[7] = engine_s
    broken = outcomes.set_column(at, outcomes.schema.field(at), [values])
    with pytest.raises(TraceError, match=r"table outcomes, row 7 .*engine_s is (nan|inf) s"):
        dataset_of({"made": Trace(made.headers, dict(made.tables) | {"outcomes": broken})})


@pytest.mark.parametrize("changes", [{"engine_s": -0.3}, {"engine_s": 1.5}])
def test_a_strange_cost_is_no_error(changes: Row) -> None:
    assert len(dataset_of({"made": with_change("outcomes", lambda row: row.update(changes))}).states) == 20


def test_a_negative_priority_is_no_error() -> None:
    assert dataset_of({"made": with_change("decisions", lambda row: row.update(priority=-2))}).states


@pytest.mark.parametrize("arm", ["swapp", None])
def test_a_wrong_arm_is_called_that_and_not_left_out_for_another_reason(arm: str | None) -> None:
    trace = with_change("decisions", lambda row: row.update(arm=arm))
    with pytest.raises(TraceError, match=rf"table decisions, row 7: arm is {arm!r}.*\(recompute or swap\)"):
        dataset_of({"made": trace})


@pytest.mark.parametrize("table", ["decisions", "outcomes", "transfers", "windows", "steps"])
def test_a_row_that_is_there_twice_is_refused(table: str) -> None:
    made = make_trace(states=20)
    made = with_steps(made) if table == "steps" else made
    rows = made.rows(table)
    of_core = [row for row in rows if row["core"] == rows[3]["core"]]
    doubled = [*of_core, of_core[3], *(row for row in rows if row["core"] != rows[3]["core"])]
    with pytest.raises(TraceError, match=rf"made: table {table}, row {len(of_core)} is row 3 again"):
        dataset_of({"made": changed(made, table, doubled)})


def test_one_missing_cost_is_filled_and_the_stored_ones_stay() -> None:
    made = make_trace(states=20)
    stored = {row["preemption_id"]: row["engine_s"] for row in made.rows("outcomes")}
    bare = with_steps(made)
    rows = bare.rows("outcomes")
    for row in rows[1:]:
        row["engine_s"] = 1.25 * stored[row["preemption_id"]]
    found = {
        sample.preemption_id: sample.engine_s
        for state in dataset_of({"made": changed(bare, "outcomes", rows)}).states
        for some in state.samples.values()
        for sample in some
    }
    first = rows[0]["preemption_id"]
    assert found.pop(first) == pytest.approx(stored[first], rel=0.01)
    assert found == {name: 1.25 * stored[name] for name in found}


def test_checks_that_did_not_pass_are_told_once() -> None:
    noise = {"variation": 0.03, "self_check": [CHECK, CHECK | {"arm": "recompute", "verdict": "agrees"}]}
    told = dataset_of({"made": with_noise(noise)}).floor.lines()
    assert told[0] == (
        "self-check of swap, blocks of 32: failed: costs of 24.9 ms on average, control runs measured +2 to +7 ms more "
        "(95%, 10 pairs)"
    )
    assert not [line for line in told if "recompute" in line]
    assert len(told) == 2
    undecided = CHECK | {"verdict": "cannot tell", "pairs": 3, "low_s": None, "high_s": None}
    told = dataset_of({"made": with_noise(noise | {"self_check": [undecided]})}).floor.lines()
    assert told[0] == "self-check of swap, blocks of 32: undecided, 3 pairs with control runs are too few"


def test_no_self_check_and_no_step_times_are_told_too() -> None:
    told = dataset_of({"made": make_trace(states=20)}).floor.lines()
    assert "self-check: none in core-made-32, core-made-64" in told[0]
    assert "step times: too few undisturbed steps" in told[1]


def test_the_step_time_models_error_is_the_floor() -> None:
    data = dataset_of({"made": with_steps(make_trace(states=20))})
    assert set(data.step_times) == set(data.headers)
    worst = max(model.error.mean_s for model in data.step_times.values())
    assert f"{1e3 * worst:.3g} ms on held-out undisturbed steps: the noise floor" in data.floor.lines()[-1]


def test_too_few_steps_for_a_step_time_model_hurt_only_costs_that_need_it() -> None:
    made = make_trace(states=20)
    few = [row for row in with_steps(made).rows("steps") if row["step"] < 10]
    stored = Trace(made.headers, dict(made.tables) | {"steps": changed(made, "steps", few).tables["steps"]})
    assert dataset_of({"made": stored}).floor.step_error == {}
    rows = stored.rows("outcomes")
    rows[0]["engine_s"] = None
    with pytest.raises(TraceError, match="undisturbed steps"):
        dataset_of({"made": changed(stored, "outcomes", rows)})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("passed", r"noise.self_check is 'passed', should be a list"),
        ([{}], r"noise.self_check\[0\].arm is missing"),
        ([CHECK | {"verdict": "fine"}], r"noise.self_check\[0\].verdict is 'fine', should be one of agrees"),
        ([CHECK | {"attributed_s": "3"}], r"noise.self_check\[0\].attributed_s is '3', should be a number"),
    ],
)
def test_a_self_check_that_cannot_be_read_is_named(given: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        dataset_of({"made": with_noise({"variation": 0.03, "self_check": given})})


def test_every_fold_of_a_fit_gets_the_same_features_without_working_them_out_again() -> None:
    states = dataset_of({"x": make_trace(states=12)}).states
    first, again = examples_of(states), examples_of(states[:6])
    for kind in KINDS:
        assert all(one.x is other.x for one, other in zip(first[kind], again[kind], strict=False))
    sample = states[0].samples["swap"][0]
    assert sample.option == option_of("swap", sample.situation.computed_tokens)


def test_rows_of_some_columns_are_those_alone() -> None:
    made = make_trace(states=12)
    (one, *_) = made.rows("decisions", ("core", "arm"))
    assert one == {name: made.rows("decisions")[0][name] for name in ("core", "arm")}
