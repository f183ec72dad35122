"""Examples worked by hand: who loses its blocks when, what it costs, what is left in the cache."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import isnan

import pytest

from kvpolicy import policy
from kvpolicy.attribution import offline as attributed
from kvpolicy.simulator import Builtin, Link, Server, Slo, StepLoad, Tail
from kvpolicy.trace import Trace, from_rows, with_core
from kvpolicy.workload import ClosedLoop, Request
from tests.simulator.worlds import LINEAR, SECONDS, SMALL, random_workload, run, workload

TWO = workload(Request(0.0, 8, 8), Request(0.0, 8, 8))
WITHIN = Link(overlapped=False)


def test_two_requests_on_five_blocks() -> None:
    """Both take two blocks. In step 1 each wants a third: the first gets it, the second finds none and is last."""
    found, trace = run(TWO, SMALL, times=SECONDS)
    (decision,) = trace.rows("decisions")
    assert (decision["request"], decision["step"], decision["computed_tokens"], decision["held_blocks"]) == (
        "1",
        1,
        8,
        2,
    )
    assert (decision["free_blocks"], decision["short_blocks"], decision["running_requests"]) == (0, 1, 1)
    assert (decision["device_blocks"], decision["cause"], decision["executed"]) == (6, "memory", "recompute")
    steps = trace.rows("steps")
    # The first needs its eighth token's step, 7, to end; then the second takes its 8 tokens and a new one at once.
    assert [row["scheduled_tokens"] for row in steps] == [16, *[1] * 7, 9, *[1] * 6]
    assert [row["used_blocks"] - 1 for row in steps[:8]] == [4, 3, 3, 3, 3, 4, 4, 4]
    assert [row["recomputed_tokens"] for row in steps] == [0] * 8 + [8] + [0] * 6
    # Without those 8 the second would have decoded its ninth: a read of 9 tokens instead of 9 * 10 / 2 pairs.
    (part,) = steps[8]["repeated"]
    told = tuple(part[name] for name in ("tokens", "kv_read_tokens", "chunk_context", "decodes"))
    assert told == (8, -9, 45, -1)
    assert found.summary.recomputed_tokens == 8 and found.summary.steps == 15
    assert dict(found.summary.preemptions) == {"recompute": 1, "swap": 0}


@pytest.mark.parametrize("leap", [False, True])
def test_what_both_streams_and_the_output_were_like(leap: bool) -> None:
    """The first has its tokens at 1.16 s and then every 1.01 s; the second has its first token then, too, the next one
    at 9.32 s, when it was computed again beside nobody, and then one every 1.01 s."""
    summary = run(TWO, SMALL, times=SECONDS, leap=leap)[0].summary
    gaps = summary.longest_gap_s
    assert (gaps.mean, gaps.p50) == pytest.approx(((1.01 + 8.16) / 2, (1.01 + 8.16) / 2))
    assert gaps.p99 == pytest.approx(1.01 + 0.99 * (8.16 - 1.01))
    assert summary.e2e_per_token_s.mean == pytest.approx((8.23 + 15.38) / 2 / 8)
    # The 4th of 16 tokens was out after the third step, at 3.18 s; the 12th at 11.34 s.
    assert summary.steady_tok_s == pytest.approx(8 / (11.34 - 3.18))


@pytest.mark.parametrize("leap", [False, True])
def test_each_class_has_its_own_figures(leap: bool) -> None:
    """The same two streams. The first meets its 1.1 s a token; the second takes 14.22 s for seven tokens."""
    first, second = TWO.requests
    both = workload(replace(first, class_name="urgent", tpot_s=1.1), replace(second, class_name="batch"))
    simulator = Builtin(leap=leap)
    found = simulator.run(both, policy.load("always-recompute"), SMALL, SECONDS, slo=Slo(tpot_s=2.0)).summary
    assert list(found.classes) == ["batch", "urgent"]
    urgent, batch = found.classes["urgent"], found.classes["batch"]
    assert (urgent.requests, urgent.output_tokens, urgent.makespan_s) == (1, 8, pytest.approx(8.23))
    assert (urgent.ttft_s.mean, urgent.e2e_s.mean) == (pytest.approx(1.16), pytest.approx(8.23))
    assert urgent.itl_s == Tail(pytest.approx(1.01), pytest.approx(1.01, rel=5e-3), pytest.approx(1.01, rel=5e-3))
    assert batch.itl_s.mean == pytest.approx((15.38 - 1.16) / 7)
    assert (batch.itl_s.p50, batch.itl_s.p99) == (pytest.approx(1.01, rel=5e-3), pytest.approx(8.16, rel=5e-3))
    assert (urgent.longest_gap_s.mean, batch.longest_gap_s.mean) == pytest.approx((1.01, 8.16))
    assert batch.throughput_tok_s == pytest.approx(8 / 15.38)
    assert (urgent.slo_share, urgent.goodput_req_s) == (1.0, pytest.approx(1 / 8.23))
    assert (batch.deadline_requests, batch.slo_share, batch.goodput_req_s) == (1, 0.0, 0.0)
    assert urgent.fairness == batch.fairness == 1.0
    rates = 8 / 8.23, 8 / 15.38
    assert found.fairness == pytest.approx(sum(rates) ** 2 / (2 * sum(rate**2 for rate in rates)))
    assert (found.deadline_requests, found.slo_share, found.goodput_req_s) == (2, 0.5, pytest.approx(1 / 15.38))


@pytest.mark.parametrize("leap", [False, True])
def test_the_run_is_the_same_however_its_requests_are_classed(leap: bool) -> None:
    source = random_workload(7, 40, 60.0)
    alike = replace(source, requests=tuple(replace(one, class_name="only") for one in source))
    server = Server(block_size=16, block_bytes=1, device_blocks=24, host_blocks=100, asynchronous=True)
    apart, together = (run(one, server, "always-swap", leap=leap)[0].summary for one in (source, alike))
    assert list(apart.classes) == ["default", "urgent"] and list(together.classes) == ["only"]
    assert together.classes["only"].e2e_s == together.e2e_s and together.classes["only"].itl_s == together.itl_s
    for name in ("e2e_s", "ttft_s", "itl_s", "longest_gap_s", "e2e_per_token_s"):
        one, other = getattr(apart, name), getattr(together, name)
        assert (one.mean, one.p50, one.p99) == pytest.approx((other.mean, other.p50, other.p99))
    assert apart.fairness == pytest.approx(together.fairness)
    assert (apart.throughput_tok_s, apart.steady_tok_s) == (together.throughput_tok_s, together.steady_tok_s)


def test_a_stream_of_a_single_token_has_no_gap() -> None:
    summary = run(workload(Request(0.0, 8, 1), Request(0.0, 4, 1)), SMALL, times=SECONDS)[0].summary
    assert isnan(summary.longest_gap_s.mean) and isnan(summary.longest_gap_s.p99)
    assert summary.e2e_per_token_s.mean == pytest.approx(1.12)
    assert summary.steady_tok_s == pytest.approx(2 / 1.12), "both come out in one step, which began with nothing"


def test_what_the_recompute_cost() -> None:
    """Eight hundredths for eight tokens; nobody else was there to be delayed."""
    _, trace = run(TWO, SMALL, times=SECONDS)
    (outcome,) = trace.rows("outcomes")
    assert outcome["ended"] == "resumed" and outcome["recomputed_tokens"] == 8 and outcome["last_step"] == 8
    assert outcome["engine_s"] == pytest.approx(0.08) and outcome["others_delay_s"] == 0.0
    assert outcome["wait_blocks_s"] == pytest.approx(7 * 1.01)
    assert outcome["victim_delay_s"] == pytest.approx(1.09)


def test_what_the_swap_cost() -> None:
    """Step 1 waits half a second for the save, with the other request in it; then nobody runs while it is loaded."""
    found, trace = run(TWO, replace(SMALL, link=WITHIN), "always-swap", SECONDS)
    (outcome,) = trace.rows("outcomes")
    assert (outcome["loaded_tokens"], outcome["recomputed_tokens"], outcome["local_hit_tokens"]) == (8, 0, 0)
    assert outcome["engine_s"] == pytest.approx(1.0) and outcome["others_delay_s"] == pytest.approx(0.5)
    save, load = trace.rows("transfers")
    assert (save["direction"], save["step"], save["bytes"]) == ("save", 1, 2)
    assert (load["direction"], load["step"], load["bytes"]) == ("load", 8, 2)
    steps = trace.rows("steps")
    assert steps[1]["duration_s"] == pytest.approx(1.51) and steps[1]["saves"] == 1
    assert steps[8]["duration_s"] == pytest.approx(0.5) and steps[8]["scheduled_tokens"] == 0
    assert found.summary.moved_bytes == 4 and dict(found.summary.preemptions) == {"recompute": 0, "swap": 1}


@pytest.mark.parametrize("saves_wait", [True, False])
def test_loads_run_beside_the_steps_and_saves_where_they_may(saves_wait: bool) -> None:
    """A load delays nobody who runs; a save the step that brings it, where that overwrites what the save reads."""
    link = Link(saves_wait=saves_wait)
    server = Server(block_size=16, block_bytes=1, device_blocks=24, host_blocks=100, prefix_caching=False, link=link)
    slow = replace(LINEAR, copy_latency_s=0.05)
    _, trace = run(random_workload(5, 40, 60.0), server, "always-swap", slow)
    loads = [row for row in trace.rows("transfers") if row["direction"] == "load"]
    beside = 0
    for row in trace.rows("steps"):
        if not row["scheduled_tokens"]:
            continue
        parts = [row[name] for name in ("scheduled_tokens", "decode_requests", "kv_read_tokens", "chunk_context")]
        computes_s = slow.step_s(StepLoad(*parts, 0, 0))
        assert row["duration_s"] == pytest.approx(computes_s + 0.05 * saves_wait * row["saves"], abs=1e-9)
        end_s = row["start_s"] + row["duration_s"]
        beside += any(load["start_s"] < end_s - 1e-9 and load["end_s"] > row["start_s"] + 1e-9 for load in loads)
    assert beside
    assert all(other["start_s"] >= one["end_s"] for one, other in pairwise(loads))


def test_a_full_host_pool_means_recompute() -> None:
    _, trace = run(TWO, replace(SMALL, host_blocks=1), "always-swap", SECONDS)
    (decision,) = trace.rows("decisions")
    assert (decision["executed"], decision["reason"]) == ("recompute", "host_full")


def test_what_is_left_in_the_prefix_cache() -> None:
    """The victim's tail block is the first to go: the other request takes it in step 5. Its head is still there."""
    _, trace = run(TWO, replace(SMALL, prefix_caching=True), times=SECONDS)
    (decision,) = trace.rows("decisions")
    assert (decision["hashed_blocks"], decision["shared_blocks"]) == (2, 0)
    (outcome,) = trace.rows("outcomes")
    assert (outcome["local_hit_tokens"], outcome["recomputed_tokens"]) == (4, 4)


