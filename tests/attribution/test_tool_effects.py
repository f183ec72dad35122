"""Copies of a measuring tool slow steps down, and no preemption is charged with that."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvpolicy.attribution.offline import attribute, common_step_time
from kvpolicy.attribution.tool_effects import MIN_STEPS, effects, seconds_of
from kvpolicy.events import TOOL_COPY
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

BEGUN_S = 3e-3
"""What beginning the tool's copy adds to a step."""
SLOWDOWN = 0.25
"""Seconds that a second of the copy beside steps adds to them."""
PAIRS = 401 * 402 // 2


def batch(number: int, extra_s: float = 0.0, **more: Any) -> Row:
    return step(number, 0, (3, 3, 600, 0), extra_s=extra_s, **more)


class Made:
    """A trace of windows in which a tool's copy begins with the first step and runs beside the next few."""

    def __init__(self, windows: int, direction: str = "save") -> None:
        self.rows = calm_steps(300, np.random.default_rng(3))
        self.moves: list[Row] = []
        self.ends: list[Row] = []
        self._begun: list[tuple[Row, int]] = []
        self._direction = direction
        for number in range(windows):
            self.window([batch(0, BEGUN_S), *(batch(0) for _ in range(7))], number % 5)

    def window(self, rows: list[Row], beside: int = 2) -> None:
        for row in rows[1 : 1 + beside]:
            row["duration_s"] *= 1 / (1 - SLOWDOWN)
        rows[0][f"{self._direction}s"] += 1
        self._begun.append((rows[0], beside))
        self.rows += rows

    def trace(self) -> Any:
        for number, row in enumerate(self.rows):
            row["step"] = number
        one_after_another(self.rows, 100.0)
        self.moves += [self._copy(number, *begun) for number, begun in enumerate(self._begun)]
        return trace_of_cores({"a": {"steps": self.rows, "transfers": self.moves, "outcomes": self.ends}})

    def _copy(self, number: int, row: Row, beside: int) -> Row:
        begin_s = row["start_s"] + row["duration_s"]
        end_s = begin_s + sum(self.rows[row["step"] + 1 + after]["duration_s"] for after in range(beside))
        made = transfer(TOOL_COPY, row["step"], self._direction, begin_s, end_s - 1e-9 * (beside > 0))
        return made | {"generation": number, "submit_s": row["start_s"] + 1e-4}


def recompute(made: Made) -> None:
    """A window in which a victim is preempted and recomputed in the next step."""
    at = len(made.rows)
    again = step(
        0, 0, (404, 3, 600, PAIRS), recomputed_tokens=400, scheduled_requests=4,
        repeated=[repeated("p", 400, -401, PAIRS, -1)],
    )  # fmt: skip
    made.ends.append(outcome("p", recomputed_tokens=400, first_step=at, last_step=at + 1))
    made.window([batch(0, BEGUN_S, preemptions=1), again, batch(0), batch(0), batch(0), batch(0)])


@pytest.mark.parametrize("direction", ["save", "load"])
def test_a_recompute_beside_a_tools_copy_costs_what_it_costs_alone(direction: str) -> None:
    made = Made(20, direction)
    recompute(made)
    cost_s, _ = costs(attribute(made.trace()))["p"]
    assert cost_s == pytest.approx(law(404, 3, 600, PAIRS) - law(4, 4, 1001, 0), rel=0.02)


def test_as_another_preemptions_the_copy_would_take_a_part_of_it() -> None:
    made = Made(20)
    recompute(made)
    trace = made.trace()
    for row in made.moves:
        row["preemption_id"] = "another"
    other = trace_of_cores({"a": {"steps": made.rows, "transfers": made.moves, "outcomes": made.ends}})
    assert costs(attribute(other))["p"][0] < 0.8 * costs(attribute(trace))["p"][0]


def test_a_save_of_the_victim_beside_a_tools_copy_costs_what_it_adds() -> None:
    made = Made(20)
    at = len(made.rows)
    made.window([batch(0, BEGUN_S + 4e-3, preemptions=1), batch(0), batch(0), batch(0), batch(0), batch(0)])
    made.ends.append(outcome("p", first_step=at, last_step=at))
    trace = made.trace()
    begun_s = made.rows[at]["start_s"]
    made.moves.append(transfer("p", at, "save", begun_s, begun_s + 4e-3))
    trace = trace_of_cores({"a": {"steps": made.rows, "transfers": made.moves, "outcomes": made.ends}})
    assert costs(attribute(trace))["p"][0] == pytest.approx(4e-3, rel=0.02)


def test_a_step_beside_a_tools_copy_is_no_undisturbed_one() -> None:
    with_copies = common_step_time([Made(20).trace()])
    assert with_copies is not None
    assert with_copies.error.mean_relative < 1e-6 and with_copies.per_part_s[0] == pytest.approx(TOKEN_S)


