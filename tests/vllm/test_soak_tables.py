"""Drawn schedules over several block tables, windows and states: in orders of service, under priorities, with resets,
pauses, aborts, forced preemptions and copies that fail or come late.

vLLM's scheduler alone drives the worker of `tests.vllm.symbolic`: every entry of every window and every state that a
step reads is compared with what has to be there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from kvpolicy_vllm.plugin.scheduler import PolicyHooks
from tests.vllm import fuzz, soak
from tests.vllm.kv_caches import kv_cache
from tests.vllm.models import write_llama
from tests.vllm.setups import KINDS, ORDERS, UNRULY, Setup
from tests.vllm.versions import INSTALLED, skip_before_tables, source_or_skip

pytestmark = pytest.mark.scheduler

FAMILIES = ("two-full", "window", "full-window", "full-windows", "two-sizes", "full-states", "full-chunks")
TIGHT: dict[str, Any] = {"spare_blocks": 2, "requests": 60}
CASES: dict[str, dict[str, Any]] = {
    "as drawn": {},
    "in an order": TIGHT | {"scheduling": "fcfs"},
    "under priorities": TIGHT | {"scheduling": "priority", "prefix_caching": True, "harried": True},
    "with resets": TIGHT | {"resets": "weights", "harried": True, "copies_fail": True},
    "with pauses": TIGHT | {"pauses": True, "harried": True, "copies_fail": True, "resets": "cache"},
}
JUST_SCHEDULED: dict[str, Any] = {
    "scheduling": "priority", "asynchronous": False, "prefix_caching": True, "dense": True, "token_budget": 2048,
    "max_running": 16, "spare_blocks": 2, "ranks": 1, "policy": "random:0.7", "requests": 60, "max_prompt_tokens": 100,
    "max_output_tokens": 200, "stops": False, "adapters": 0, "grammars": False, "copies_fail": True, "harried": True,
    "resets": "none", "reserves_whole": False, "long_prefill": 40, "throttled": False, "pictures": 0,
}  # fmt: skip
"""Requests that have just been scheduled are preempted."""
FEW, MANY = range(2), range(2, 22)
"""Seeds of each family and case."""
RULED = [order for order in ORDERS if order not in UNRULY]


def setups(seeds: range, layers: str, case: str) -> list[Setup]:
    """Orders are those that ship, one after the other, so that few seeds meet many."""
    first = len(CASES) * FAMILIES.index(layers) + [*CASES].index(case)
    orders = {"order": RULED} if case == "in an order" else {}
    return [
        Setup.draw(
            seed,
            layers=layers,
            **CASES[case],
            **{name: values[(first + seed) % len(values)] for name, values in orders.items()},
        )
        for seed in seeds
    ]


Outcomes = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(
    scope="module",
    params=[
        (INSTALLED, FEW),
        pytest.param((INSTALLED, MANY), marks=pytest.mark.slow),
        pytest.param(("0.33.0", MANY), marks=pytest.mark.slow),
    ],
    ids=["few", "many", "many on 0.33.0"],
)
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Of all schedules here, run in one process for each version."""
    version, seeds = request.param
    if version == INSTALLED:
        skip_before_tables("several block tables are")
    source_or_skip(version)
    drawn = {layers: [setup for case in CASES for setup in setups(seeds, layers, case)] for layers in FAMILIES}
    done = soak.run(version, [setup for some in drawn.values() for setup in some], tmp_path_factory.mktemp("tables"))
    assert not done.failed, "\n".join([str(done), *done.replays()])
    by_setup = {outcome["setup"]: outcome for outcome in done.outcomes}
    return lambda layers: [by_setup[repr(setup)] for setup in drawn[layers]]


@pytest.mark.parametrize("layers", FAMILIES)
def test_blocks_that_no_step_has_computed_are_found_in_no_table(layers: str, tmp_path: Path) -> None:
    """Under priority scheduling vLLM preempts requests that it has just scheduled. What that step was to fill is taken
    out of the prefix cache in the tables of all groups, and nothing else is."""
    seed = 249 if layers in ("window", "two-sizes") else 248  # one with such blocks in every table
    made = fuzz.Schedule(Setup.draw(seed, layers=layers, **JUST_SCHEDULED), write_llama(tmp_path))
    scheduler = made.scheduler
    withdraw, sizes = scheduler._withdraw_uncomputed, [16 * (1 + (kind == "wide")) for kind in KINDS[layers]]
    withdrawn: Counter[int] = Counter()

    def hashed(request: Any) -> list[set[int]]:
        """Of each table: indices of the blocks that can be found."""
        tables = scheduler.kv_cache_manager.get_blocks(request.request_id).blocks
        return [
            {i for i, block in enumerate(table) if block.block_hash is not None and not block.is_null}
            for table in tables
        ]

    def watched(request: Any) -> None:
        before = hashed(request)
        withdraw(request)
        for group, (was, is_now) in enumerate(zip(before, hashed(request), strict=True)):
            computed_blocks = request.num_computed_tokens // sizes[group]
            assert is_now == {index for index in was if index < computed_blocks}
            withdrawn[group] += len(was - is_now)

    scheduler._withdraw_uncomputed = watched
    made.run()
    assert made.outcome().problems == ()
    assert set(withdrawn) == set(range(len(sizes))) and min(withdrawn.values()) > 0, withdrawn


@pytest.mark.parametrize(("computed_tokens", "found_tokens"), [(40, 0), (48, 48), (60, 48)])
def test_the_end_of_a_prompt_that_is_found_by_a_part_of_its_block_stays(
    computed_tokens: int, found_tokens: int
) -> None:
    """Blocks of 32 tokens, hashes of 16: of a prompt of 60 tokens vLLM enters the first 48. A preemption takes them out
    only before they are computed, as those who come with the same prompt find them on stock vLLM."""
    skip_before_tables("several block tables are")
    init_none_hash(sha256)
    cache, hasher = kv_cache("full-states", 20, 32, caching=True), get_request_block_hasher(16, sha256)
    manager = KVCacheManager(cache, 2048, 32, 16, enable_caching=True)
    victim, other = (
        Request(name, list(range(60)), SamplingParams(max_tokens=1), None, block_hasher=hasher)
        for name in ("victim", "other")
    )
    assert manager.allocate_slots(victim, 48) is not None
    if computed_tokens > 48:  # in a step of its own, as vLLM schedules what is behind the hashes of a prompt
        victim.num_computed_tokens = 48
        assert manager.allocate_slots(victim, 12) is not None
    victim.num_computed_tokens = computed_tokens
    assert manager.get_computed_blocks(other)[1] == 48
    scheduler: Any = SimpleNamespace(kv_cache_manager=manager, kv_cache_config=cache)
    PolicyHooks._withdraw_uncomputed(scheduler, victim)
    manager.free(victim)
    assert manager.get_computed_blocks(other)[1] == found_tokens


@pytest.mark.feature("several KV cache groups")
@pytest.mark.feature("an order of service over several KV cache groups")
@pytest.mark.feature("priority scheduling over several KV cache groups")
@pytest.mark.feature("resets of the prefix cache")
@pytest.mark.feature("pauses and sleep")
@pytest.mark.soak
@pytest.mark.parametrize("layers", FAMILIES)
def test_drawn_schedules_of_every_family_are_clean(layers: str, outcomes: Outcomes) -> None:
    done = outcomes(layers)
    assert sum(outcome["swaps"] for outcome in done) > 40
    displaced = sum(outcome["displaced"] for outcome in done)
    assert displaced > 20
