"""What comes of a trace: rows that cannot be are refused by table and row, strange ones are not; the floor is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpolicy.datasets.profiles import dataset_of, read_dataset
from kvpolicy.events import situation_of
from kvpolicy.headroom import NO_STEP_TIMES
from kvpolicy.trace import Trace, TraceError
from tests.datasets.changed_rows import with_change
from tests.synthetic import changed, make_trace
from tests.synthetic_steps import with_steps

SHIPPED = Path(__file__).resolve().parents[2] / "traces" / "cpu-llama-native"


def test_one_missing_cost_is_filled_and_the_stored_ones_stay() -> None:
    trace = make_trace(states=20)
    stored = {row["preemption_id"]: row["engine_s"] for row in trace.rows("outcomes")}
    bare = with_steps(trace)
    rows = bare.rows("outcomes")
    for row in rows[1:]:
        row["engine_s"] = 1.25 * stored[row["preemption_id"]]
    by_name = {
        sample.preemption_id: sample.engine_s
        for state in dataset_of({"made": changed(bare, "outcomes", rows)}).states
        for some in state.samples.values()
        for sample in some
    }
    first = rows[0]["preemption_id"]
    assert by_name.pop(first) == pytest.approx(stored[first], rel=0.01)
    assert by_name == {name: 1.25 * stored[name] for name in by_name}


def test_too_few_steps_for_a_step_time_model_hurt_only_costs_that_need_it() -> None:
    trace = make_trace(states=20)
    few = [row for row in with_steps(trace).rows("steps") if row["step"] < 10]
    stored = Trace(trace.headers, dict(trace.tables) | {"steps": changed(trace, "steps", few).tables["steps"]})
    assert dataset_of({"made": stored}).floor.step_error == {}
    rows = stored.rows("outcomes")
    rows[0]["engine_s"] = None
    with pytest.raises(TraceError, match="undisturbed steps"):
        dataset_of({"made": changed(stored, "outcomes", rows)})


def test_states_hold_what_the_rows_say_in_the_order_of_time() -> None:
    trace = make_trace(states=20, repeats=3)
    rows = {row["preemption_id"]: row for row in trace.rows("decisions")}
    costs = {row["preemption_id"]: row for row in trace.rows("outcomes")}
    data = dataset_of({"made": trace})
    assert [state.name for state in data.states] == sorted({row["state_id"] for row in rows.values()})
    for state in data.states:
        for kind, some in state.samples.items():
            assert [one.repeat for one in some] == [0, 1, 2]
            for one in some:
                row, cost = rows.pop(one.preemption_id), costs[one.preemption_id]
                assert (one.situation, one.kind, one.core) == (situation_of(row), row["arm"], row["core"])
                assert (one.engine_s, one.victim_delay_s, one.others_delay_s) == (
                    cost["engine_s"], cost["victim_delay_s"], cost["others_delay_s"]
                )  # fmt: skip
                assert (state.name, kind) == (row["state_id"], row["arm"])
                assert f"{one.core}/{state.name}" in state.ids
            assert state.costs_s(kind) == [one.engine_s for one in some]
        assert state.lengths == [one.situation.computed_tokens for some in state.samples.values() for one in some]
    assert not rows
    natural = [situation_of(row) for row in trace.rows("decisions") if row["cause"] == "memory"]
    assert list(data.natural) == natural
    assert len(data.transfers_of(data.states[:4])) == 4 * 3 * 2


def test_a_delay_of_the_others_that_is_not_known_stays_unknown() -> None:
    trace = with_change(make_trace(states=12), "outcomes", 0, others_delay_s=None)
    results = [one for state in dataset_of({"made": trace}).states for some in state.samples.values() for one in some]
    assert [one.preemption_id for one in results if one.others_delay_s is None] == [
        trace.rows("outcomes")[0]["preemption_id"]
    ]


def test_a_profile_says_what_a_recomputed_token_costs_beside_its_batches() -> None:
    """Of the shipped trace; one that was made up holds no steps to learn their duration from."""
    shipped = read_dataset([SHIPPED])
    found = shipped.prices
    running = [state.samples["recompute"][0].situation.running_requests for state in shipped.states]
    assert (found.min_requests, found.max_requests) == (min(one for one in running if one), max(running))
    assert found.lowest is not None and found.highest is not None and 0 < found.lowest < found.highest
    assert f"beside {found.min_requests} to {found.max_requests} requests" in found.sentence()
    assert dataset_of({"made": make_trace()}).prices.unknown == NO_STEP_TIMES
