"""Wrong rows of a trace are refused by table and row; unusual ones are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvpolicy.datasets.profiles import dataset_of
from kvpolicy.datasets.validation import COUNTS
from kvpolicy.trace import Trace, TraceError
from tests.synthetic import changed, make_trace
from tests.synthetic_steps import with_steps

Row = dict[str, Any]


def with_change(table: str, change: Callable[[Row], Any], row: int = 7) -> Trace:
    trace = make_trace(states=20)
    rows = trace.rows(table)
    change(rows[row])
    return changed(trace, table, rows)


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
    trace = make_trace(states=20)
    outcomes = trace.table("outcomes")
    at = outcomes.schema.get_field_index("engine_s")
    values = outcomes["engine_s"].to_pylist()
    values[7] = engine_s
    broken = outcomes.set_column(at, outcomes.schema.field(at), [values])
    with pytest.raises(TraceError, match=r"table outcomes, row 7 .*engine_s is (nan|inf) s"):
        dataset_of({"made": Trace(trace.headers, dict(trace.tables) | {"outcomes": broken})})


@pytest.mark.parametrize("changes", [{"engine_s": -0.3}, {"engine_s": 1.5}])
def test_an_unusual_cost_is_accepted(changes: Row) -> None:
    assert len(dataset_of({"made": with_change("outcomes", lambda row: row.update(changes))}).states) == 20


def test_a_negative_priority_is_no_error() -> None:
    assert dataset_of({"made": with_change("decisions", lambda row: row.update(priority=-2))}).states


@pytest.mark.parametrize("arm", ["swapp", None])
def test_a_wrong_arm_is_called_that_and_not_left_out_for_another_reason(arm: str | None) -> None:
    trace = with_change("decisions", lambda row: row.update(arm=arm))
    with pytest.raises(TraceError, match=rf"table decisions, row 7: arm is {arm!r}.*\(recompute or swap\)"):
        dataset_of({"made": trace})


@pytest.mark.parametrize("table", ["decisions", "outcomes", "transfers", "windows", "steps"])
def test_a_repeated_row_is_refused(table: str) -> None:
    trace = make_trace(states=20)
    trace = with_steps(trace) if table == "steps" else trace
    rows = trace.rows(table)
    of_core = [row for row in rows if row["core"] == rows[3]["core"]]
    doubled = [*of_core, of_core[3], *(row for row in rows if row["core"] != rows[3]["core"])]
    with pytest.raises(TraceError, match=rf"made: table {table}, row {len(of_core)} is row 3 again"):
        dataset_of({"made": changed(trace, table, doubled)})