def test_where_too_few_steps_show_what_a_tools_copies_take_a_preemption_beside_one_has_no_cost() -> None:
    made = Made((MIN_STEPS - 1) // 3)
    recompute(made)
    assert costs(attribute(made.trace()))["p"] == (None, None)


def test_a_few_disturbed_steps_do_not_count_as_the_copies_doing() -> None:
    """One step in twenty takes three times as long, for reasons of the machine."""
    made, rng = Made(40), np.random.default_rng(0)
    for row in made.rows[300:]:
        row["duration_s"] *= 3 if rng.random() < 0.05 else 1
    recompute(made)
    cost_s, _ = costs(attribute(made.trace()))["p"]
    assert cost_s == pytest.approx(law(404, 3, 600, PAIRS) - law(4, 4, 1001, 0), rel=0.05)


def test_an_idle_step_is_not_slowed_by_a_copy_that_runs_beside_it() -> None:
    """A victim alone waits for its load: all of that wait is the swap's, also behind a tool's copy."""
    made = Made(20)
    at = len(made.rows)
    idle = [step(0, 0, (0, 0, 0, 0), extra_s=5e-3) for _ in range(3)]
    made.window([batch(0, BEGUN_S, preemptions=1), *idle, batch(0), batch(0)], 3)
    for row in idle:
        row["duration_s"] = 5e-3
    made.ends.append(outcome("p", loaded_tokens=400, first_step=at, last_step=at + 3))
    trace = made.trace()
    moves = [
        transfer("p", at, "save", made.rows[at]["start_s"], made.rows[at]["start_s"] + 1e-5),
        transfer("p", at, "load", made.rows[at + 1]["start_s"] + 1e-9, made.rows[at + 4]["start_s"] - 1e-9),
    ]
    trace = trace_of_cores({"a": {"steps": made.rows, "transfers": [*made.moves, *moves], "outcomes": made.ends}})
    assert costs(attribute(trace))["p"][0] == pytest.approx(15e-3, rel=0.02)


@pytest.mark.parametrize("begun", [False, True])
def test_an_idle_step_in_which_a_tools_copy_begins_makes_no_recompute_cheaper(begun: bool) -> None:
    """The victim is alone: the step that preempts it takes 0.2 ms, less than beginning a copy adds to a busy one."""
    made = Made(20)
    at = len(made.rows)
    idle = step(0, 0, (0, 0, 0, 0), extra_s=2e-4, preemptions=1)
    again = step(
        0, 0, (401, 0, 0, PAIRS), recomputed_tokens=400, scheduled_requests=1,
        repeated=[repeated("p", 400, 0, PAIRS, 0)],
    )  # fmt: skip
    made.ends.append(outcome("p", recomputed_tokens=400, first_step=at, last_step=at + 1))
    rows = [idle, again, batch(0), batch(0), batch(0)]
    if begun:
        made.window(rows, 0)
    else:
        made.rows += rows
    cost_s, _ = costs(attribute(made.trace()))["p"]
    assert cost_s == pytest.approx(law(401, 0, 0, PAIRS) - law(1, 0, 0, 0) + 2e-4, rel=0.02)


def test_what_a_copy_does_in_each_step() -> None:
    """A save of 100 bytes begins in step 1 and runs until the middle of step 3, a load of 30 bytes begins in step 2 and
    runs until the middle of step 5; step 4 computes nothing."""
    start_s = np.arange(7.0)
    tokens = np.array([3, 3, 3, 3, 0, 3, 3])
    copies = {
        "bytes": np.array([100.0, 30.0]),
        "submit_s": np.array([1.2, 2.2]),
        "start_s": np.array([1.5, 3.5]),
        "end_s": np.array([3.5, 5.5]),
    }
    save_begun, save_beside, load_begun, load_beside, aftermath = effects(
        start_s, start_s + 1.0, tokens, copies, np.array([True, False])
    ).T.tolist()
    assert save_begun == [0, 100, 0, 0, 0, 0, 0] and load_begun == [0, 0, 30, 0, 0, 0, 0]
    assert save_beside == [0, 0, 1, 0.5, 0, 0, 0] and load_beside == [0, 0, 0, 0.5, 0, 0.5, 0]
    assert aftermath == [0, 0, 100, 130, 0, 0, 0]


def test_an_effect_that_cannot_be_told_from_none_counts_as_none() -> None:
    """Noise alone would show an effect in half of all cases. What is far above it counts."""
    rng = np.random.default_rng(0)
    columns = np.zeros((400, 5))
    columns[:200, 1], columns[200:300, 0] = rng.uniform(0, 1, 200), 1e6
    rows, found = np.arange(400), 0
    for _ in range(40):
        noise_s = rng.normal(0, 1e-3, 400)
        found += int(seconds_of(columns, noise_s, rows).any())
        there_s = seconds_of(columns, noise_s + 2e-9 * columns[:, 0] + 3e-3 * columns[:, 1], rows)
        assert there_s[250] == pytest.approx(2e-3, rel=0.3)
        assert there_s[:200].sum() == pytest.approx(3e-3 * columns[:, 1].sum(), rel=0.2)
    assert found <= 5
