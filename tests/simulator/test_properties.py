"""What holds for every workload on every server."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given

from kvpolicy import policy
from kvpolicy.simulator import Builtin, Link, MemorySink, Server
from kvpolicy.simulator.builtin.engine import Engine
from kvpolicy.simulator.builtin.scheduler import VllmVictims
from kvpolicy.simulator.builtin.trace_writer import TraceWriter
from kvpolicy.simulator.sinks import Identity
from kvpolicy.workload import Request, Source, Workload
from tests.examples import examples
from tests.simulator.worlds import LINEAR, random_workload, run, worlds

World = tuple[Workload, Server, str]
some = examples(25, suppress_health_check=[HealthCheck.too_slow])


@some
@given(worlds())
def test_leaping_changes_nothing(world: World) -> None:
    """Taken at once or one by one, steps give the same rows and the same summary."""
    same_either_way(*world)


def test_an_answer_is_found_while_it_is_generated() -> None:
    """The second request repeats what the first one is about to say: how much of it is there shows the moment."""
    first = Request(0.0, 6, 54, prefix=tuple(range(1, 11)), prefix_block_tokens=6)
    server = Server(block_size=4, block_bytes=1, device_blocks=60, host_blocks=0, prefix_caching=True)
    for arrival_s in (0.02, 0.04, 0.06, 0.08):
        second = replace(first, arrival_s=arrival_s, prompt_tokens=58, output_tokens=2)
        same_either_way(Workload("repeated", (first, second), 0), server, "always-recompute")


def test_who_leaves_the_crowd_takes_no_budget() -> None:
    """Scheduling ahead, a last token is on its way while its request still runs; a prefill gets its share of the step,
    and may need a block for it. Found by chance, 1 in 1000."""
    server = Server(
        block_size=16,
        block_bytes=1,
        device_blocks=19,
        host_blocks=2000,
        token_budget=16,
        prefix_caching=False,
        scheduling="priority",
        asynchronous=True,
        link=Link(overlapped=False),
    )
    same_either_way(random_workload(507, 25, 500.0), server, "always-swap")


def same_either_way(source: Workload, server: Server, name: str) -> None:
    (leapt, trace), (plain, other) = (run(source, server, name, leap=leap) for leap in (True, False))
    assert leapt.summary == plain.summary or math.isnan(plain.summary.itl_s.mean)
    for table in ("requests", "steps", "decisions", "outcomes", "transfers"):
        rows, others = trace.rows(table), other.rows(table)
        assert len(rows) == len(others)
        for row, one in zip(rows, others, strict=True):
            assert {k: v for k, v in row.items() if k not in COSTS} == {k: v for k, v in one.items() if k not in COSTS}
            assert [row.get(k) for k in COSTS] == pytest.approx([one.get(k) for k in COSTS], abs=1e-9)


COSTS = ("engine_s", "others_delay_s")
"""Durations less durations: rounding alone may differ."""


@some
@given(worlds())
def test_nothing_is_lost_and_nothing_is_left(world: World) -> None:
    """Every request is served in full; blocks, references, host slots and copies are all given back."""
    source, server, name = world
    engine = engine_of(source, server, name)
    engine.run()
    pool = engine.scheduler.pool
    assert pool.free == server.device_blocks
    assert getattr(pool, "references", 0) == 0
    assert engine.copies.free == server.host_blocks and not engine.link.running
    assert engine.copies.queued_bytes("save") == engine.copies.queued_bytes("load") == 0
    assert engine.present == 0 and not engine.scheduler.running and not engine.scheduler.waiting_requests
    assert not engine.scheduler._prefills and not engine.preemptions._closing and not len(engine.fast_path.batch)
    assert engine.tallied.summary(0.0).requests == len(source)


@some
@given(worlds())
def test_no_step_is_beyond_the_server(world: World) -> None:
    source, server, name = world
    _, trace = run(source, server, name)
    for row in trace.rows("steps"):
        assert row["scheduled_tokens"] <= server.token_budget and row["running_requests"] <= server.max_running
        assert 1 <= row["used_blocks"] <= server.device_blocks + 1
        assert row["decode_requests"] <= row["scheduled_requests"] <= row["running_requests"] + row["preemptions"]
    ends = [row["start_s"] + row["duration_s"] for row in trace.rows("steps")]
    assert ends == sorted(ends)


@some
@given(worlds())
def test_the_tables_tell_one_story(world: World) -> None:
    source, server, name = world
    found, trace = run(source, server, name)
    summary, requests, steps = found.summary, trace.rows("requests"), trace.rows("steps")
    served = {int(row["request"]): row for row in requests}
    for number, request in enumerate(source):
        assert served[number]["output_tokens"] == request.output_tokens
        assert served[number]["prompt_tokens"] == request.prompt_tokens
    assert summary.steps == len(steps)
    again = sum(row["recomputed_tokens"] for row in steps)
    assert again == summary.recomputed_tokens == sum(row["recomputed_tokens"] for row in requests)
    assert again == sum(part["tokens"] for row in steps for part in row["repeated"])
    decisions = trace.rows("decisions")
    assert Counter(row["executed"] for row in decisions) == Counter(dict(summary.preemptions))
    assert len(decisions) == sum(row["preemptions"] for row in steps) == sum(row["preemptions"] for row in requests)
    assert {row["preemption_id"] for row in decisions} == {row["preemption_id"] for row in trace.rows("outcomes")}
    assert summary.moved_bytes == sum(row["bytes"] for row in trace.rows("transfers"))
    assert sum(row["loaded_tokens"] for row in requests) >= sum(row["loaded_tokens"] for row in trace.rows("outcomes"))
    e2e = [row["last_token_s"] - row["arrival_s"] for row in requests]
    ttft = [row["first_token_s"] - row["arrival_s"] for row in requests]
    assert summary.e2e_s.mean == pytest.approx(np.mean(e2e))
    assert summary.e2e_s.p99 == pytest.approx(np.quantile(e2e, 0.99))
    assert summary.ttft_s.p50 == pytest.approx(np.quantile(ttft, 0.5))
    assert all(outcome["engine_s"] > -1e-9 for outcome in trace.rows("outcomes"))


@pytest.mark.parametrize("name", ["always-swap", "random:0.5"])
def test_equal_seeds_give_equal_traces(name: str) -> None:
    source = random_workload(5, 40, 60.0)
    server = Server(block_size=16, block_bytes=1, device_blocks=24, host_blocks=100)
    first, second = (run(source, server, name)[1] for _ in range(2))
    assert first.digest() == second.digest()
    other = Builtin(wall=lambda: 0.0).run(source, policy.load(name), server, LINEAR, seed=2, sink=MemorySink())
    assert other.trace is not None and (other.trace.digest() == first.digest()) is False


def test_policies_meet_the_same_chance() -> None:
    """One number per decision: two coins of different weight differ only where a number falls between them."""
    source = random_workload(5, 40, 60.0)
    server = Server(block_size=16, block_bytes=1, device_blocks=24, host_blocks=1000)

    def coins(name: str) -> list[str]:
        return [row["executed"] for row in run(source, server, name)[1].rows("decisions")]

    rare, frequent = coins("random:0.4"), coins("random:0.6")
    first_difference = next(i for i, pair in enumerate(zip(rare, frequent, strict=False)) if pair[0] != pair[1])
    assert (rare[first_difference], frequent[first_difference]) == ("recompute", "swap")


def test_latencies_of_tokens_are_those_of_the_steps() -> None:
    """Alone, a request's inter-token times are the durations of its decode steps."""
    source = random_workload(9, 1, 1.0)
    server = Server(block_size=16, block_bytes=1, device_blocks=24, host_blocks=0)
    found, trace = run(source, server)
    seconds = [row["duration_s"] for row in trace.rows("steps")][1:]
    assert found.summary.itl_s.mean == pytest.approx(np.mean(seconds))
    assert found.summary.itl_s.p50 == pytest.approx(np.median(seconds), rel=5e-3)
    assert found.summary.itl_s.p99 == pytest.approx(max(seconds), rel=5e-3)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"max_model_len": 50}, "request 0 has .* max_model_len is 50"),
        ({"device_blocks": 2}, "request 0 needs .* device_blocks is 2"),
        ({"rules": "0.1"}, "rules is '0.1'"),
        ({"token_budget": 0}, "token_budget is 0"),
        ({"host_blocks": -1}, "host_blocks -1"),
    ],
)
def test_what_cannot_be_served_is_refused(changed: dict[str, Any], message: str) -> None:
    source = random_workload(5, 5, 60.0)
    server = Server(block_size=16, block_bytes=1, device_blocks=24, host_blocks=100)
    with pytest.raises(ValueError, match=message):
        run(source, replace(server, **changed))


