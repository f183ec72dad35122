"""What is reported of displaced requests: counted by hand from a simulated log; and logs of several orders."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvpolicy import trace as traces
from kvpolicy.attribution.offline import attribute
from kvpolicy.evaluation.decision_log import log_from_traces
from kvpolicy.evaluation.displacements import displacements_of
from kvpolicy.evaluation.offpolicy import estimate
from kvpolicy.order import load
from kvpolicy.simulator import Server
from kvpolicy.trace import Trace, TraceError
from tests.simulator.worlds import LINEAR, random_workload, run
from tests.synthetic_logs import make_log

SERVER = Server(16, 1 << 16, 60, 300, token_budget=256, max_running=24)


SOURCE = random_workload(1, 60, 200.0)
PRICED = "python:tests.priced:Priced"


def served(spec: str, policy: str = "random:0.5") -> Trace:
    return run(SOURCE, replace(SERVER, order=load(spec)), policy, LINEAR)[1]


def test_what_is_reported_is_what_was_recorded() -> None:
    trace = attribute(served("mlfq:base=8", PRICED))
    found = displacements_of([trace])
    rows = trace.rows("displacements")
    victims = [row for row in trace.rows("decisions") if row["cause"] == "displaced"]
    assert found is not None and found.let_in == len(rows) and found.displaced == len(victims) > 10
    assert found.order == "mlfq:base=8" and sum(found.by_rank.values()) == found.displaced and found.drawn == 0
    engine_s = {row["preemption_id"]: row["engine_s"] for row in trace.rows("outcomes")}
    costs_s = [engine_s[row["preemption_id"]] for row in victims]
    assert found.known == len(costs_s) - costs_s.count(None)
    assert found.mean_cost_s == pytest.approx(sum(cost for cost in costs_s if cost is not None) / found.known)
    prices_s = [one["price_s"] for row in rows for one in row["candidates"][: row["taken"]]]
    assert found.priced == len(prices_s) and found.mean_price_s == pytest.approx(sum(prices_s) / len(prices_s))
    outcomes = {row["preemption_id"]: row for row in trace.rows("outcomes")}
    ended = [outcomes[row["preemption_id"]] for row in victims]
    away_s = [row["victim_delay_s"] + row["wait_blocks_s"] for row in ended if row["ended"] == "resumed"]
    assert found.returned == len(away_s) > 10 and found.mean_away_s == pytest.approx(sum(away_s) / len(away_s))
    assert found.longest_away_s == pytest.approx(max(away_s)) and max(away_s) > 0
    text = "\n".join(found.lines())
    assert f"{found.displaced} requests for {found.let_in} others" in text and "by rank: " in text


def test_a_policy_without_predictions_has_no_price() -> None:
    found = displacements_of([served("mlfq:base=8")])
    assert found is not None and (found.priced, found.mean_price_s) == (0, None)
    assert any("mean price unknown (predicted for 0)" in line for line in found.lines())


def test_each_class_by_itself() -> None:
    """The displaced ones and those that others were displaced for, by the class in their rows of requests."""
    trace = served("classes:urgent+default/mlfq:base=8", PRICED)
    found = displacements_of([trace])
    assert found is not None and list(found.by_class) == ["default", "urgent"]
    class_of = {row["request"]: row["class"] for row in trace.rows("requests")}
    rows = trace.rows("displacements")
    for name, one in found.by_class.items():
        assert one.let_in == sum(class_of[row["request"]] == name for row in rows)
        taken = [victim for row in rows for victim in row["candidates"][: row["taken"]]]
        mine = [victim for victim in taken if class_of[victim["request"]] == name]
        assert one.displaced == len(mine)
        if mine:
            assert one.mean_price_s == pytest.approx(sum(victim["price_s"] for victim in mine) / len(mine))
            assert one.mean_away_s is not None and one.mean_away_s > 0
    default, urgent = found.by_class.values()
    assert default.displaced + urgent.displaced == found.displaced > 20 and default.let_in and urgent.let_in
    assert f"  class urgent: {urgent.displaced} displaced" in "\n".join(found.lines())


def test_by_class_it_is_said_for_whom() -> None:
    found = displacements_of([served("classes:urgent+default")])
    assert found is not None
    default, urgent = found.by_class["default"], found.by_class["urgent"]
    assert (default.displaced, default.let_in) == (found.displaced, 0) and default.mean_price_s is None
    assert (urgent.displaced, urgent.let_in, urgent.mean_away_s) == (0, found.let_in, None)
    assert f"  class urgent: 0 displaced; others displaced for {found.let_in} of them" in found.lines()


def test_who_had_not_ended_has_no_class() -> None:
    """A log may end, or begin, between a request's displacement and its end."""
    trace = served("mlfq:base=8")
    tables = dict(trace.tables) | {"requests": trace.table("requests").slice(0, 0)}
    found = displacements_of([Trace(trace.headers, tables)])
    assert found is not None and list(found.by_class) == ["(unfinished)"]
    assert found.by_class["(unfinished)"].displaced == found.displaced and "class" not in "\n".join(found.lines())
    older = trace.table("requests").drop_columns(["class", "priority", "ttft_deadline_s", "tpot_deadline_s"])
    found = displacements_of([Trace(trace.headers, dict(trace.tables) | {"requests": older})])
    assert found is not None and list(found.by_class) == ["default"]


