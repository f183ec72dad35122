"""The order of the running requests on vLLM's scheduler alone: what a load keeps, and when it begins."""

from __future__ import annotations

from collections import deque
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from kvpolicy.load_growth import LoadGrowth
from kvpolicy_vllm.plugin.running_order import RunningOrder
from tests.vllm import alone, harness
from tests.vllm.symbolic import Faults, SymbolicWorker
from tests.vllm.test_returning import asking_for
from tests.vllm.test_same_schedule import BASE

pytestmark = [
    pytest.mark.scheduler,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),  # vLLM's own
]
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
MAX_E2E_RATIO = 1.005


def order_after_a_load(model: str, fails: bool, scheduling: str = "fcfs") -> list[str]:
    """Requests 0, 1 and 2 run. 1 is preempted and comes back while 3 has been admitted: who runs then, in order."""
    job = BASE | {"model": model, "plugin": harness.plugin("always-swap"), "scheduling": scheduling}
    scheduler = alone.scheduler_for(job)
    requests = [asking_for(number, 50, 0) for number in range(4)]
    faults = Faults(saves_failing=0.0, loads_failing=float(fails), max_late_steps=0)
    worker = SymbolicWorker(scheduler, requests, alone.BLOCK, seed=0, faults=faults)
    script = {
        4: lambda: scheduler.preempt_at_next_step(requests[1].request_id),
        5: lambda: scheduler.add_request(requests[3]),
    }
    steps = 0

    def before_step() -> None:
        nonlocal steps
        steps += 1
        script.get(steps, lambda: None)()

    orders = []
    for _ in alone.drive(scheduler, deque(requests[:3]), worker.execute, False, before_step):
        orders.append([request.request_id for request in scheduler.running])
    assert harness.total(scheduler.kvpolicy.stats(), "fallbacks", reason="load_failed") == int(fails)
    return next(order for order in orders if len(order) == 4)


def test_a_loaded_request_is_back_where_it_was(model: str) -> None:
    assert order_after_a_load(model, fails=False) == ["r0", "r1", "r2", "r3"]


def test_one_whose_load_failed_is_recomputed_and_comes_last(model: str) -> None:
    assert order_after_a_load(model, fails=True) == ["r0", "r2", "r3", "r1"]


def test_under_priority_everybody_comes_last(model: str) -> None:
    assert order_after_a_load(model, fails=False, scheduling="priority") == ["r0", "r2", "r3", "r1"]


class Lookups(WeakKeyDictionary[Any, int]):
    """Counts its own look-ups."""

    count = 0

    def get(self, key: Any, default: Any = None) -> Any:
        self.count += 1
        return super().get(key, default)


class Running:
    """Can be referenced weakly, as vLLM's requests can."""


def test_a_place_among_thousands_is_found_with_few_lookups() -> None:
    """The step that admits a loaded request does not look at every running one."""
    scheduler = SimpleNamespace(policy=SimpleNamespace(value="fcfs"), running=[Running() for _ in range(4096)])
    order = RunningOrder(scheduler)
    order._numbers = lookups = Lookups()
    for request in scheduler.running:
        order.put_last(request)
    was_running = list(scheduler.running)
    order.preempted(was_running[0])
    scheduler.running = [*was_running[1:], was_running[0]]
    order.loaded(was_running[0])
    lookups.count = 0
    resumed = SimpleNamespace(resumed_req_ids={"first"})
    order.settle(SimpleNamespace(scheduled_new_reqs=[], scheduled_cached_reqs=resumed))
    assert scheduler.running == was_running
    assert lookups.count < 20


def loads_of(model: str, scheduling: str, expected_steps: int, steps: int = 16) -> list[tuple[int, int]]:
    """Of every load, as it begins: requests that run, and blocks that it leaves free. Each load takes ``steps`` steps,
    and before the first one ``expected_steps`` are expected."""
    job = BASE | {"model": model, "plugin": harness.plugin("always-swap"), "scheduling": scheduling}
    scheduler = alone.scheduler_for(job | {"blocks": 60})
    growth = scheduler.loaded_requests.growth
    growth.steps = expected_steps
    growth.ended(0)
    seen = []
    begins = scheduler.loaded_requests.load_begins

    def watched(request: Any) -> None:
        seen.append((len(scheduler.running), scheduler.kv_cache_manager.block_pool.get_num_free_blocks()))
        begins(request)

    scheduler.loaded_requests.load_begins = watched
    requests = alone.made_requests(job | {"requests": 40})
    worker = alone.Worker(late=steps)
    for _ in alone.drive(scheduler, deque(requests), worker.execute, False):
        pass
    assert {request.status for request in requests} == {RequestStatus.FINISHED_LENGTH_CAPPED}
    return seen


def test_a_load_leaves_the_blocks_that_the_running_requests_take_meanwhile(model: str) -> None:
    loads = loads_of(model, "fcfs", expected_steps=64, steps=64)
    assert len(loads) > 5
    assert all(free > 4 * running for running, free in loads if running), "a block each in 16 steps"


def test_a_load_that_would_leave_too_little_begins_when_nobody_runs(model: str) -> None:
    """However long it is expected to take; :func:`loads_of` asserts that all requests end."""
    loads = loads_of(model, "fcfs", expected_steps=10**6)
    assert loads[0][0] == 0 and len(loads) > 5


def test_steps_of_a_pause_are_not_taken_for_those_of_a_load(model: str) -> None:
    """Up to vLLM 0.31 no loaded request is admitted in a pause that lets the running ones go on. Loads after it would
    wait for as much memory as these take in a whole pause."""
    job = BASE | {"model": model, "plugin": harness.plugin("always-swap"), "requests": 2}
    scheduler, worker = alone.scheduler_for(job), alone.Worker(late=1)
    growth, counted, scheduled = scheduler.loaded_requests.growth, [], []
    states = [*[PauseState.UNPAUSED] * 3, *[PauseState.PAUSED_NEW] * 3, *[PauseState.UNPAUSED] * 1000]

    def before_step() -> None:
        scheduler.set_pause_state(states[len(counted)])
        counted.append(growth.steps)

    for output in alone.drive(scheduler, deque(alone.made_requests(job)), worker.execute, False, before_step):
        scheduled.append(output.total_num_scheduled_tokens)
    assert all(scheduled[:8])
    assert counted[:8] == [0, 1, 2, 3, 3, 3, 3, 4]


def test_under_priority_a_load_begins_as_vllm_has_it(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = loads_of(model, "priority", expected_steps=64, steps=64)
    monkeypatch.setattr(LoadGrowth, "blocks", lambda growth, running: 0)
    assert ours == loads_of(model, "priority", expected_steps=64, steps=64)
    assert any(free <= 4 * running for running, free in ours if running)


@pytest.mark.parametrize(("asynchronous", "prefix_caching"), [(False, True), (True, False)])
@pytest.mark.parametrize("engine", ["builtin", "vllm"])
def test_swapping_few_long_requests_costs_no_place(
    engine: str, asynchronous: bool, prefix_caching: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 requests of 2,048 + 2,048 tokens in 358 blocks: every newcomer is the next victim, and once."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    found = import_module("swap_place").figures("2k", "H100-SXM", engine, asynchronous, prefix_caching)
    assert found.e2e_ratio <= MAX_E2E_RATIO
    assert found.victims == [1, 2, 3, 4, 5, 6, 7]
