"""Live attribution against the offline definition, and what it promises by itself."""

from __future__ import annotations

from collections import defaultdict
from statistics import fmean, median
from typing import Any

import pytest

from kvpolicy import trace as traces
from kvpolicy.attribution.offline import REPEATED_PARTS, attribute, common_step_time
from kvpolicy.attribution.step_time import PARTS, StepTimeModel
from kvpolicy.attribution.streaming import MAX_WAITING, LiveCost, LiveCosts, Parts
from kvpolicy.trace import Trace
from tests.attribution.live_engine import MODEL

ROOT = __file__.rsplit("/tests/", 1)[0]


def law(tokens: float, decodes: float, reads: float, pairs: float) -> float:
    return 2e-3 + 3e-5 * tokens + 1e-4 * decodes + 1e-7 * reads + 2e-9 * pairs


class Engine:
    """A clock and a row of steps, as a server would tell them."""

    def __init__(self, model: StepTimeModel = MODEL) -> None:
        self.live, self.now_s = LiveCosts(model), 100.0

    def step(
        self, parts: Parts = (4, 4, 800, 0), extra_s: float = 0.0, preempted: tuple[str, ...] = (),
        repeated: tuple[tuple[str, Parts], ...] = (), requests: int = 4,
    ) -> tuple[LiveCost, ...]:  # fmt: skip
        start = self.now_s
        self.now_s += (law(*parts) if parts[0] else 0.0) + extra_s
        return self.live.step(parts, requests, start, self.now_s, preempted, repeated)

    def calm(self, count: int = 20) -> None:
        for _ in range(count):
            assert self.step() == ()

    def until_told(self, most: int = 10) -> tuple[LiveCost, ...]:
        for _ in range(most):
            result = self.step()
            if result:
                return result
        return ()


def test_a_recompute_worked_by_hand_aftermath_included() -> None:
    """400 tokens again with one new one beside 3 decodes: what is left is 4 decodes; two cold steps follow."""
    engine = Engine()
    engine.calm()
    engine.step((3, 3, 600, 0), preempted=("p",), requests=3)
    engine.live.closed("p", "recompute", "resumed")
    pairs = 401 * 402 // 2
    assert engine.step((404, 3, 600, pairs), repeated=(("p", (400, -1, -401, pairs)),)) == ()
    assert engine.step(extra_s=1e-3) == ()
    (cost,) = engine.step(extra_s=4e-4)
    expected = law(404, 3, 600, pairs) - law(4, 4, 1001, 0) + 1e-3 + 4e-4
    assert (cost.preemption_id, cost.executed, cost.ended) == ("p", "recompute", "resumed")
    assert cost.engine_s == pytest.approx(expected, rel=1e-6)
    assert cost.others_delay_s == pytest.approx(3 * expected, rel=1e-6)


def test_a_swap_is_charged_for_its_copies_even_if_they_are_reported_late() -> None:
    engine = Engine()
    engine.calm()
    engine.live.copy_begins(1, "p")
    at = engine.now_s
    engine.step((2, 2, 500, 0), 4e-3, preempted=("p",), requests=2)
    engine.live.copy_ends(1, "p", at, at + 4e-3)
    engine.live.copy_begins(2, "p")
    began = engine.now_s
    for extra_s in (5e-4, 2e-4):
        assert engine.step((2, 2, 502, 0), extra_s, requests=2) == ()
    engine.live.copy_ends(2, "p", began + 1e-4, engine.now_s - 1e-4)
    engine.live.closed("p", "swap", "resumed")
    assert engine.step((3, 3, 900, 0), requests=3) == ()
    (cost,) = engine.step((3, 3, 903, 0), requests=3)
    assert cost.engine_s == pytest.approx(4.7e-3, rel=1e-6)
    assert cost.others_delay_s == pytest.approx(2 * 4.7e-3, rel=1e-6)


def test_a_shared_step_is_split_by_what_each_did_in_it() -> None:
    """In one step p recomputes 100 tokens (d0's price 3 ms) and a save of q takes 1 ms: 3 to 1."""
    engine = Engine()
    engine.calm()
    engine.step((3, 3, 600, 0), preempted=("p",), requests=3)
    engine.calm(3)
    at = engine.now_s
    engine.live.copy_begins(3, "q")
    engine.live.copy_ends(3, "q", at, at + 1e-3)
    for name in ("p", "q"):
        engine.live.closed(name, "recompute", "resumed")
    engine.step((103, 3, 600, 0), 1e-3, preempted=("q",), repeated=(("p", (100, 0, 0, 0)),))
    engine.live.closed("q", "swap", "resumed")
    costs = {cost.preemption_id: cost.engine_s for cost in (engine.step(), *engine.until_told()) if cost}
    extra = 100 * 3e-5 + 1e-3
    assert costs == {"p": pytest.approx(0.75 * extra, rel=1e-5), "q": pytest.approx(0.25 * extra, rel=1e-5)}


def test_a_slower_machine_is_no_cost() -> None:
    """All steps take three times as long as d0 says, and a preemption that adds nothing costs nothing."""
    engine = Engine()
    slow = 2 * law(4, 4, 800, 0)
    for _ in range(20):
        engine.step(extra_s=slow)
    engine.step(extra_s=slow, preempted=("p",))
    engine.live.closed("p", "recompute", "aborted")
    results = [cost for _ in range(4) for cost in engine.step(extra_s=slow)]
    assert [cost.engine_s for cost in results] == [pytest.approx(0.0, abs=1e-9)]


