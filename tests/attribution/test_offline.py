"""The definition of overhead: worked by hand, against known laws, and on traces that are not whole."""

from __future__ import annotations

import numpy as np
import pytest

from kvpolicy.attribution.offline import attribute, step_time_models
from kvpolicy.trace import TraceError
from tests.attribution.step_rows import (
    TOKEN_S,
    Row,
    calm_steps,
    costs,
    law,
    one_after_another,
    outcome,
    repeated,
    step,
    trace_of_cores,
    transfer,
)


def test_a_recompute_costs_what_its_repeated_tokens_add() -> None:
    """400 tokens again with one new one, beside 3 decodes: what is left is a step of 4 decodes."""
    calm = calm_steps(300, np.random.default_rng(5))
    pairs = 401 * 402 // 2
    preempting = step(300, 0, (3, 3, 600, 0), preemptions=1)
    again = step(
        301, 0, (404, 3, 600, pairs), recomputed_tokens=400, scheduled_requests=4,
        repeated=[repeated("p", 400, -401, pairs, -1)],
    )  # fmt: skip
    rows = one_after_another([*calm, preempting, again], 100.0)
    costs_by_id = costs(
        attribute(trace_of_cores({"a": {"steps": rows, "outcomes": [outcome("p", recomputed_tokens=400)]}}))
    )
    expected = law(404, 3, 600, pairs) - law(4, 4, 1001, 0)
    assert costs_by_id["p"][0] == pytest.approx(expected, rel=1e-6)
    assert costs_by_id["p"][1] == pytest.approx(3 * expected, rel=1e-6)  # three others sat through it


def test_a_swap_costs_the_time_its_copies_add_and_an_overlapped_load_the_slowdown() -> None:
    calm = calm_steps(300, np.random.default_rng(6))
    saving = step(300, 0, (2, 2, 500, 0), extra_s=4e-3, preemptions=1, saves=1)
    loading = step(301, 0, (2, 2, 502, 0), extra_s=5e-4, loads=1)
    still = step(302, 0, (2, 2, 504, 0), extra_s=2e-4)
    after = step(303, 0, (3, 3, 900, 0))
    rows = one_after_another([*calm, saving, loading, still, after], 100.0)
    at = saving["start_s"]
    moves = [
        transfer("p", 300, "save", at, at + 4e-3),
        transfer("p", 301, "load", loading["start_s"] + 1e-4, still["start_s"] + 1e-4),
    ]
    trace = trace_of_cores({"a": {"steps": rows, "transfers": moves, "outcomes": [outcome("p", loaded_tokens=400)]}})
    assert costs(attribute(trace))["p"] == (pytest.approx(4.7e-3, rel=1e-5), pytest.approx(2 * 4.7e-3, rel=1e-5))


def test_waiting_for_a_load_with_nothing_to_compute_is_all_extra() -> None:
    calm = calm_steps(300, np.random.default_rng(7))
    saving = step(300, 0, (0, 0, 0, 0), extra_s=1e-3, preemptions=1, saves=1)
    polls = [step(301 + i, 0, (0, 0, 0, 0), extra_s=1e-3) for i in range(3)]
    rows = one_after_another([*calm, saving, *polls], 100.0)
    at = saving["start_s"]
    moves = [transfer("p", 300, "save", at, at + 9e-4), transfer("p", 301, "load", at + 1.1e-3, at + 3.5e-3)]
    costs_by_id = costs(
        attribute(
            trace_of_cores({"a": {"steps": rows, "transfers": moves, "outcomes": [outcome("p", loaded_tokens=9)]}})
        )
    )
    assert costs_by_id["p"] == (pytest.approx(4e-3), 0.0)


def test_a_shared_step_is_split_by_what_each_did_in_it() -> None:
    """In one step p recomputes 100 tokens (d0's price 3 ms) and a save of q takes 1 ms: 3 to 1."""
    calm = calm_steps(300, np.random.default_rng(8))
    shared = step(
        300, 0, (103, 3, 600, 0), extra_s=1e-3, preemptions=1, saves=1, recomputed_tokens=100, scheduled_requests=4,
        repeated=[repeated("p", 100, 0, 0, 0)],
    )  # fmt: skip
    rows = one_after_another([*calm, shared], 100.0)
    moves = [transfer("q", 300, "save", shared["start_s"], shared["start_s"] + 1e-3)]
    ends = [outcome("p", recomputed_tokens=100), outcome("q")]
    costs_by_id = costs(attribute(trace_of_cores({"a": {"steps": rows, "transfers": moves, "outcomes": ends}})))
    extra = 100 * TOKEN_S + 1e-3
    assert costs_by_id["p"] == (pytest.approx(0.75 * extra, rel=1e-5), pytest.approx(3 * 0.75 * extra, rel=1e-5))
    assert costs_by_id["q"] == (pytest.approx(0.25 * extra, rel=1e-5), pytest.approx(4 * 0.25 * extra, rel=1e-5))


