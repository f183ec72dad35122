"""A part of a cost is no cost: preemptions that lack a step or a copy have none, and those that lack nothing do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest

from kvpolicy import trace as traces
from kvpolicy.attribution.offline import attribute
from kvpolicy.events import Decision, Option
from kvpolicy.trace import Trace
from tests.attribution.test_offline import (
    Row,
    calm_steps,
    costs,
    one_after_another,
    outcome,
    repeated,
    step,
    trace_of_cores,
    transfer,
)
from tests.synthetic import situation

SHIPPED = sorted(path.parent for path in Path(__file__).resolve().parents[2].glob("traces/*/*/header.json"))
BEFORE, AFTER = 300, 20


def recomputed(idle_before: int | None = None, idle_s: float = 0.0) -> list[Row]:
    """Preempted in step 300, computed again in 303, back with it; before step ``idle_before`` the engine is idle."""
    calm = calm_steps(BEFORE, np.random.default_rng(5))
    preempting = step(BEFORE, 0, (3, 3, 600, 0), preemptions=1)
    waiting = [step(BEFORE + 1 + i, 0, (3, 3, 603, 0)) for i in range(2)]
    again = step(
        BEFORE + 3, 0, (104, 3, 600, 0), recomputed_tokens=100, scheduled_requests=4,
        repeated=[repeated("p", 100, -101, 0, -1)],
    )  # fmt: skip
    after = [step(BEFORE + 4 + i, 0, (4, 4, 1000, 0)) for i in range(AFTER)]
    rows = one_after_another([*calm, preempting, waiting[0], waiting[1], again, *after], 100.0)
    for row in rows:
        if idle_before is not None and row["step"] >= idle_before:
            row["start_s"] += idle_s
            row["step"] += 1  # an idle step is numbered and not recorded
    return rows


def request(name: str, arrival_s: float, last_token_s: float) -> Row:
    return {
        "request": name, "arrival_s": arrival_s, "first_token_s": last_token_s, "last_token_s": last_token_s,
        "prompt_tokens": 100, "output_tokens": 1, "preemptions": 0, "recomputed_tokens": 0, "loaded_tokens": 0,
        "finish": "FINISHED_STOPPED",
    }  # fmt: skip


def decision(preemption_id: str, name: str, executed: Any = "recompute", **of_situation: Any) -> Row:
    options = (Option("recompute"), Option("swap", 500, "host"))
    chosen = Decision(options, (0.5, 0.5), int(executed == "swap"), (), "pinned", "{}", executed)
    return traces.decision_row(
        situation(**of_situation), chosen, preemption_id=preemption_id, decision_id=f"{preemption_id}-0", request=name,
        generation=0, step=BEFORE, overflow_id="o",
    )  # fmt: skip


def cost_of(rows: list[Row], **more: list[Row]) -> float | None:
    end = outcome("p", recomputed_tokens=100, first_step=BEFORE, last_step=BEFORE + 3)
    tables = {name: table for name, table in more.items() if table}
    part: float | None = costs(attribute(trace_of_cores({"a": {"steps": rows, "outcomes": [end], **tables}})))["p"][0]
    return part


@pytest.mark.parametrize("lost", range(BEFORE, BEFORE + 6))
def test_a_lost_step_leaves_no_cost_wherever_it_was(lost: int) -> None:
    """Steps of the victim's time, and the two that find the caches cold."""
    rows = recomputed()
    assert cost_of(rows) is not None
    assert cost_of([row for row in rows if row["step"] != lost]) is None


@pytest.mark.parametrize("lost", [BEFORE - 1, BEFORE + 6, BEFORE + 7])
def test_a_lost_step_outside_changes_no_cost(lost: int) -> None:
    assert cost_of([row for row in recomputed() if row["step"] != lost]) is not None


def test_a_number_without_time_is_an_idle_step_and_no_loss() -> None:
    """A tool took everybody out after the victim was back: no step was done in between."""
    assert cost_of(recomputed(idle_before=BEFORE + 4)) is not None
    assert cost_of(recomputed(idle_before=BEFORE + 5)) is not None


def test_an_idle_gap_is_no_loss_only_after_the_victim_was_the_last_request() -> None:
    rows = recomputed(idle_before=BEFORE + 4, idle_s=0.5)
    back_s = rows[BEFORE + 3]["start_s"] + rows[BEFORE + 3]["duration_s"]
    resumed_s = rows[BEFORE + 4]["start_s"] + rows[BEFORE + 4]["duration_s"]
    victim, decided = request("v", 100.0, back_s), [decision("p", "v")]
    later = request("w", back_s + 0.4, resumed_s)
    assert cost_of(rows, decisions=decided, requests=[victim, later]) is not None
    # Without its record the victim may have gone on, in steps that are lost.
    assert cost_of(rows, decisions=decided, requests=[later]) is None
    assert cost_of(rows, decisions=decided, requests=[victim | {"last_token_s": back_s + 0.1}, later]) is None
    assert cost_of(rows, decisions=decided, requests=[victim | {"last_token_s": resumed_s}, later]) is None
    # Others were served while nothing is recorded, or before and after it.
    inside = request("x", back_s + 0.1, back_s + 0.3)
    assert cost_of(rows, decisions=decided, requests=[victim, later, inside]) is None
    across = request("y", 100.0, resumed_s)
    assert cost_of(rows, decisions=decided, requests=[victim, later, across]) is None
    silent = request("z", 100.0, 0.0) | {"first_token_s": None, "last_token_s": None}
    assert cost_of(rows, decisions=decided, requests=[victim, later, silent]) is not None


