"""The controller over vLLM's scheduler alone, where what goes wrong is made to; no engine is started."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.outputs import KVConnectorOutput

from kvpolicy import trace as traces
from kvpolicy.attribution import LiveCost
from kvpolicy.trace import Header
from kvpolicy_vllm.plugin.host_copies import FIRST_SUSPENSION_S, MAX_FAILURES_IN_A_ROW
from kvpolicy_vllm.plugin.messages import Transfer, Transfers
from kvpolicy_vllm.plugin.observers import MAX_FAILURES, Observer
from kvpolicy_vllm.plugin.situation import RunningView
from tests.vllm import alone, harness
from tests.vllm.symbolic import _failures
from tests.vllm.test_same_schedule import BASE

Answer = Callable[[Any], KVConnectorOutput | None]
REQUEST_ROW = {
    "request": "a", "arrival_s": 0.0, "first_token_s": None, "last_token_s": None, "prompt_tokens": 1,
    "output_tokens": 0, "preemptions": 0, "recomputed_tokens": 0, "loaded_tokens": 0, "finish": "abort",
}  # fmt: skip


class Engine:
    """Steps of a scheduler with a few requests; ``answer`` takes the place of what the worker says of copies.

    ``headers``: of the trace that every request belongs to; ``engine``: further engine arguments."""

    def __init__(self, model: str, headers: dict[str, str] | None = None, **engine: Any) -> None:
        job = BASE | {"model": model, "plugin": harness.plugin("always-swap"), "requests": 5, "blocks": 140}
        self.scheduler = alone.scheduler_for(job | {"budget": 512, "engine": engine})
        self.controller = self.scheduler.kvpolicy
        self._worker = alone.Worker(late=0)
        for request in alone.made_requests(job):
            request.trace_headers = headers
            self.scheduler.add_request(request)
        self.steps(6)

    def step(self, answer: Answer | None = None) -> Any:
        output = self.scheduler.schedule()
        jobs = output.kv_connector_metadata
        sampled = {name: not self.scheduler.requests[name].is_prefill_chunk for name in output.num_scheduled_tokens}
        result = self._worker.execute(output, sampled)
        if answer is not None:
            result.kv_connector_output = answer(jobs)
        self.scheduler.update_from_output(output, result)
        return jobs

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def preempt(self) -> str:
        victim = str(self.scheduler.running[0].request_id)
        self.scheduler.preempt_at_next_step(victim)
        return victim


@pytest.fixture
def engine(model: str) -> Engine:
    return Engine(model)


def broken(*arguments: Any) -> Any:
    raise ValueError("made up")


class Costs(Observer):
    """Who is told every cost; ``fails``: so many times with an error."""

    def __init__(self, fails: int = 0) -> None:
        self.executed: list[str | None] = []
        self._fails = fails

    def measured(self, cost: LiveCost) -> None:
        self._fails -= 1
        if self._fails >= 0:
            raise ValueError("made up")
        self.executed.append(cost.executed)


def test_one_failing_observation_does_not_end_measuring(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    alone.measure(engine.controller)
    for broken_part in ("kvpolicy.policy.Decider.decide", "kvpolicy.attribution.streaming.LiveCosts.step"):
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
            patch.setattr(broken_part, broken)
            engine.preempt()
            engine.step()
    assert "deciding failed" in caplog.text and "could not be measured" in caplog.text
    engine.preempt()
    engine.steps(30)
    stats = engine.controller.stats()
    assert harness.total(stats, "measuring_failed") == 1
    assert harness.total(stats, "fallbacks", reason="error") == 1, "only where something was recomputed for it"
    assert harness.total(stats, "measured_preemptions") > 0


def test_an_observer_that_fails_keeps_nobody_else(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    costs = [Costs(fails=1), Costs()]
    engine.controller.observers.add(*costs)
    alone.measure(engine.controller)
    for _ in range(2):
        engine.preempt()
        engine.steps(20)
    assert [cost.executed for cost in costs] == [["swap"], ["swap", "swap"]]
    assert caplog.text.count("following preemptions failed") == 1
    stats = engine.controller.stats()
    assert harness.total(stats, "measured_preemptions") == 2 and harness.total(stats, "measuring_failed") == 0


def test_an_observer_that_always_fails_is_given_up(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    always = Costs(fails=1000)
    engine.controller.observers.add(always)
    alone.measure(engine.controller)
    for _ in range(MAX_FAILURES + 2):
        engine.preempt()
        engine.steps(20)
    assert always.failures == MAX_FAILURES
    assert caplog.text.count("it is given up") == 1
    assert harness.total(engine.controller.stats(), "measured_preemptions") == MAX_FAILURES + 2


def test_measuring_is_given_up_where_it_never_works(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    alone.measure(engine.controller)
    monkeypatch.setattr("kvpolicy.attribution.streaming.LiveCosts.step", broken)
    engine.steps(2 * MAX_FAILURES)
    assert harness.total(engine.controller.stats(), "measuring_failed") == MAX_FAILURES
    assert caplog.text.count("no more costs are measured") == 1


def transfer(copy_id: int, direction: Any, ok: bool) -> Transfer:
    return Transfer(copy_id, direction, ok, 1, 1, 1, False, 0, 0.0, 0.0, 0.0, "" if ok else "made up")


def loads_fail(jobs: Any) -> KVConnectorOutput | None:
    """Every save is made, every load fails at once."""
    results = [transfer(job.copy_id, "save", True) for job in jobs.saves]
    results += [transfer(job.copy_id, "load", False) for job in jobs.loads]
    finished = {job.request_id for job in jobs.loads} or None
    return KVConnectorOutput(
        finished_recving=finished,
        kv_connector_worker_meta=Transfers(results) if results else None,
        **_failures([*jobs.loads]),
    )


def saves_fail(jobs: Any) -> KVConnectorOutput | None:
    results = [transfer(job.copy_id, "save", False) for job in jobs.saves]
    return KVConnectorOutput(kv_connector_worker_meta=Transfers(results)) if results else None


@pytest.mark.parametrize(("answer", "reason"), [(loads_fail, "load_failed"), (saves_fail, "save_failed")])
def test_what_a_failed_copy_cost_is_neither_options(engine: Engine, answer: Answer, reason: str) -> None:
    costs = Costs()
    engine.controller.observers.add(costs)
    alone.measure(engine.controller)
    engine.preempt()
    for _ in range(20):
        engine.step(answer)
    stats = engine.controller.stats()
    assert harness.total(stats, "fallbacks", reason=reason) == 1
    assert harness.total(stats, "resumed", executed="recompute") == 1
    assert harness.total(stats, "resumed", executed="swap") == 0
    assert harness.total(stats, "measured_preemptions") == 0 and costs.executed == []
    assert alone.accounts_left(engine.scheduler) == 0
    engine.preempt()
    engine.steps(20)
    stats = engine.controller.stats()
    assert costs.executed == ["swap"], "the next one counts"
    assert harness.total(stats, "measured_preemptions", executed="swap") == 1


def test_a_copy_that_vllm_would_not_load_was_a_recompute(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM 0.33 does where it collects routed experts: it asks, and then loads nothing."""
    monkeypatch.setattr(type(engine.controller), "loadable_tokens", lambda self, request, local_tokens: 0)
    alone.measure(engine.controller)
    engine.preempt()
    engine.steps(20)
    stats = engine.controller.stats()
    assert harness.total(stats, "fallbacks", reason="not_loaded") == 1
    assert harness.total(stats, "resumed", executed="recompute") == 1
    assert harness.total(stats, "measured_preemptions") == 0
    assert stats["host_slots_used"] == 0