def test_a_shared_prefix_is_computed_once() -> None:
    """16 tokens in common, of two ids of 10: blocks of 4 end at 16 before their own tokens begin at 20."""
    ids = {"prefix": (7, 8), "prefix_block_tokens": 10}
    source = workload(Request(0.0, 21, 1, **ids), Request(50.0, 30, 1, **ids))
    server = replace(SMALL, prefix_caching=True, device_blocks=20)
    _, trace = run(source, server, times=SECONDS)
    assert [row["scheduled_tokens"] for row in trace.rows("steps")] == [21, 30 - 20]
    other = workload(Request(0.0, 21, 1, **ids), Request(50.0, 30, 1, prefix=(7, 9), prefix_block_tokens=10))
    _, trace = run(other, server, times=SECONDS)
    assert [row["scheduled_tokens"] for row in trace.rows("steps")] == [21, 30 - 8]


def test_an_answer_is_not_computed_again_by_the_turn_that_repeats_it() -> None:
    """The first turn leaves 6 + 6 - 1 computed tokens: two full blocks of 4, half of the second one generated."""
    ids = {"prefix": (7, 8, 9), "prefix_block_tokens": 6}
    source = workload(Request(0.0, 6, 6, **ids), Request(50.0, 17, 1, **ids))
    _, trace = run(source, replace(SMALL, prefix_caching=True, device_blocks=20), times=SECONDS)
    assert [row["scheduled_tokens"] for row in trace.rows("steps")] == [6, 1, 1, 1, 1, 1, 17 - 8]


