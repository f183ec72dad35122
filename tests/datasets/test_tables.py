"""Columns of a trace: records made out of them are those that the rows hold, and wrong rows are told by number."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from kvpolicy.datasets.examples import option_of, sample_states
from kvpolicy.datasets.profiles import dataset_of
from kvpolicy.datasets.tables import Situations, TransferRecord, TransferTable, key
from kvpolicy.events import KINDS, Kind, Preemption, situation_of
from kvpolicy.features import FEATURES, features_of
from kvpolicy.trace import Trace, TraceError
from tests.synthetic import changed, make_trace, situation


def anything(rng: random.Random) -> Preemption:
    held = rng.randrange(1, 200)
    return situation(
        computed_tokens=rng.randrange(1, 200_000), block_size=rng.choice((16, 64)), held_blocks=held,
        shared_blocks=rng.choice((0, 3, held, held + 5)), block_bytes=rng.randrange(1, 1 << 22),
        segment_bytes=rng.choice((0, 1, 4096, 1 << 23)), running_requests=rng.randrange(4),
        queued_save_bytes=rng.randrange(1 << 30), queued_load_bytes=rng.randrange(1 << 30),
        batch_tokens=rng.randrange(9999), free_blocks=rng.randrange(99), waiting_requests=rng.randrange(9),
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_features_by_column_are_the_features_of_each_situation(kind: Kind) -> None:
    rng = random.Random(0)
    some = [anything(rng) for _ in range(500)]
    columns = Situations.of(some).features(kind)
    assert set(columns) == set(FEATURES)
    for at, one in enumerate(some):
        x = features_of(one, option_of(kind, one.computed_tokens))
        assert {name: column[at] for name, column in columns.items()} == x._asdict()


def test_situations_and_moves_are_sequences_of_the_records_they_were_made_of() -> None:
    rng = random.Random(1)
    some = [anything(rng) for _ in range(5)]
    kept = Situations.of(some)
    assert (list(kept), kept[-1], kept[1:3], len(kept)) == (some, some[4], some[1:3], 5)
    assert [type(one.computed_tokens) for one in kept] == [int] * 5
    with pytest.raises(IndexError):
        kept[5]
    transfers = [TransferRecord("core", f"p{i}", ("save", "load")[i % 2], 100 * i, i, 0.5 * i) for i in range(6)]
    held = TransferTable.of(transfers)
    assert (list(held), held[1], held[-2:], len(held)) == (transfers, transfers[1], transfers[-2:], 6)
    assert [list(column) for column in held.columns("load")] == [[100, 300, 500], [1, 3, 5], [0.5, 1.5, 2.5]]
    wanted = [key("core", "p4"), key("core", "p1"), key("other", "p2")]
    assert list(held.of_preemptions(wanted)) == [transfers[1], transfers[4]]
    assert TransferTable.of(held) is held and Situations.of(kept) is kept
    assert list(TransferTable.of(())) == list(Situations.of(())) == []


def test_states_hold_what_the_rows_say_in_the_order_of_time() -> None:
    made = make_trace(states=20, repeats=3)
    rows = {row["preemption_id"]: row for row in made.rows("decisions")}
    costs = {row["preemption_id"]: row for row in made.rows("outcomes")}
    data = dataset_of({"made": made})
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
    natural = [situation_of(row) for row in made.rows("decisions") if row["cause"] == "memory"]
    assert list(data.natural) == natural
    assert len(data.transfers_of(data.states[:4])) == 4 * 3 * 2


def with_change(made: Trace, table: str, number: int, **changes: Any) -> Trace:
    rows = made.rows(table)
    rows[number] |= changes
    return changed(made, table, rows)


def test_a_delay_of_the_others_that_is_not_known_stays_unknown() -> None:
    made = with_change(make_trace(states=12), "outcomes", 0, others_delay_s=None)
    told = [one for state in dataset_of({"made": made}).states for some in state.samples.values() for one in some]
    assert [one.preemption_id for one in told if one.others_delay_s is None] == [
        made.rows("outcomes")[0]["preemption_id"]
    ]


def test_each_window_left_out_is_counted_under_its_first_reason() -> None:
    made = make_trace(states=20)
    windows, outcomes, decisions = made.rows("windows"), made.rows("outcomes"), made.rows("decisions")
    measured = [row for row in windows if row["preemption_id"]]
    measured[0] |= {"discarded": "something else ran"}
    outcomes[0] |= {"ended": "aborted"}
    outcomes[1] |= {"ended": "superseded", "engine_s": None}
    outcomes[2] |= {"engine_s": None}
    for row in decisions:
        if row["preemption_id"] in (outcomes[2]["preemption_id"], outcomes[3]["preemption_id"]):
            row["executed"] = "recompute" if row["arm"] == "swap" else "swap"
    for table, rows in (("windows", windows), ("outcomes", outcomes), ("decisions", decisions)):
        made = changed(made, table, rows)
    left_out = dataset_of({"made": made}).left_out
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
    made = make_trace(states=20)
    executed = {row["preemption_id"]: row["executed"] for row in made.rows("decisions")}
    outcomes = made.rows("outcomes")
    swaps = [row for row in outcomes if executed[row["preemption_id"]] == "swap"]
    swaps[0] |= {"loaded_tokens": 0, "recomputed_tokens": 40}
    swaps[1] |= {"loaded_tokens": 0, "recomputed_tokens": 1}  # all of it was found on the device
    swaps[2] |= {"loaded_tokens": 32, "recomputed_tokens": 8}
    left_out = dataset_of({"made": changed(made, "outcomes", outcomes)}).left_out
    assert left_out["swaps of which nothing was loaded"] == 1


def test_a_state_with_one_option_left_is_no_state() -> None:
    made = make_trace(states=12)
    name = made.rows("decisions")[0]["state_id"]
    rows = [row for row in made.rows("decisions") if (row["state_id"], row["arm"]) != (name, "swap")]
    data = dataset_of({"made": changed(made, "decisions", rows)})
    assert name not in {state.name for state in data.states}
    assert (len(data.states), data.left_out["states measured under one option only"]) == (11, 1)


@pytest.mark.parametrize(
    ("table", "number", "changes", "message"),
    [
        ("outcomes", 5, {"wait_blocks_s": -1.0}, "table outcomes, row 5 of core .*: wait_blocks_s is -1 s"),
        ("outcomes", 6, {"engine_s": 1e9}, "table outcomes, row 6 of core .*: engine_s is 1e[+]09 s"),
        ("windows", 7, {"duration_s": -2.0}, "table windows, row 7 of core .*: duration_s is -2 s"),
        ("decisions", 8, {"free_blocks": -1}, "table decisions, row 8: free_blocks is -1, should be 0 or above"),
        ("decisions", 9, {"held_blocks": 0}, "table decisions, row 9: held_blocks is 0, should be above 0"),
        ("decisions", 10, {"arm": None}, "table decisions, row 10: arm is None"),
        ("decisions", 11, {"repeat": None}, "table decisions, row 11: arm is .*, repeat None"),
        ("transfers", 3, {"end_s": 1.0}, "table transfers, row 3 of core .*: duration_s is -999 s"),
    ],
)  # fmt: skip
def test_the_first_row_that_cannot_be_is_named(table: str, number: int, changes: dict[str, Any], message: str) -> None:
    made = with_change(with_change(make_trace(states=12), table, number, **changes), table, number + 4, **changes)
    with pytest.raises(TraceError, match=message):
        dataset_of({"made": made})


def test_a_draw_keeps_the_ends_and_spreads_over_the_lengths() -> None:
    states = list(dataset_of({"made": make_trace(states=101, repeats=1)}).states)
    random.Random(5).shuffle(states)
    some = sample_states(states, 20, random.Random(0))
    assert len(some) == 20 and some == [state for state in states if state in some]
    every = sorted(state.computed_tokens for state in states)
    places = sorted(every.index(state.computed_tokens) for state in some)
    assert (places[0], places[-1]) == (0, 100)
    assert max(b - a for a, b in pairwise(places)) <= 12
    assert sample_states(states, 101, random.Random(0)) == states
    assert sample_states(states, 20, random.Random(1)) != some


def test_a_cost_of_nothing_is_refused_only_where_it_was_kept() -> None:
    """What was thrown away may hold anything that a situation may."""
    made = make_trace(states=12)
    row = made.rows("decisions")[4]
    windows = [
        one | {"discarded": "admitted"} if one["preemption_id"] == row["preemption_id"] else one
        for one in made.rows("windows")
    ]
    made = with_change(changed(made, "windows", windows), "decisions", 4, held_blocks=0)
    assert dataset_of({"made": made}).left_out["windows that were discarded"] == 1
    assert replace(situation(), held_blocks=0).copy_bytes == 0
