"""Rules for victims judged from logs that are made up: what is estimated is what the rule would have cost."""

from __future__ import annotations

import random
from dataclasses import replace
from math import nan
from typing import Any

import pytest

from kvpolicy import trace as traces
from kvpolicy.evaluation.displacements import displacements_of
from kvpolicy.evaluation.victim_rules import RULES, judge_rules
from kvpolicy.order import Candidate, Choice, load
from kvpolicy.simulator import Server
from kvpolicy.trace import Trace
from tests.order.made import progress
from tests.simulator.worlds import LINEAR, random_workload, run
from tests.synthetic_logs import make_log

CANDIDATES = 3
PRICED = "python:tests.priced:Priced"


def made(
    count: int = 3000,
    share: float = 0.6,
    unknown: float = 0.0,
    seed: int = 3,
    priced: bool = True,
    computed_tokens: tuple[int, int] = (100, 2000),
) -> Trace:
    """Each choice is one of three equals; a share of the choices is drawn, in the others the last comer is taken. What
    one costs is its price and some noise. ``computed_tokens``: the least and the most that one has."""
    rng, base = random.Random(seed), make_log(1, decisions=1)
    (core,) = base.headers
    template = base.rows("decisions")[0], base.rows("outcomes")[0]
    rows: dict[str, list[dict[str, Any]]] = {"decisions": [], "outcomes": [], "displacements": []}
    for step in range(count):
        equals = [
            Candidate(
                progress(number, rank=(1.0,), computed_tokens=rng.randint(*computed_tokens)), 4, rng.uniform(0.1, 1.0)
            )
            for number in range(CANDIDATES)
        ]
        last = equals[-1]
        chosen = rng.choice(equals) if rng.random() < share else last
        probability = share / CANDIDATES + (1.0 - share) * (chosen is last)
        order = [chosen, *(one for one in equals if one is not chosen)]
        if not priced:
            order = [replace(one, price_s=None) for one in order]
        choice = Choice(progress(9, rank=(0.0,)), tuple(order), 1, 0, 3, 0, 1, 5, probability)
        rows["displacements"].append(
            traces.displacement_row(
                choice, displacement_id=str(step), step=step, time_s=0.0, order="drawn", name_of=str
            )
        )
        name = f"p{step}"
        rows["decisions"].append(
            template[0]
            | {"preemption_id": name, "decision_id": name, "step": step, "cause": "displaced"}
            | {"request": str(chosen.request.number)}
        )
        assert chosen.price_s is not None
        cost_s = None if rng.random() < unknown else chosen.price_s * rng.uniform(0.9, 1.1)
        rows["outcomes"].append(template[1] | {"preemption_id": name, "engine_s": cost_s})
    tables = {name: traces.with_core(traces.from_rows(name, table), core) for name, table in rows.items()}
    return Trace(base.headers, tables)


def truth(trace: Trace, rule: str) -> float:
    """Mean price of whom the rule takes."""
    rows = trace.rows("displacements")
    taken = (min(row["candidates"], key=lambda one: (RULES[rule](one, 32), one["number"])) for row in rows)
    return sum(one["price_s"] for one in taken) / len(rows)


@pytest.mark.parametrize("unknown", [0.0, 0.05])
def test_estimates_cover_what_the_rules_would_have_cost(unknown: float) -> None:
    trace = made(unknown=unknown)
    judged = {one.rule: one for one in judge_rules([trace])}
    assert set(judged) == {"last", "least-computed", "cheapest"}
    for name, one in judged.items():
        assert one.refused == () and {estimate.estimator for estimate in one.estimates} == {"ips", "snips", "dr"}
        for estimate in one.estimates:
            assert estimate.low_s <= truth(trace, name) <= estimate.high_s, (name, estimate)
    by_price = {name: one.estimates[-1].value_s for name, one in judged.items()}
    assert by_price["cheapest"] < 0.75 * by_price["last"]
    assert "victims cheapest: agrees with " in judged["cheapest"].lines()[0]


def test_which_of_those_alike_was_drawn_does_not_decide_whom_a_rule_would_have_taken() -> None:
    """With three different numbers of tokens, most choices hold some that are alike."""
    trace = made(computed_tokens=(1, 3))
    (_, least, _) = judge_rules([trace])
    assert least.refused == ()
    for estimate in least.estimates:
        assert estimate.low_s <= truth(trace, "least-computed") <= estimate.high_s, estimate


def test_a_model_makes_the_interval_tight() -> None:
    (_, _, cheapest) = judge_rules([made()])
    width_s = {one.estimator: one.high_s - one.low_s for one in cheapest.estimates}
    assert width_s["dr"] < 0.5 * width_s["ips"]


def test_what_the_log_does_not_support_is_refused() -> None:
    (_, _, cheapest) = judge_rules([made(share=0.03)])
    assert cheapest.estimates == () and "the effective sample is" in cheapest.refused[0]
    assert "the costs of " in judge_rules([made(unknown=0.3)])[0].refused[0]
    assert "fewer than 20" in judge_rules([made(count=9)])[0].refused[0]
    last, _, cheapest = judge_rules([made(priced=False)])
    assert cheapest.refused == ("the log's policy predicted no prices",)
    assert {one.estimator for one in last.estimates} == {"ips", "snips"}


def test_a_price_that_is_no_number_is_none() -> None:
    trace = made()
    rows = [{name: value for name, value in row.items() if name != "core"} for row in trace.rows("displacements")]
    rows[0]["candidates"][0]["price_s"] = nan
    (core,) = trace.headers
    table = traces.with_core(traces.from_rows("displacements", rows), core)
    trace = Trace(trace.headers, dict(trace.tables) | {"displacements": table})
    last, _, cheapest = judge_rules([trace])
    assert cheapest.refused == ("the log's policy predicted no prices",)
    assert {one.estimator for one in last.estimates} == {"ips", "snips"}
    found = displacements_of([trace])
    assert found is not None and found.priced == found.displaced - 1


def test_nothing_is_judged_where_nothing_was_left_to_chance() -> None:
    assert judge_rules([made(share=0.0)]) == () and judge_rules([make_log(1)]) == ()


def test_the_order_of_a_run_agrees_with_itself() -> None:
    """Whatever the rule, what it takes is what the order with that rule took: nothing that decides is left out."""
    server = Server(16, 1 << 16, 60, 300, token_budget=256, max_running=24)
    for rule in RULES:
        order = load(f"mlfq:base=8,victims={rule},explore=1e-12")
        trace = run(random_workload(1, 60, 200.0), replace(server, order=order), "python:tests.priced:Priced", LINEAR)[
            1
        ]
        judged = {one.rule: one for one in judge_rules([trace])}
        rows = trace.table("displacements").num_rows
        assert judged[rule].choices == rows > 10
        assert judged[rule].refused == () and judged[rule].agreed == rows