@pytest.mark.parametrize(("answer", "reason"), [(loads_fail, "load_failed"), (saves_fail, "save_failed")])
def test_copies_that_keep_failing_suspend_swapping(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, answer: Answer, reason: str
) -> None:
    now = 0.0
    monkeypatch.setattr(engine.controller, "clock", lambda: now)

    def preempt_and_save() -> None:
        engine.preempt()
        for _ in range(6):
            engine.step(answer)

    for _ in range(MAX_FAILURES_IN_A_ROW):
        preempt_and_save()
    preempt_and_save()
    stats = engine.controller.stats()
    assert harness.total(stats, "fallbacks", reason=reason) == MAX_FAILURES_IN_A_ROW
    assert harness.total(stats, "fallbacks", reason="copies_failing") == 1
    assert caplog.text.count("of copy") == 1, "one warning, not one per copy"
    now = FIRST_SUSPENSION_S
    engine.preempt()
    engine.steps(20)
    assert harness.total(engine.controller.stats(), "resumed", executed="swap") == 1


def test_no_two_starts_draw_alike_and_the_header_says_what_was_drawn_from(model: str, tmp_path: Path) -> None:
    job = BASE | {"model": model, "blocks": 140, "budget": 512}
    job |= {"plugin": harness.plugin("random:0.5", seed=7, trace=str(tmp_path))}
    draws = []
    for _ in range(2):
        controller = alone.scheduler_for(job).kvpolicy
        controller.recorder.add("requests", REQUEST_ROW)
        controller.close()
        header = Header.read(tmp_path / controller.core / "header.json")
        assert header.seed == 7 and header.draw_seed is not None
        draws.append([controller.decider._rng.random() for _ in range(4)])
        again = random.Random(header.draw_seed)
        assert draws[-1] == [again.random() for _ in range(4)]
    assert draws[0] != draws[1]