def test_nothing_is_reported_where_nobody_was_displaced() -> None:
    assert displacements_of([served("fcfs"), make_log(1)]) is None


def test_an_evaluation_reports_them(tmp_path: Path) -> None:
    served("mlfq:base=8").write(tmp_path / "trace")
    report = estimate([tmp_path / "trace"], ["always-swap"])
    assert report.displacements is not None and report.displacements.lines()[0] in report.text()


def test_logs_of_different_orders_are_not_judged_as_one() -> None:
    one, other = make_log(1, name="one"), make_log(2, name="other")

    def under(trace: Trace, order: str | None, digest: str | None = "0") -> Trace:
        headers = {core: replace(header, order=order, order_digest=digest) for core, header in trace.headers.items()}
        return Trace(headers, trace.tables)

    for order, digest in (("mlfq", "0"), ("fcfs", "1")):
        with pytest.raises(TraceError, match=rf"core-one and core-other .* orders of service, fcfs and {order}"):
            log_from_traces({"a": under(one, "fcfs"), "b": under(other, order, digest)})
    assert len(log_from_traces({"a": under(one, "fcfs"), "b": under(other, "fcfs")})) == 800
    assert len(log_from_traces({"a": under(one, None), "b": under(other, "fcfs")})) == 800


def test_a_trace_names_its_order() -> None:
    for spec in ("fcfs", "mlfq:base=8"):
        (header,) = served(spec).headers.values()
        assert (header.order, header.order_digest) == (spec, load(spec).digest)
    stock = run(SOURCE, replace(SERVER, scheduling="priority"), "always-swap", LINEAR)[1]
    (header,) = stock.headers.values()
    assert header.order == "priority"
    assert traces.SCHEMAS["displacements"].names[0] == "displacement_id"


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"taken": 0}, "taken is 0, should be from 1 to the number of candidates"),
        ({"taken": 99}, "taken is 99, should be from 1 to the number of candidates"),
        ({"candidates": []}, "taken is 1, should be from 1 to the number of candidates, 0"),
        ({"left_out": -1}, "left_out is -1"),
        ({"probability": 1.5}, "probability is 1.5, should be from 0 to 1"),
        ({"rank of a candidate": None}, "rank of a candidate is empty"),
        ({"again": True}, "is row 0 again"),
    ],
)
def test_choices_that_no_order_makes_are_refused(wrong: dict[str, Any], why: str) -> None:
    trace = served("mlfq:base=8")
    (core,) = trace.headers
    rows = [{name: value for name, value in row.items() if name != "core"} for row in trace.rows("displacements")]
    first = {"taken": 1} | wrong
    if "rank of a candidate" in first:
        rows[0]["candidates"][0]["rank"] = first.pop("rank of a candidate")
    if first.pop("again", False):
        rows.append(rows[0])
    rows[0].update(first)
    table = traces.with_core(traces.from_rows("displacements", rows), core)
    with pytest.raises(TraceError, match=f"log: table displacements, row .*{why}"):
        log_from_traces({"log": Trace(trace.headers, dict(trace.tables) | {"displacements": table})})