def test_the_whole_known_sequence_must_fit_before_anything_is_admitted() -> None:
    """A budget of 4 would begin the second request with one block, but it needs three."""
    source = workload(Request(0.0, 12, 2), Request(0.0, 12, 2))
    _, trace = run(source, replace(SMALL, token_budget=14), times=SECONDS)
    assert [row["running_requests"] for row in trace.rows("steps")] == [1, 1, 1, 1]


def test_chunks_fill_the_budget_behind_the_decodes() -> None:
    source = workload(Request(0.0, 4, 6), Request(0.5, 10, 1))
    _, trace = run(source, replace(SMALL, device_blocks=9, token_budget=4), times=SECONDS)
    assert [row["scheduled_tokens"] for row in trace.rows("steps")] == [4, 4, 4, 4, 2, 1]
    assert [row["decode_requests"] for row in trace.rows("steps")] == [0, 1, 1, 1, 2, 1]


def test_priority_takes_the_least_urgent_though_it_was_scheduled_already() -> None:
    """In step 2 the first in line has just got its third block when the third finds none: the first matters least.

    It loses all three, of which two hold something to save; the fourth still gets its turn.
    """
    late = [Request(0.5, 4, 8) for _ in range(3)]
    source = workload(Request(0.0, 7, 12, priority=2), *late)
    server = replace(SMALL, device_blocks=7, scheduling="priority", link=WITHIN)
    _, trace = run(source, server, "always-swap", SECONDS)
    first = trace.rows("decisions")[0]
    assert (first["request"], first["step"], first["priority"]) == ("0", 2, 2)
    assert (first["computed_tokens"], first["held_blocks"], first["running_requests"]) == (8, 2, 3)
    assert trace.rows("transfers")[0]["bytes"] == 2
    assert trace.rows("steps")[2]["scheduled_tokens"] == 3