def test_a_copy_without_a_reported_end_is_given_up_and_costs_nothing() -> None:
    engine = Engine()
    engine.calm()
    engine.live.copy_begins(1, "p")
    engine.step(preempted=("p",))
    engine.live.closed("p", "swap", "resumed")
    for _ in range(MAX_WAITING + 5):
        assert engine.step() == ()
    assert engine.live.given_up == 1
    engine.step(extra_s=1e-3, preempted=("q",))
    engine.live.closed("q", "recompute", "aborted")
    assert [cost.engine_s for cost in engine.until_told()] == [pytest.approx(1e-3, rel=1e-6)]


@pytest.mark.parametrize("steps", [3, 2000])
def test_an_idle_engine_waits_for_a_load_however_long(steps: int) -> None:
    """Its steps compute nothing, a thousand a second; all of the wait is the load's cost, and it is told."""
    engine = Engine()
    engine.calm()
    engine.step(preempted=("p",))
    engine.live.copy_begins(2, "p")
    began = engine.now_s
    for _ in range(steps):
        assert engine.step((0, 0, 0, 0), extra_s=1e-3, requests=0) == ()
    engine.live.copy_ends(2, "p", began, engine.now_s)
    engine.live.closed("p", "swap", "resumed")
    (cost,) = engine.until_told()
    assert engine.live.given_up == 0
    assert cost.engine_s == pytest.approx(steps * 1e-3, rel=1e-6)


def test_undisturbed_steps_leave_nothing_behind() -> None:
    engine = Engine()
    engine.calm(1000)
    live = engine.live
    assert not (live._unsettled or live._accounts or live._finished_copies or live._in_flight)
    assert live._undisturbed


def live_costs(trace: Trace, model: StepTimeModel) -> dict[str, LiveCost]:
    """The trace's own life, told step by step in order."""
    values: dict[str, LiveCost] = {}
    for core in trace.headers:
        rows = {
            name: [row for row in trace.rows(name) if row["core"] == core]
            for name in ("steps", "transfers", "outcomes", "decisions")
        }
        values |= _live_costs_of_core(rows, LiveCosts(model))
    return values


def _live_costs_of_core(rows: dict[str, list[dict[str, Any]]], live: LiveCosts) -> dict[str, LiveCost]:
    lost, executed = defaultdict(list), {row["preemption_id"]: row["executed"] for row in rows["decisions"]}
    for row in rows["outcomes"]:
        lost[row["first_step"]].append(row["preemption_id"])
    begins = sorted(rows["transfers"], key=lambda row: row["start_s"])
    ends = sorted(rows["transfers"], key=lambda row: row["end_s"])
    closes = sorted(rows["outcomes"], key=lambda row: row["closed_s"])
    values = {}
    for step in sorted(rows["steps"], key=lambda row: row["start_s"]):
        end_s = step["start_s"] + step["duration_s"]
        while begins and begins[0]["start_s"] < end_s:
            row = begins.pop(0)
            live.copy_begins(_copy_id(row), row["preemption_id"])
        while ends and ends[0]["end_s"] <= end_s:
            row = ends.pop(0)
            live.copy_ends(_copy_id(row), row["preemption_id"], row["start_s"], row["end_s"])
        while closes and closes[0]["closed_s"] <= end_s + 1e-9:
            row = closes.pop(0)
            live.closed(row["preemption_id"], executed[row["preemption_id"]], row["ended"])
        again = [(part["preemption_id"], tuple(part[name] for name in REPEATED_PARTS)) for part in step["repeated"]]
        parts = tuple(step[name] for name in PARTS)
        for cost in live.step(parts, step["scheduled_requests"], step["start_s"], end_s, lost[step["step"]], again):
            values[cost.preemption_id] = cost
    return values


def _copy_id(row: dict[str, Any]) -> int:
    """In earlier traces a save and its load have the same generation."""
    return int(2 * row["generation"] + (row["direction"] == "load"))


@pytest.mark.parametrize("name", ["cpu-llama-native", "cpu-llama-simulated-link"])
def test_the_traces_that_ship_cost_live_what_they_cost_offline(name: str) -> None:
    """All of them are told, and nearly alike: only d0 (of both cores together) and the pace (of the past) differ."""
    trace = traces.read(f"{ROOT}/traces/{name}")
    model = common_step_time([trace])
    assert model is not None
    live = live_costs(trace, model)
    offline = {row["preemption_id"]: row for row in attribute(trace).rows("outcomes")}
    assert live.keys() >= {key for key, row in offline.items() if row["engine_s"] is not None}
    pairs = [(live[key].engine_s, row["engine_s"]) for key, row in offline.items()]
    mean_s = fmean(there for _, there in pairs)
    assert abs(fmean(here - there for here, there in pairs)) < 0.05 * mean_s
    assert median(abs(here - there) for here, there in pairs) < 0.1 * mean_s
    delays = [(live[key].others_delay_s, row["others_delay_s"]) for key, row in offline.items()]
    assert fmean(here for here, _ in delays) == pytest.approx(fmean(there for _, there in delays), rel=0.1)


def test_an_outcome_may_close_before_the_step_that_lost_the_blocks_is_reported() -> None:
    """As after a reset, when the victim is back with the very next step, or an abort while a step is in flight."""
    engine = Engine()
    engine.calm()
    engine.live.closed("p", "recompute", "aborted")
    engine.step((3, 3, 600, 0), preempted=("p",), requests=3)
    assert [cost.preemption_id for cost in engine.until_told()] == ["p"]
    assert not engine.live._accounts and not engine.live._closed and not engine.live._early


def test_memory_of_unreported_events_is_bounded() -> None:
    engine = Engine()
    for number in range(3 * MAX_WAITING):
        engine.live.closed(f"never-{number}", "recompute", "aborted")
        engine.live.copy_ends(-number - 1, f"ahead-{number}", 1e9, 1e9 + 1)
    engine.calm(0)
    assert len(engine.live._early) <= MAX_WAITING and len(engine.live._finished_copies) <= MAX_WAITING
