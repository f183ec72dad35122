"""Which measurement windows count: reasons to leave one out, and rows that are refused by number."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from kvpolicy.datasets.profiles import dataset_of
from kvpolicy.trace import TraceError
from tests.datasets.changed_rows import with_change
from tests.synthetic import changed, make_trace, situation


def test_each_window_left_out_is_counted_under_its_first_reason() -> None:
    trace = make_trace(states=20)
    windows, outcomes, decisions = trace.rows("windows"), trace.rows("outcomes"), trace.rows("decisions")
    measured = [row for row in windows if row["preemption_id"]]
    measured[0] |= {"discarded": "something else ran"}
    outcomes[0] |= {"ended": "aborted"}
    outcomes[1] |= {"ended": "superseded", "engine_s": None}
    outcomes[2] |= {"engine_s": None}
    for row in decisions:
        if row["preemption_id"] in (outcomes[2]["preemption_id"], outcomes[3]["preemption_id"]):
            row["executed"] = "recompute" if row["arm"] == "swap" else "swap"
    for table, rows in (("windows", windows), ("outcomes", outcomes), ("decisions", decisions)):
        trace = changed(trace, table, rows)
    left_out = dataset_of({"made": trace}).left_out
    discarded = measured[0]["preemption_id"]
    expected = Counter(
        {
            "windows that were discarded": 1,
            "preemptions whose outcome is not whole": 2 - (discarded == outcomes[0]["preemption_id"]),
            "preemptions whose cost could not be attributed": 1,
            "preemptions in which something else was executed": 1,
            "states measured under one option only": 0,
        }
    )
    assert left_out == dict(expected)


def test_a_swap_of_which_nothing_was_loaded_is_left_out() -> None:
    """Where a load failed, or the engine would not load: it was saved and computed again, which is neither option."""
    trace = make_trace(states=20)
    executed = {row["preemption_id"]: row["executed"] for row in trace.rows("decisions")}
    outcomes = trace.rows("outcomes")
    swaps = [row for row in outcomes if executed[row["preemption_id"]] == "swap"]
    swaps[0] |= {"loaded_tokens": 0, "recomputed_tokens": 40}
    swaps[1] |= {"loaded_tokens": 0, "recomputed_tokens": 1}  # all of it was found on the device
    swaps[2] |= {"loaded_tokens": 32, "recomputed_tokens": 8}
    left_out = dataset_of({"made": changed(trace, "outcomes", outcomes)}).left_out
    assert left_out["swaps of which nothing was loaded"] == 1


def test_a_state_with_one_option_left_is_no_state() -> None:
    trace = make_trace(states=12)
    name = trace.rows("decisions")[0]["state_id"]
    rows = [row for row in trace.rows("decisions") if (row["state_id"], row["arm"]) != (name, "swap")]
    data = dataset_of({"made": changed(trace, "decisions", rows)})
    assert name not in {state.name for state in data.states}
    assert (len(data.states), data.left_out["states measured under one option only"]) == (11, 1)


@pytest.mark.parametrize(
    ("table", "number", "changes", "message"),
    [
        ("outcomes", 5, {"wait_blocks_s": -1.0}, "table outcomes, row 5 of core .*: wait_blocks_s is -1 s"),
        ("outcomes", 6, {"engine_s": 1e9}, "table outcomes, row 6 of core .*: engine_s is 1e[+]09 s"),
        ("outcomes", 4, {"local_hit_tokens": -5}, "table outcomes, row 4 of core .*: local_hit_tokens is -5"),
        ("windows", 7, {"duration_s": -2.0}, "table windows, row 7 of core .*: duration_s is -2 s"),
        ("decisions", 8, {"free_blocks": -1}, "table decisions, row 8: free_blocks is -1, should be 0 or above"),
        ("decisions", 9, {"held_blocks": 0}, "table decisions, row 9: held_blocks is 0, should be above 0"),
        ("decisions", 10, {"arm": None}, "table decisions, row 10: arm is None"),
        ("decisions", 11, {"repeat": None}, "table decisions, row 11: arm is .*, repeat None"),
        ("transfers", 3, {"end_s": 1.0}, "table transfers, row 3 of core .*: duration_s is -999 s"),
    ],
)  # fmt: skip
def test_the_first_wrong_row_is_named(table: str, number: int, changes: dict[str, Any], message: str) -> None:
    trace = with_change(with_change(make_trace(states=12), table, number, **changes), table, number + 4, **changes)
    with pytest.raises(TraceError, match=message):
        dataset_of({"made": trace})


def test_a_cost_of_zero_is_refused_only_in_a_kept_window() -> None:
    """What was thrown away may hold anything that a situation may."""
    trace = make_trace(states=12)
    row = trace.rows("decisions")[4]
    windows = [
        one | {"discarded": "admitted"} if one["preemption_id"] == row["preemption_id"] else one
        for one in trace.rows("windows")
    ]
    trace = with_change(changed(trace, "windows", windows), "decisions", 4, held_blocks=0)
    assert dataset_of({"made": trace}).left_out["windows that were discarded"] == 1
    assert replace(situation(), held_blocks=0).copy_bytes == 0
