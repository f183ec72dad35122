"""A request that was loaded holds its blocks: it must get its turn, and soon.

Below vLLM 0.31 a request that finds no memory ends the scan of the waiting ones; where it stands before those that
were loaded and hold the memory, nothing is scheduled any more. On every version a request loses its place in the
batch when it is preempted, and gets one again only when it has been loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("vllm")

from vllm.v1.request import RequestStatus

from kvpolicy_vllm.plugin.loaded_requests import MAX_IDLE_STEPS, LoadedRequests
from tests.vllm import soak
from tests.vllm.setups import Setup
from tests.vllm.test_soak import PRESSED
from tests.vllm.versions import FETCHED_BY_MAKE, INSTALLED, quick_and_others, source_or_skip

pytestmark = pytest.mark.scheduler

LOCKED_OUT: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "by a better priority": ({"scheduling": "priority"}, (1, 3, 47, 48)),
    "by one that waited for an adapter": ({"adapters": 4}, (2, 7, 8, 12)),
    "by one that waited for its grammar": ({"grammars": True}, (63, 86, 142)),
}
"""What stands before the loaded ones, and seeds at which an engine of vLLM 0.30 stood still for good."""
FAILED_LOADS = (1040, 1122)
"""Seeds at which it stood still because memory was kept free for a request whose load had failed."""
POLICIES = ("always-swap", "always-recompute")

PLACES: dict[str, dict[str, Any]] = {
    "4 places": {"max_running": 4, "spare_blocks": 20, "max_prompt_tokens": 100},
    "8 places": {"max_running": 8, "spare_blocks": 70, "max_prompt_tokens": 30},
}
"""Memory and places in the batch run out at about the same load."""
PLACE_SEEDS = range(3)


def locked_out(before: str) -> list[Setup]:
    fixed, seeds = LOCKED_OUT[before]
    return [Setup.draw(seed, **PRESSED | fixed) for seed in seeds]


def after_failed_loads() -> list[Setup]:
    return [Setup.draw(seed, scheduling="priority", copies_fail=True, pauses=True) for seed in FAILED_LOADS]


def contended(places: str, policy: str) -> list[Setup]:
    fixed = PRESSED | PLACES[places] | {
        "policy": policy, "asynchronous": False, "prefix_caching": False, "token_budget": 2048, "ranks": 1,
        "host_gib": 0.25, "max_output_tokens": 400, "stops": False, "max_late_steps": 4,
    }  # fmt: skip
    return [Setup.draw(seed, **fixed) for seed in PLACE_SEEDS]


Outcomes = Callable[[list[Setup]], list[dict[str, Any]]]


@pytest.fixture(scope="module", params=quick_and_others(INSTALLED, FETCHED_BY_MAKE))
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Of all schedules here, run in one process for each version: importing vLLM takes as long as many of them."""
    source_or_skip(request.param)
    setups = [setup for before in LOCKED_OUT for setup in locked_out(before)]
    setups += [setup for places in PLACES for policy in POLICIES for setup in contended(places, policy)]
    setups += after_failed_loads()
    done = soak.run(request.param, setups, tmp_path_factory.mktemp("loaded"))
    by_setup = {outcome["setup"]: outcome for outcome in done.outcomes}
    return lambda wanted: [by_setup[repr(setup)] for setup in wanted]


@pytest.mark.parametrize("before", LOCKED_OUT)
def test_nobody_is_locked_out_by_those_who_wait_for_their_memory(before: str, outcomes: Outcomes) -> None:
    for outcome in outcomes(locked_out(before)):
        assert outcome["problems"] == [], outcome["setup"]


def test_no_memory_is_kept_for_a_request_whose_load_failed(outcomes: Outcomes) -> None:
    for outcome in outcomes(after_failed_loads()):
        assert outcome["problems"] == [], outcome["setup"]


@pytest.mark.parametrize("places", PLACES)
def test_a_loaded_request_finds_a_place_in_the_batch(places: str, outcomes: Outcomes) -> None:
    """Newcomers do not take it meanwhile: it would hold its blocks for nothing, and others be preempted for them."""
    swapped, recomputed = (outcomes(contended(places, policy)) for policy in POLICIES)
    assert all(outcome["problems"] == [] for outcome in swapped + recomputed)
    waits = sorted(wait for outcome in swapped for wait in outcome["waits"])
    assert len(waits) > 80
    assert waits[len(waits) * 9 // 10] <= 1, "steps that loaded requests waited, 90th percentile"
    preemptions = [sum(outcome["preemptions"] for outcome in some) for some in (swapped, recomputed)]
    assert preemptions[0] <= 1.15 * preemptions[1], "preemptions with swap and with recompute"


class Scheduler:
    """What of a scheduler with nobody running is looked at, and who had to give up what was loaded."""

    block_size, max_num_running_reqs, ordering, policy = 16, 8, None, SimpleNamespace(value="fcfs")

    def __init__(self) -> None:
        self.running: list[str] = []
        self.finished_recving_kv_req_ids: set[str] = set()
        self.gave_up: list[str] = []

    def give_up_loaded(self, request: Any) -> None:
        self.gave_up.append(request.request_id)


def test_where_all_who_were_loaded_wait_for_each_other_the_last_one_gives_its_blocks_back() -> None:
    """Found by a drawn schedule: the first one lacked a block, the other had all that it needed, and nobody ran."""
    scheduler = Scheduler()
    loaded = LoadedRequests(cast("Any", scheduler))
    remote, preempted = RequestStatus.WAITING_FOR_REMOTE_KVS, RequestStatus.PREEMPTED
    for name, status in (("first", preempted), ("second", remote)):
        loaded.requests[name] = SimpleNamespace(request_id=name, status=status, num_computed_tokens=160)
    for _ in range(2 * MAX_IDLE_STEPS):
        loaded.settle(0)
    assert scheduler.gave_up == [], "the second one is still being loaded"
    scheduler.finished_recving_kv_req_ids.add("second")
    for scheduled, running in ((1, []), (0, ["third"])):
        scheduler.running = running
        for _ in range(MAX_IDLE_STEPS):
            loaded.settle(0 if running else scheduled)
    scheduler.running = []
    for _ in range(MAX_IDLE_STEPS):
        loaded.settle(0)
    assert scheduler.gave_up == []
    loaded.settle(0)
    assert scheduler.gave_up == ["second"]
    del loaded.requests["second"]
    for _ in range(2 * MAX_IDLE_STEPS):
        loaded.settle(0)
    assert scheduler.gave_up == ["second"], "one alone has what it needs"
