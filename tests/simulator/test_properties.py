"""What holds for every workload on every server."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given

from kvpolicy import policy
from kvpolicy.simulator import Builtin, MemorySink, Server
from tests.simulator.random_runs import World, engine_of, few_worlds
from tests.simulator.worlds import LINEAR, random_workload, run, worlds


@few_worlds
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
    assert not engine.copies.watching and not engine.copies.waiting
    assert engine.copies.queued_bytes("save") == engine.copies.queued_bytes("load") == 0
    assert engine.present == 0 and not engine.scheduler.running and not engine.scheduler.waiting_requests
    assert not engine.scheduler._prefills and not engine.preemptions._closing and not len(engine.fast_path.batch)
    assert not engine.fast_path.batch.others
    assert engine.tallied.summary(0.0).requests == len(source)
    assert engine.tallied.output.tokens == sum(request.output_tokens for request in source)


@few_worlds
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


@few_worlds
@given(worlds())
def test_the_tables_tell_one_story(world: World) -> None:
    source, server, name = world
    result, trace = run(source, server, name)
    summary, requests, steps = result.summary, trace.rows("requests"), trace.rows("steps")
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


@few_worlds
@given(worlds())
def test_each_class_is_what_its_requests_rows_say(world: World) -> None:
    source, server, name = world
    result, trace = run(source, server, name)
    rows = trace.rows("requests")
    assert set(result.summary.classes) == {request.class_name for request in source}
    for class_name, told in result.summary.classes.items():
        mine = [row for row in rows if row["class"] == class_name]
        assert (told.requests, told.output_tokens) == (len(mine), sum(row["output_tokens"] for row in mine))
        e2e_s = np.array([row["last_token_s"] - row["arrival_s"] for row in mine])
        streamed_s = sum(row["last_token_s"] - row["first_token_s"] for row in mine)
        assert told.e2e_s.p99 == pytest.approx(np.quantile(e2e_s, 0.99))
        assert told.ttft_s.mean == pytest.approx(np.mean([row["first_token_s"] - row["arrival_s"] for row in mine]))
        if gaps := told.output_tokens - told.requests:
            assert told.itl_s.mean == pytest.approx(streamed_s / gaps)
        rates = np.array([row["output_tokens"] for row in mine]) / e2e_s
        assert told.fairness == pytest.approx(rates.sum() ** 2 / (len(rates) * (rates**2).sum()))
        assert told.makespan_s == max(row["last_token_s"] for row in mine) - min(row["arrival_s"] for row in mine)


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
    result, trace = run(source, server)
    seconds = [row["duration_s"] for row in trace.rows("steps")][1:]
    assert result.summary.itl_s.mean == pytest.approx(np.mean(seconds))
    assert result.summary.itl_s.p50 == pytest.approx(np.median(seconds), rel=5e-3)
    assert result.summary.itl_s.p99 == pytest.approx(max(seconds), rel=5e-3)