def test_first_come_first_served_takes_the_last_admitted() -> None:
    _, trace = run(workload(*[Request(0.0, 4, 8)] * 3), SMALL, times=SECONDS)
    assert trace.rows("decisions")[0]["request"] == "2"


def test_nobody_is_admitted_in_a_step_that_preempts() -> None:
    """The most urgent one would fit into what the victim left in step 1, but has to wait for step 2."""
    source = workload(Request(0.0, 8, 4, priority=1), Request(0.0, 8, 4, priority=2), Request(0.5, 4, 4))
    _, trace = run(source, replace(SMALL, device_blocks=4, scheduling="priority"), times=SECONDS)
    steps = trace.rows("steps")
    assert [row["preemptions"] for row in steps[:3]] == [0, 1, 0]
    assert [row["running_requests"] for row in steps[:3]] == [2, 1, 2]


def test_a_victim_comes_back_before_those_who_waited_longer_than_it() -> None:
    """Both need three blocks of the five when the first is through."""
    _, trace = run(workload(*TWO.requests, Request(0.5, 12, 1)), SMALL, times=SECONDS)
    ended = {row["request"]: row["last_token_s"] for row in trace.rows("requests")}
    assert ended["0"] < ended["1"] < ended["2"]


EQUAL = workload(*[Request(0.0, 8, 8)] * 4)
"""Two fit until both want their third block."""


def victims(trace: Trace) -> list[str]:
    return [row["request"] for row in trace.rows("decisions")]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("leap", [False, True])
def test_a_loaded_request_is_back_in_its_place(asynchronous: bool, leap: bool) -> None:
    """While request 1 is loaded, request 2 is admitted: behind it, so that it is the next victim, and 3 after it."""
    server = replace(SMALL, asynchronous=asynchronous)
    _, trace = run(EQUAL, server, "always-swap", SECONDS, leap=leap)
    assert victims(trace) == ["1", "2", "3"]
    ended = {row["request"]: row["last_token_s"] for row in trace.rows("requests")}
    assert ended["0"] < ended["1"] < ended["2"] < ended["3"]


def test_a_load_does_not_cause_the_next_preemption() -> None:
    """Request 2 loses its 3 blocks of 2 tokens in step 2, and in step 5 exactly 3 are free, as request 0 is through.

    A load into them would leave request 1 without the block that it needs in step 6. So it begins in step 8, when
    request 1 is through and nobody runs.
    """
    source = workload(Request(0.0, 2, 5), Request(0.0, 7, 8), Request(0.0, 4, 11))
    _, trace = run(source, replace(SMALL, block_size=2, device_blocks=9), "always-swap", SECONDS)
    assert [(row["step"], row["request"]) for row in trace.rows("decisions")] == [(2, "2")]
    steps = trace.rows("steps")
    assert [row["used_blocks"] - 1 for row in steps[1:9]] == [9, 7, 8, 9, 6, 7, 7, 3]
    assert [row["loads"] for row in steps[:9]] == [0] * 8 + [1]


