"""Who returns by a load keeps its place among the running, and is admitted before anybody who holds nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import count, islice
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.v1.request import Request, RequestStatus

from kvpolicy_vllm.plugin.loaded_requests import LoadedRequests
from tests.vllm import alone, harness
from tests.vllm.disturbances import loaded_and_waiting
from tests.vllm.symbolic import Faults, SymbolicWorker
from tests.vllm.test_same_schedule import BASE

pytestmark = pytest.mark.scheduler

PLACES = 3
EVERY_LOAD_FAILS = Faults(saves_failing=0.0, loads_failing=1.0, max_late_steps=0)


def steps_of(model: str, scheduling: str) -> tuple[list[tuple[int, int, int]], dict[str, float]]:
    """Per step, after it was scheduled: running, being loaded, loaded and waiting. Few places, loads take 5 steps."""
    job = BASE | {"model": model, "plugin": harness.plugin("always-swap"), "scheduling": scheduling}
    job |= {"requests": 24, "blocks": 80, "budget": 512, "sequences": PLACES}
    scheduler, worker = alone.scheduler_for(job), alone.Worker(late=5)
    for request in alone.made_requests(job):
        scheduler.add_request(request)
    seen = []
    while scheduler.has_requests():
        if len(seen) % 7 == 3 and scheduler.running:
            scheduler.preempt_at_next_step(scheduler.running[0].request_id)
        output = scheduler.schedule()
        sampled = {name: not scheduler.requests[name].is_prefill_chunk for name in output.num_scheduled_tokens}
        seen.append(occupation(scheduler))
        scheduler.update_from_output(output, worker.execute(output, sampled))
    return seen, scheduler.kvpolicy.stats()


def occupation(scheduler: Any) -> tuple[int, int, int]:
    requests = scheduler.requests.values()
    loading = sum(request.status == RequestStatus.WAITING_FOR_REMOTE_KVS for request in requests)
    return len(scheduler.running), loading, loaded_and_waiting(scheduler)


@pytest.mark.parametrize("scheduling", ["fcfs", "priority"])
def test_newcomers_wait_for_whoever_is_being_loaded(model: str, scheduling: str) -> None:
    seen, stats = steps_of(model, scheduling)
    assert harness.total(stats, "loaded_tokens") > 0
    assert any(loading and running + loading == PLACES for running, loading, _ in seen), "no place was ever held"
    over = [step for step in seen if sum(step) > PLACES]
    assert not over, f"{len(over)} of {len(seen)} steps with more than {PLACES} running, being loaded and loaded"


class Adapter:
    def __init__(self, number: int) -> None:
        self.lora_int_id = number


class Waiting:
    """Loaded, and not yet admitted."""

    status = RequestStatus.PREEMPTED
    num_computed_tokens = 32

    def __init__(self, name: str, adapter: int | None) -> None:
        self.request_id = name
        self.lora_request = None if adapter is None else Adapter(adapter)


class Scheduler:
    """As much as decides how many may run: two adapters at once, and both are taken."""

    block_size = 16
    max_num_running_reqs = 8
    finished_recving_kv_req_ids = failed_recving_kv_req_ids = frozenset[str]()

    class lora_config:  # noqa: N801  # vLLM's name
        max_loras = 2

    def __init__(self) -> None:
        self.running = [Waiting("a", 1), Waiting("b", 2)]


def test_a_loaded_request_without_a_slot_for_its_adapter_keeps_its_place() -> None:
    scheduler = Scheduler()
    returning = LoadedRequests(scheduler)
    for name, adapter in (("other", 3), ("same", 1), ("none", None)):
        returning.requests[name] = Waiting(name, adapter)
    returning.hold_places()
    assert scheduler.max_num_running_reqs == 7, "vLLM passes over the one with another adapter alone"
    returning.give_places()
    assert scheduler.max_num_running_reqs == 8
    scheduler.running.pop()
    returning.hold_places()
    assert scheduler.max_num_running_reqs == 8, "a slot is free"


def test_the_limit_is_as_configured_after_every_step(model: str) -> None:
    job = BASE | {"model": model, "plugin": harness.plugin("always-swap"), "requests": 6, "blocks": 200}
    scheduler, worker = alone.scheduler_for(job | {"sequences": PLACES, "budget": 512}), alone.Worker(late=5)
    for request in alone.made_requests(job):
        scheduler.add_request(request)
    limit = scheduler.loaded_requests._limit
    for number in range(30):
        if number == 3:
            scheduler.preempt_at_next_step(scheduler.running[0].request_id)
        output = scheduler.schedule()
        sampled = {name: not scheduler.requests[name].is_prefill_chunk for name in output.num_scheduled_tokens}
        scheduler.update_from_output(output, worker.execute(output, sampled))
        assert getattr(scheduler, limit) == PLACES


def asking_for(number: int, prompt_tokens: int, priority: int, adapter: int = 0) -> Request:
    parameters = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    lora = LoRARequest(f"adapter-{adapter}", adapter, "/nowhere") if adapter else None
    return alone.made_request(number, [5] * prompt_tokens, parameters, priority=priority, lora_request=lora)


def test_a_request_whose_load_failed_keeps_no_memory_from_others(model: str) -> None:
    """It has given its blocks back and waits for a slot for its adapter. Whoever comes before it is to be loaded too,
    and fits only where no memory is kept for the first."""
    job = BASE | {"model": model, "plugin": harness.plugin("always-swap"), "scheduling": "priority", "blocks": 21}
    scheduler = alone.scheduler_for(job | {"engine": {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 2}})
    first, in_its_slot, better = (
        asking_for(0, 200, 1, adapter=1),
        asking_for(1, 20, 2, adapter=2),
        asking_for(2, 200, 0),
    )
    worker = SymbolicWorker(scheduler, [first, in_its_slot, better], alone.BLOCK, seed=0, faults=EVERY_LOAD_FAILS)
    script: dict[int, Callable[[], None]] = {
        3: lambda: scheduler.preempt_at_next_step(first.request_id),
        4: lambda: scheduler.add_request(in_its_slot),
        6: lambda: scheduler.add_request(better),
        8: lambda: scheduler.preempt_at_next_step(better.request_id),
    }
    numbers = count(1)

    def before_step() -> None:
        script.get(next(numbers), lambda: None)()

    steps = alone.drive(scheduler, deque([first]), worker.execute, False, before_step)
    assert len(list(islice(steps, 100))) < 100, f"still waiting after 100 steps: {', '.join(scheduler.requests)}"
    assert harness.total(scheduler.kvpolicy.stats(), "fallbacks", reason="load_failed") == 2
    assert not worker.found()["wrong"]