def test_shares_of_many_preemptions_add_up_to_what_the_steps_took_too_long() -> None:
    rng = np.random.default_rng(9)
    rows, extra = calm_steps(400, rng), 0.0
    moves: list[Row] = []
    ends: dict[str, int] = {}
    for number in range(400, 460):
        ids = [f"p{number % 7}", f"p{number % 3}"]
        added = float(rng.random() * 1e-2)
        row = step(number, 0, (204, 4, 800, 0), extra_s=added, recomputed_tokens=200)
        row["repeated"] = [repeated(ids[0], 150, 0, 0, 0), repeated(ids[1] + "-other", 50, 0, 0, 0)]
        extra += added + 200 * TOKEN_S
        for part in row["repeated"]:
            name = part["preemption_id"]
            ends[name] = ends.get(name, 0) + part["tokens"]
        rows.append(row)
    rows = one_after_another(rows, 100.0)
    for row in rows[400::5]:
        moves.append(transfer("p0", 300, "save", row["start_s"], row["start_s"] + 1e-4))
    closed = [outcome(name, recomputed_tokens=tokens) for name, tokens in ends.items()]
    costs_by_id = costs(attribute(trace_of_cores({"a": {"steps": rows, "transfers": moves, "outcomes": closed}})))
    assert sum(cost for cost, _ in costs_by_id.values() if cost is not None) == pytest.approx(extra, rel=1e-6)


def test_a_slow_stretch_of_the_machine_is_charged_to_no_preemption() -> None:
    """Everything takes 1.5 times as long for a while; in the middle of it a save takes 4 ms."""
    rows = calm_steps(400, np.random.default_rng(20))
    rows[250] = step(250, 0, (2, 2, 500, 0), preemptions=1, saves=1)
    for row in rows[200:300]:
        row["duration_s"] *= 1.5
    rows[250]["duration_s"] += 4e-3
    rows = one_after_another(rows, 100.0)
    at = rows[250]["start_s"]
    moves = [transfer("p", 250, "save", at, at + 4e-3)]
    costs_by_id = costs(
        attribute(
            trace_of_cores({"a": {"steps": rows, "transfers": moves, "outcomes": [outcome("p", first_step=250)]}})
        )
    )
    assert costs_by_id["p"][0] == pytest.approx(4e-3, rel=0.02)


def test_a_save_reported_late_belongs_to_the_step_of_its_preemption() -> None:
    calm = calm_steps(300, np.random.default_rng(21))
    saving = step(300, 0, (2, 2, 500, 0), extra_s=4e-3, preemptions=1, saves=1)
    rows = one_after_another([*calm, saving, step(301, 0, (2, 2, 502, 0))], 100.0)
    at = saving["start_s"]
    moves = [transfer("p", 301, "save", at, at + 4e-3)]
    costs_by_id = costs(
        attribute(trace_of_cores({"a": {"steps": rows, "transfers": moves, "outcomes": [outcome("p")]}}))
    )
    assert costs_by_id["p"][0] == pytest.approx(4e-3, rel=1e-5)


def test_a_preemption_with_missing_records_gets_no_cost() -> None:
    calm = calm_steps(300, np.random.default_rng(11))
    again = step(300, 0, (53, 3, 600, 0), recomputed_tokens=50, repeated=[repeated("p", 50, 0, 0, 0)])
    rows = one_after_another([*calm, again], 100.0)
    ends = [
        outcome("p", recomputed_tokens=80),  # 30 of them in a step that was dropped
        outcome("q", loaded_tokens=64),  # no transfer
        outcome("r", first_step=999),  # it was preempted in a step that is not there
        outcome("s", first_step=200),  # nothing lost, nothing copied: it cost nothing
    ]
    moves = [transfer("r", 300, "save", 1.0, 1.1)]
    costs_by_id = costs(attribute(trace_of_cores({"a": {"steps": rows, "transfers": moves, "outcomes": ends}})))
    assert costs_by_id["p"] == costs_by_id["q"] == costs_by_id["r"] == (None, None)
    assert costs_by_id["s"] == (pytest.approx(0.0, abs=1e-9), pytest.approx(0.0, abs=1e-9))


def test_steps_that_contradict_themselves_are_refused_by_row() -> None:
    rows = calm_steps(100, np.random.default_rng(13))
    rows[7]["duration_s"] = -1e-3
    with pytest.raises(TraceError, match=r"steps of core a, row 7: duration_s is -0.001"):
        step_time_models(trace_of_cores({"a": {"steps": rows}}))
    again = step(100, 0, (20, 3, 600, 0), repeated=[repeated("p", 50, 0, 0, 0)], recomputed_tokens=50)
    rows = one_after_another([*calm_steps(100, np.random.default_rng(13)), again], 100.0)
    with pytest.raises(TraceError, match=r"row 100 \(step 100\): repeated holds more tokens"):
        attribute(trace_of_cores({"a": {"steps": rows, "outcomes": [outcome("p")]}}))
    with pytest.raises(TraceError, match="5 undisturbed steps on core a, at least 20"):
        step_time_models(trace_of_cores({"a": {"steps": rows[:5]}}))


def test_a_trace_without_steps_or_outcomes_is_left_as_it_is() -> None:
    assert attribute(trace_of_cores({})).tables == {}
    rows = calm_steps(100, np.random.default_rng(14))
    assert attribute(trace_of_cores({"a": {"steps": rows}})).table("outcomes").num_rows == 0
    assert costs(attribute(trace_of_cores({"a": {"outcomes": [outcome("p")]}})))["p"] == (None, None)