def test_running_ahead_takes_one_more_step_to_notice_an_end() -> None:
    """With one request nothing can be scheduled while its last token is on its way; the next one is seen later."""
    source = workload(Request(0.0, 4, 3))
    _, plain = run(source, SMALL, times=SECONDS)
    _, ahead = run(source, replace(SMALL, asynchronous=True), times=SECONDS)
    assert [row["scheduled_tokens"] for row in plain.rows("steps")] == [4, 1, 1]
    assert [row["scheduled_tokens"] for row in ahead.rows("steps")] == [4, 1, 1]
    assert plain.rows("requests")[0]["last_token_s"] == ahead.rows("requests")[0]["last_token_s"]


def test_sessions_think() -> None:
    source = workload(
        Request(0.0, 4, 2, session="a"),
        Request(0.0, 4, 1, session="a", think_s=3.0),
        Request(1.0, 4, 1, session="b", think_s=3.0),
        Request(20.0, 4, 1, session="a", think_s=1.0),
    )
    _, trace = run(source, SMALL, times=SECONDS)
    arrivals = {row["request"]: row["arrival_s"] for row in trace.rows("requests")}
    assert arrivals["0"] == 0.0 and arrivals["2"] == 1.0 and arrivals["3"] == 20.0
    ended = next(row["last_token_s"] for row in trace.rows("requests") if row["request"] == "0")
    assert arrivals["1"] == pytest.approx(ended + 3.0)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("leap", [False, True])
def test_a_closed_loop_sends_the_next_request_when_one_ends(asynchronous: bool, leap: bool) -> None:
    """Two at a time: the third comes when the second has ended, the fourth at its own time, later than that."""
    loop = ClosedLoop(2)
    requests = [Request(0.0, 4, 9), Request(0.0, 4, 2), Request(0.0, 4, 12), Request(30.0, 4, 2)]
    source = workload(*(replace(request, loop=loop) for request in requests), Request(31.0, 4, 2))
    _, trace = run(source, replace(SMALL, device_blocks=20, asynchronous=asynchronous), times=SECONDS, leap=leap)
    by_name = {row["request"]: row for row in trace.rows("requests")}
    assert [by_name[name]["arrival_s"] for name in "0134"] == [0.0, 0.0, 30.0, 31.0]
    assert by_name["2"]["arrival_s"] == by_name["1"]["last_token_s"] < by_name["0"]["last_token_s"]


def test_rows_of_requests_tell_what_they_are() -> None:
    urgent = Request(0.0, 4, 1, priority=-1, class_name="urgent", ttft_s=0.5, tpot_s=0.1)
    _, trace = run(workload(urgent, Request(1.0, 4, 1)), SMALL)
    columns = ("class", "priority", "ttft_deadline_s", "tpot_deadline_s")
    rows = trace.rows("requests", columns)
    assert [tuple(row.values()) for row in rows] == [("urgent", -1, 0.5, 0.1), ("default", 0, None, None)]


@pytest.mark.parametrize("name", ["always-recompute", "always-swap"])
def test_costs_are_those_that_the_step_table_tells(name: str) -> None:
    """The simulator knows what steps take without a victim; fitting d0 to its undisturbed steps finds the same."""
    server = Server(
        block_size=16, block_bytes=1 << 20, device_blocks=40, host_blocks=500, prefix_caching=False, link=WITHIN
    )
    _, trace = run(random_workload(3, 60, 40.0), server, name, LINEAR)
    rows = [dict(row) for row in trace.rows("outcomes")]
    assert len(rows) > 10
    again = attributed.attribute(_without_costs(trace))
    for row, other in zip(rows, again.rows("outcomes"), strict=True):
        if row["ended"] == "resumed":
            assert other["engine_s"] == pytest.approx(row["engine_s"], rel=1e-6, abs=1e-7)
            assert other["others_delay_s"] == pytest.approx(row["others_delay_s"], rel=1e-6, abs=1e-6)


def _without_costs(trace: Trace) -> Trace:
    rows = [row | {"engine_s": None, "others_delay_s": None} for row in trace.rows("outcomes")]
    (core,) = trace.headers
    return Trace(trace.headers, dict(trace.tables) | {"outcomes": with_core(from_rows("outcomes", rows), core)})
