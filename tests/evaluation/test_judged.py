"""Policies judged by what is to be minimised, whatever each of them minimises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvpolicy.datasets.profiles import Sample, State
from kvpolicy.evaluation import evaluate
from kvpolicy.evaluation.replay import with_objective_costs
from kvpolicy.events import KINDS
from kvpolicy.policy.objective import ENGINE, Objective
from kvpolicy.trace import TraceError
from tests.synthetic import changed, make_trace, situation


def state(others_delay_s: float | None = 3.0) -> State:
    victim = situation(500)
    delays = {"recompute": (1.0, 2.0), "swap": (2.0, 1.0)}
    samples = {
        kind: tuple(Sample(victim, kind, delays[kind][0], "core", i, f"{kind}-{i}", delays[kind][1], others_delay_s)
                    for i in range(2))
        for kind in KINDS
    }  # fmt: skip
    return State("s", frozenset({"core/s"}), samples)


def test_a_state_worked_by_hand() -> None:
    assert with_objective_costs(state(), ENGINE) == state()
    assert with_objective_costs(state(), ENGINE).faster == "recompute"
    assert with_objective_costs(state(), Objective.parse("victim")).mean_s == {"recompute": 2.0, "swap": 1.0}
    assert with_objective_costs(state(), Objective.parse("engine+2*victim+0.5*others")).mean_s == {
        "recompute": 6.5,
        "swap": 5.5,
    }


def test_a_delay_that_was_not_measured_is_named_where_it_counts() -> None:
    assert with_objective_costs(state(None), Objective.parse("victim")).faster == "swap"
    with pytest.raises(TraceError, match=r"preemption recompute-0: .*delay of the others is not known"):
        with_objective_costs(state(None), Objective.parse("others"))


@pytest.fixture
def slow_victims(tmp_path: Path) -> Path:
    """Every swap keeps its victim for a second."""
    trace = make_trace(states=60)
    rows: list[dict[str, Any]] = trace.rows("outcomes")
    changed(
        trace, "outcomes", [row | {"victim_delay_s": 1.0 if row["loaded_tokens"] else 1e-3} for row in rows]
    ).write(tmp_path / "trace")  # fmt: skip
    return tmp_path / "trace"


def test_evaluate_judges_by_the_objective(slow_victims: Path) -> None:
    def totals(objective: str) -> dict[str, float]:
        report = evaluate([slow_victims], ["always-recompute", "always-swap"], 0, objective)
        return {policy.policy: policy.total_s for policy in report.policies}

    by_engine, by_victim = totals("engine"), totals("victim")
    assert by_victim["always-swap"] == pytest.approx(60.0)
    assert by_victim["always-recompute"] == pytest.approx(0.06)
    assert by_engine["always-swap"] < 10.0
    report = evaluate([slow_victims], ["always-swap"], objective="2*victim")
    assert (report.objective, report.swap_faster) == ("2*victim", 0)
    assert "judged by 2*victim" in report.text()
    with pytest.raises(ValueError, match="objective 'speed'"):
        evaluate([slow_victims], ["always-swap"], objective="speed")