def test_what_was_recorded_is_on_the_disk_soon_after_the_last_answer(model: str, tmp_path: Path) -> None:
    """Whatever ends the engine then: neither the two seconds of a part nor the end of the server is waited for."""
    job = BASE | {"model": model, "blocks": 140, "budget": 512, "requests": 3}
    scheduler = alone.scheduler_for(job | {"plugin": harness.plugin("always-swap", trace=str(tmp_path))})
    recorder = scheduler.kvpolicy.recorder
    recorder._part_s = 1e9
    worker = alone.Worker(late=0)
    for request in alone.made_requests(job):
        scheduler.add_request(request)
    while scheduler.has_requests():
        output = scheduler.schedule()
        sampled = {name: not scheduler.requests[name].is_prefill_chunk for name in output.num_scheduled_tokens}
        scheduler.update_from_output(output, worker.execute(output, sampled))
    patience = time.monotonic() + 60
    while not list(tmp_path.glob("*/requests/*.parquet")) and time.monotonic() < patience:
        time.sleep(0.01)
    assert traces.read(tmp_path).table("requests").num_rows == 3
    scheduler.kvpolicy.close()


def test_running_requests_are_looked_through_once_a_step(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[RunningView] = []
    views = RunningView

    def counted(*arguments: Any) -> RunningView:
        events.append(views(*arguments))
        return events[-1]

    monkeypatch.setattr("kvpolicy_vllm.plugin.controller.RunningView", counted)
    for request in list(engine.scheduler.running)[:3]:
        engine.scheduler.preempt_at_next_step(request.request_id)
    engine.step()
    assert harness.total(engine.controller.stats(), "preemptions") == 3
    assert len(events) == 1
    engine.steps(20)
    engine.preempt()
    engine.step()
    assert len(events) == 2


def test_a_load_that_fails_before_its_save_is_confirmed_settles_the_decision(engine: Engine) -> None:
    def only_the_load_fails(jobs: Any) -> KVConnectorOutput | None:
        if not jobs.loads:
            return None
        transfers = Transfers([transfer(job.copy_id, "load", False) for job in jobs.loads])
        finished = {job.request_id for job in jobs.loads}
        return KVConnectorOutput(
            finished_recving=finished, kv_connector_worker_meta=transfers, **_failures([*jobs.loads])
        )

    engine.preempt()
    (save,) = engine.step(only_the_load_fails).saves
    while not engine.step(only_the_load_fails).loads:
        pass
    late = Transfers([transfer(save.copy_id, "save", True)])
    engine.step(lambda jobs: KVConnectorOutput(kv_connector_worker_meta=late))
    engine.steps(20)
    stats = engine.controller.stats()
    assert not engine.controller.swaps.undecided
    assert harness.total(stats, "preemptions", executed="swap") == 1
    assert harness.total(stats, "fallbacks", reason="load_failed") == 1
    assert stats["host_slots_used"] == 0
