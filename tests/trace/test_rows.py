"""What the builders make is what the tables take: every column, nothing else, and each value where it belongs."""

from __future__ import annotations

import pytest

from kvpolicy.attribution.ledger import OpenPreemption, Repeated, Step
from kvpolicy.events import Decision, Option, Transfer
from kvpolicy.order import Candidate, Choice
from kvpolicy.trace import (
    Row,
    decision_row,
    displacement_row,
    from_rows,
    outcome_row,
    request_row,
    step_row,
    transfer_row,
    window_row,
)
from kvpolicy.trace.schemas import SCHEMAS
from tests.order.made import progress
from tests.trace.test_table import OUTCOME, SITUATION

DECISION = Decision((Option("recompute"),), (1.0,), 0, (), "always-recompute", "{}", executed="recompute")


def a_step() -> Step[OpenPreemption]:
    step: Step[OpenPreemption] = Step(4, lost=["p0", "p1"], saves=1, loads=2)
    step.compose([1, 5], [10, 12])
    step.running_requests, step.waiting_requests, step.used_blocks = 7, 8, 9
    step.repeated.append(Repeated(OpenPreemption("p0", "r", "recompute", 12, 0.0, 1), 5, -1, -12, 50, 1, 7))
    return step


ROWS: dict[str, Row] = {
    "decisions": decision_row(
        SITUATION,
        DECISION,
        preemption_id="p0",
        decision_id="p0-0",
        request="r",
        generation=0,
        step=1,
        overflow_id="o",
        state_id="s",
    ),
    "outcomes": outcome_row(OUTCOME),
    "steps": step_row(a_step(), 10.0, 10.5),
    "transfers": transfer_row(
        Transfer(3, "load", False, 100, 2, 50, True, 40, 1.0, 2.0, 3.0, "lost"), preemption_id="p0", step=4, tier="host"
    ),
    "requests": request_row(
        request="r",
        arrival_s=0.5,
        first_token_s=None,
        last_token_s=2.0,
        prompt_tokens=10,
        output_tokens=11,
        preemptions=1,
        recomputed_tokens=12,
        loaded_tokens=13,
        finish="abort",
        class_name="urgent",
        priority=-1,
        ttft_deadline_s=0.5,
        tpot_deadline_s=None,
    ),
    "displacements": displacement_row(
        Choice(
            progress(7, rank=(0.0,), prompt_tokens=20),
            (
                Candidate(progress(3, rank=(2.0, 1.0), output_tokens=9, computed_tokens=40), 3, 0.25),
                Candidate(progress(4, rank=(2.0, 0.0), output_tokens=5, computed_tokens=30), 2, None),
            ),
            taken=1,
            left_out=5,
            need_blocks=4,
            free_blocks=1,
            need_places=1,
            free_places=2,
            probability=0.5,
        ),
        displacement_id="c-1",
        step=4,
        time_s=2.5,
        order="mlfq",
        name_of=lambda number: f"r{number}",
    ),
    "windows": window_row(
        state_id="s",
        arm="swap",
        repeat=2,
        cause="memory",
        first_step=3,
        last_step=4,
        duration_s=0.25,
        preemption_id=None,
        discarded="",
    ),
}


@pytest.mark.parametrize("table", sorted(SCHEMAS))
def test_a_row_has_its_tables_columns(table: str) -> None:
    sampled = {"weight", "left_out"} if table == "steps" else set()  # where steps are sampled
    assert set(ROWS[table]) == set(SCHEMAS[table].names) - sampled
    assert from_rows(table, [ROWS[table]]).to_pylist() == [ROWS[table]]


def test_a_step_says_what_it_was_made_of_and_what_is_computed_again() -> None:
    row = ROWS["steps"]
    assert (row["step"], row["start_s"], row["duration_s"]) == (4, 10.0, 0.5)
    assert (row["scheduled_tokens"], row["scheduled_requests"], row["decode_requests"]) == (6, 2, 1)
    assert (row["kv_read_tokens"], row["chunk_context"]) == (10, 8 + 9 + 10 + 11 + 12)
    assert (row["running_requests"], row["waiting_requests"], row["used_blocks"]) == (7, 8, 9)
    assert (row["preemptions"], row["saves"], row["loads"], row["recomputed_tokens"]) == (2, 1, 2, 5)
    again = {"preemption_id": "p0", "tokens": 5, "kv_read_tokens": -12, "chunk_context": 50, "decodes": -1}
    assert row["repeated"] == [again]


def test_a_transfer_is_named_by_its_copy() -> None:
    row = ROWS["transfers"]
    assert (row["generation"], row["step"], row["tier"], row["ok"]) == (3, 4, "host", False)
    assert (row["bytes"], row["segments"], row["segment_bytes"], row["queued_bytes"]) == (100, 2, 50, 40)


def test_a_displacement_names_whom_it_considered_in_the_order_in_which_they_would_be_taken() -> None:
    row = ROWS["displacements"]
    assert (row["request"], row["rank"], row["prompt_tokens"], row["taken"], row["left_out"]) == ("r7", [0.0], 20, 1, 5)
    assert [(one["request"], one["rank"], one["price_s"]) for one in row["candidates"]] == [
        ("r3", [2.0, 1.0], 0.25), ("r4", [2.0, 0.0], None),
    ]  # fmt: skip


def test_a_decision_outside_a_profile_has_no_state() -> None:
    row = decision_row(
        SITUATION, DECISION, preemption_id="p", decision_id="p-0", request="r", generation=0, step=1, overflow_id="o"
    )
    assert (row["state_id"], row["arm"], row["repeat"]) == (None, None, None)
    assert row["options"] == [{"kind": "recompute", "load_tokens": 0, "tier": "", "synchronous": False}]
