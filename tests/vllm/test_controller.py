"""The controller over vLLM's scheduler alone, where what goes wrong is made to; no engine is started."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.outputs import KVConnectorOutput

from kvpolicy_vllm.plugin.accounts import MOST_FAILURES
from kvpolicy_vllm.plugin.jobs import Transfer, Transfers
from tests.vllm import alone, harness
from tests.vllm.symbolic import _failures
from tests.vllm.test_same_schedule import BASE

Answer = Callable[[Any], KVConnectorOutput | None]


class Engine:
    """Steps of a scheduler with a few requests; ``answer`` takes the place of what the worker says of copies."""

    def __init__(self, model: str) -> None:
        job = BASE | {"model": model, "plugin": harness.plugin("always-swap"), "requests": 5, "blocks": 140}
        self.scheduler = alone.scheduler_for(job | {"budget": 512})
        self.controller = self.scheduler.kvpolicy
        self._worker = alone.Worker(late=0)
        for request in alone.made_requests(job):
            self.scheduler.add_request(request)
        self.steps(6)

    def step(self, answer: Answer | None = None) -> Any:
        output = self.scheduler.schedule()
        jobs = output.kv_connector_metadata
        sampled = {name: not self.scheduler.requests[name].is_prefill_chunk for name in output.num_scheduled_tokens}
        told = self._worker.execute(output, sampled)
        if answer is not None:
            told.kv_connector_output = answer(jobs)
        self.scheduler.update_from_output(output, told)
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


def test_one_failing_observation_does_not_end_measuring(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine.controller.accounts.measure_by(alone.STEP_TIME)
    for broken_part in ((engine.controller.judge, "decide"), (engine.controller.accounts, "done")):
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
            patch.setattr(*broken_part, broken)
            engine.preempt()
            engine.step()
    assert "deciding failed" in caplog.text and "could not be measured" in caplog.text
    engine.preempt()
    engine.steps(30)
    stats = engine.controller.stats()
    assert harness.total(stats, "measuring_failed") == 1
    assert harness.total(stats, "fallbacks", reason="error") == 1, "only where something was recomputed for it"
    assert harness.total(stats, "measured_preemptions") > 0


def test_a_cost_that_cannot_be_learned_from_is_dropped_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.controller.accounts.measure_by(alone.STEP_TIME)
    with monkeypatch.context() as patch:
        patch.setattr(engine.controller.judge, "learn", broken)
        engine.preempt()
        engine.steps(20)
    engine.preempt()
    engine.steps(20)
    stats = engine.controller.stats()
    assert harness.total(stats, "measuring_failed") == 1
    assert harness.total(stats, "measured_preemptions") == 2


def test_measuring_is_given_up_where_it_never_works(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine.controller.accounts.measure_by(alone.STEP_TIME)
    monkeypatch.setattr("kvpolicy.attribution.streaming.LiveCosts.step", broken)
    engine.steps(2 * MOST_FAILURES)
    assert harness.total(engine.controller.stats(), "measuring_failed") == MOST_FAILURES
    assert caplog.text.count("no more costs are measured") == 1


def test_a_load_that_fails_before_its_save_is_confirmed_settles_the_decision(engine: Engine) -> None:
    def transfer(copy_id: int, direction: Any, ok: bool) -> Transfer:
        return Transfer(copy_id, direction, ok, 1, 1, 1, False, 0, 0.0, 0.0, 0.0)

    def only_the_load_fails(jobs: Any) -> KVConnectorOutput | None:
        if not jobs.loads:
            return None
        told = Transfers([transfer(job.copy_id, "load", False) for job in jobs.loads])
        finished = {job.request_id for job in jobs.loads}
        return KVConnectorOutput(finished_recving=finished, kv_connector_worker_meta=told, **_failures([*jobs.loads]))

    engine.preempt()
    (save,) = engine.step(only_the_load_fails).saves
    while not engine.step(only_the_load_fails).loads:
        pass
    late = Transfers([transfer(save.copy_id, "save", True)])
    engine.step(lambda jobs: KVConnectorOutput(kv_connector_worker_meta=late))
    engine.steps(20)
    stats = engine.controller.stats()
    assert not engine.controller._undecided
    assert harness.total(stats, "preemptions", executed="swap") == 1
    assert harness.total(stats, "fallbacks", reason="load_failed") == 1
    assert stats["host_slots_used"] == 0