def test_a_source_is_read_as_time_goes_on() -> None:
    """Nobody is read much before arriving and nothing is kept of who is through: a million fit as well."""
    read = 0

    class Watched:
        name, source, seed = "watched", "", 0

        def __iter__(self) -> Iterator[Request]:
            nonlocal read
            for request in random_workload(7, 400, 50.0).requests:
                read += 1
                yield replace(request, session="", think_s=None)

    server = Server(block_size=16, block_bytes=1, device_blocks=500, host_blocks=0)
    engine = engine_of(Watched(), server, "always-swap")
    assert read == 2
    engine.run()
    assert read == engine.tallied.summary(0.0).requests == 400
    assert not engine.arrivals._latest and not engine.arrivals._followers


def engine_of(source: Source, server: Server, name: str) -> Engine:
    victims = VllmVictims(server.scheduling)
    identity = Identity(source, policy.load(name), server, LINEAR, 0)
    return Engine(identity, TraceWriter("core", None), victims, True)


@pytest.mark.parametrize("watermark", [-0.1, 1.0, math.nan])
def test_a_watermark_that_is_no_share_is_refused(watermark: float) -> None:
    server = Server(block_size=16, block_bytes=1, device_blocks=24, host_blocks=0, watermark=watermark)
    with pytest.raises(ValueError, match=r"server\.watermark is .*, should be from 0, below 1"):
        Builtin().run(Workload("one", (Request(0.0, 5, 5),), 0), policy.load("always-recompute"), server, LINEAR)


def test_a_watermark_keeps_blocks_free_beside_running_requests() -> None:
    """A fifth of 21 blocks (the null block counted) is 4. The first prompt takes 10 of 20: alone, it need not leave
    any. The second would take 7 and leave 3: it waits until the first is through."""
    server = Server(block_size=16, block_bytes=1, device_blocks=20, host_blocks=0, prefix_caching=False)
    both = Workload("two", (Request(0.0, 150, 5), Request(0.0, 100, 5)), 0)
    for watermark, together in ((0.0, 2), (0.2, 1)):
        run = Builtin().run(
            both, policy.load("always-recompute"), replace(server, watermark=watermark), LINEAR, 0, MemorySink()
        )
        assert run.trace is not None
        assert max(row["running_requests"] for row in run.trace.rows("steps")) == together
