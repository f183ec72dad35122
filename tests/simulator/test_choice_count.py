"""Observers are told every decision of a run; counted are those that left a choice."""

from __future__ import annotations

from dataclasses import replace

from kvpolicy.events import Decision, Option
from kvpolicy.policy import load
from kvpolicy.simulator import Builtin, MemorySink
from kvpolicy.simulator.choice_count import ChoiceCount
from kvpolicy.workload import Request, Workload
from tests.simulator.test_hindsight import SERVER, times
from tests.synthetic import fitted_model, options_for, situation


def test_only_what_left_a_choice_counts() -> None:
    victim = situation(100_000)
    beyond = fitted_model("analytic").predict(victim, options_for(victim))
    assert beyond[0].extrapolated
    count, both = ChoiceCount(), Decision(options_for(victim), (1.0, 0.0), 0, beyond, "any", "{}")
    count(both)
    count(replace(both, costs=()))
    count(Decision((Option("recompute"),), (1.0,), 0, beyond[:1], "any", "{}"))
    assert (count.choices, count.extrapolated) == (2, 1)


def test_an_observer_sees_the_decisions_of_the_trace() -> None:
    events: list[Decision] = []
    workload = Workload("three", tuple(Request(0.0, 60, 60) for _ in range(3)), 0)
    run = Builtin().run(workload, load("random:0.5"), SERVER, times(2e7), 1, MemorySink(), events.append)
    assert run.trace is not None
    rows = run.trace.rows("decisions", ("chosen", "executed", "policy"))
    assert rows and [(row["chosen"], row["executed"], row["policy"]) for row in rows] == [
        (one.chosen, one.executed, one.policy) for one in events
    ]