def test_inside_a_preemption_no_hole_is_idle() -> None:
    """The victim itself was there: without time in between the number still lacks."""
    assert cost_of(recomputed(idle_before=BEFORE + 2)) is None


def test_steps_lost_at_the_end_show_in_later_tokens() -> None:
    rows = [row for row in recomputed() if row["step"] <= BEFORE + 3]
    end_s = rows[-1]["start_s"] + rows[-1]["duration_s"]
    assert cost_of(rows) is not None
    assert cost_of(rows, requests=[request("v", 100.0, end_s)]) is not None
    assert cost_of(rows, requests=[request("v", 100.0, end_s + 0.1)]) is None


def test_a_swap_without_its_save_has_no_cost() -> None:
    rows = recomputed()
    for row in rows:
        row["repeated"] = []
    at_s = rows[BEFORE]["start_s"]
    saved, loaded = transfer("p", BEFORE, "save", at_s, at_s + 1e-3), transfer("p", 302, "load", at_s, at_s + 1e-3)
    end = outcome("p", first_step=BEFORE, last_step=BEFORE + 3)
    swapped = [decision("p", "v", "swap")]

    def cost_with(end: Row, decisions: list[Row], transfers: list[Row]) -> float | None:
        tables = {"steps": rows, "outcomes": [end], "transfers": transfers, "decisions": decisions}
        cost: float | None = costs(attribute(trace_of_cores({"a": {n: some for n, some in tables.items() if some}})))[
            "p"
        ][0]
        return cost

    assert cost_with(end, swapped, [saved]) is not None
    assert cost_with(end, swapped, []) is None
    assert cost_with(end, [decision("p", "v")], []) is not None
    assert cost_with(end | {"loaded_tokens": 64}, [], [saved, loaded]) is not None
    assert cost_with(end | {"loaded_tokens": 64}, [], [loaded]) is None
    # Of one table, hashed blocks may all have stayed on the device; those of several are saved at once.
    all_hashed = {"held_blocks": 16, "hashed_blocks": 16}
    assert cost_with(end, [decision("p", "v", "swap", **all_hashed)], []) is not None
    of_tables = decision("p", "v", "swap", **all_hashed, hashed_tokens=256, hit_tokens=0.0)
    assert cost_with(end, [of_tables], []) is None
    assert cost_with(end, [of_tables], [saved]) is not None


def test_stored_costs_stay_and_only_empty_ones_are_filled() -> None:
    rows = recomputed()
    ends = [
        outcome("p", recomputed_tokens=100, first_step=BEFORE, last_step=BEFORE + 3),
        outcome("q", first_step=BEFORE, last_step=BEFORE, engine_s=0.125, others_delay_s=0.5),
    ]
    costs_by_id = costs(attribute(trace_of_cores({"a": {"steps": rows, "outcomes": ends}})))
    assert costs_by_id["q"] == (0.125, 0.5)
    assert costs_by_id["p"][0] is not None


@pytest.mark.skipif(not SHIPPED, reason="no trace ships yet")
@pytest.mark.parametrize("core", SHIPPED, ids=lambda core: f"{core.parent.name}-{core.name}")
def test_a_shipped_trace_is_complete_until_a_row_is_removed(core: Path) -> None:
    read = traces.read(core.parent)
    ours = read.table("outcomes").filter(pc.equal(read.table("outcomes")["core"], core.name)).to_pylist()
    assert attribute(read).table("outcomes")["engine_s"].null_count == 0
    victim = ours[len(ours) // 2]
    for number in (victim["first_step"], victim["last_step"], victim["last_step"] + 1, victim["last_step"] + 2):
        steps = read.table("steps")
        gone = pc.and_(pc.equal(steps["core"], core.name), pc.equal(steps["step"], number))
        without = Trace(read.headers, dict(read.tables) | {"steps": steps.filter(pc.invert(gone))})
        lacking = [name for name, cost in costs(attribute(without)).items() if cost[0] is None]
        assert victim["preemption_id"] in lacking
        assert len(lacking) < 4
    transfers = read.table("transfers")
    saves = transfers.filter(pc.and_(pc.equal(transfers["core"], core.name), pc.equal(transfers["direction"], "save")))
    saved = saves["preemption_id"][0].as_py()
    result = pc.invert(pc.and_(pc.equal(transfers["preemption_id"], saved), pc.equal(transfers["direction"], "save")))
    without = Trace(read.headers, dict(read.tables) | {"transfers": transfers.filter(result)})
    assert [name for name, cost in costs(attribute(without)).items() if cost[0] is None] == [saved]
