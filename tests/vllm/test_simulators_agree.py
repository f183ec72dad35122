"""The built-in simulator and vLLM's own scheduler do the same, step by step, over workloads drawn from seeds.

Compared are, for every step that computes: scheduled tokens of every request in vLLM's order, composition, running and
waiting requests, used blocks, victims, saves, loads, tokens computed again and by whose preemption, start and
duration; for every preemption its whole situation, probabilities, choice, action and reason, and its outcome; every
copy, every request, and the summary, with what was found of prompts. What may differ, and why:

- The number of steps that compute nothing, and so the numbers of all steps: an engine that waits looks around, and how
  often means nothing.
- ``outcomes.engine_s`` and ``others_delay_s``: the built-in engine knows them; a server's trace leaves them to
  `kvpolicy.attribution.offline`, and so does that of vLLM's scheduler.
- Ids of preemptions but for their number: they name the engine core.
- Times, by up to 1e-9 of themselves: sums of the same numbers in another order.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvpolicy.host_store.contents import HostCopy, rank_of
from kvpolicy.order import load
from kvpolicy.request_marks import NO_HINTS
from kvpolicy.simulator.builtin.scheduler import Scheduler
from kvpolicy.simulator.hardware.law_times import ConstantTimes
from tests.vllm import agreement, harness
from tests.vllm.agreement import (
    CACHES,
    Account,
    Case,
    account,
    cached,
    classed,
    crowded,
    differences,
    displaced,
    drawn,
    hinted,
    looped,
    ordered,
    priced,
    prompted,
    returned_before_newcomers,
    short_of_slots,
)
from tests.vllm.versions import quick_and_others, source_or_skip

pytestmark = [
    pytest.mark.scheduler,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),  # vLLM's own
]
REQUESTS = 30
SEEDS = (*range(16), 224, 276)
"""Every eight of the first have each combination of scheduling, prefix caching and asynchronous scheduling once; in the
last two somebody is preempted again before it is back."""
LOOPS = range(8)
"""Each combination of scheduling, prefix caching and asynchronous scheduling once."""
ORDERED = (*range(6), 19, *range(7, 13))
"""Each order once, each kind of case several times."""
PRICES = ("mlfq:base=4,victims=cheapest", "gittins:quantum=8", "mlfq:base=4,explore=.5,worth=price")
"""Orders under which prices are asked for, or only recorded."""
SHORT = (0, 1, 2, 3, 4, 7)
"""With and without prefix caching, with and without asynchronous scheduling; who is given up is another by length."""
TIED = (200, 212)
"""Orders that learn, over closed loops in which several arrive and several end at the same time."""
CLASSED = range(5)
"""Each order that heeds classes or deadlines once."""
CACHED = range(10)
"""Each caching policy twice, over large and small host memory, with policies that load all, some and nothing."""
HINTED = (1, 3, 4, 5)
"""The order that reads hints serves those with an odd number."""
CROWDS = range(4)
"""Each combination of prefix caching and asynchronous scheduling once."""


@pytest.mark.parametrize("seed", SEEDS)
def test_they_agree(seed: int) -> None:
    case = drawn(seed, REQUESTS)
    assert not differences(account("builtin", case), account("vllm", case))


@pytest.mark.parametrize("seed", LOOPS)
def test_they_agree_where_requests_wait_in_closed_loops(seed: int) -> None:
    """Somebody arrives later than by itself, because a loop is full."""
    case = looped(seed, REQUESTS)
    builtin = account("builtin", case)
    assert not differences(builtin, account("vllm", case))
    own_s = {number: request.arrival_s for number, request in enumerate(case.work) if request.loop}
    assert any(row["arrival_s"] > own_s.get(int(row["request"]), row["arrival_s"]) for row in builtin.rows("requests"))


@pytest.mark.parametrize("seed", ORDERED)
def test_they_agree_under_every_order(seed: int) -> None:
    """Somebody is displaced wherever the order may displace."""
    case = ordered(seed, REQUESTS)
    builtin = account("builtin", case)
    assert not differences(builtin, account("vllm", case))
    assert (displaced(builtin) > 0) == case.server.order.displaces_by_rank


@pytest.mark.parametrize("seed", CLASSED)
def test_they_agree_where_requests_say_what_they_are(seed: int) -> None:
    """Somebody is displaced, and requests of each class and with deadlines of their own are served."""
    case = classed(seed, REQUESTS)
    builtin = account("builtin", case)
    assert not differences(builtin, account("vllm", case))
    assert displaced(builtin) > 0
    rows = builtin.rows("requests")
    assert {row["class"] for row in rows} == {"default", "chat", "batch"}
    assert {row["ttft_deadline_s"] for row in rows} >= {None, 0.02, 0.2, 2.0}


@pytest.mark.parametrize("seed", CACHED)
def test_they_agree_with_a_cache_in_host_memory(seed: int) -> None:
    """On every hit, load, save and eviction: those that differ change what is found, or how long steps take."""
    case = cached(seed, REQUESTS)
    builtin = account("builtin", case)
    assert not differences(builtin, account("vllm", case))
    hits = builtin.run.summary.prefix_hits
    assert (hits.host_tokens > 0) == (case.policy != "always-recompute")
    assert (hits.loaded_tokens > 0) == any(row["direction"] == "load" for row in of_the_cache(builtin))


@pytest.mark.parametrize("seed", HINTED)
def test_they_agree_where_requests_say_what_of_their_kv_will_be_of_use(seed: int) -> None:
    """In host memory, and served by an order that reads hints: without them something else happens."""
    case = hinted(seed, REQUESTS)
    builtin = account("builtin", case)
    assert not differences(builtin, account("vllm", case))
    silent = [replace(request, hints=NO_HINTS) for request in case.work]
    assert differences(builtin, account("builtin", replace(case, work=replace(case.work, requests=tuple(silent)))))


def of_the_cache(told: Account) -> list[dict[str, Any]]:
    """Copies that no preempted request needs."""
    return [row for row in told.rows("transfers") if not row["preemption_id"]]


def test_the_cases_with_a_cache_have_what_is_to_be_compared() -> None:
    """Every caching policy, hits that are loaded and hits that are computed, and contents that give way to others."""
    cases = [cached(seed, REQUESTS) for seed in CACHED]
    assert {case.server.cache and case.server.cache.policy for case in cases} == set(CACHES)
    told = [account("builtin", case) for case in cases]
    hits = [one.run.summary.prefix_hits for one in told]
    assert any(one.loaded_tokens for one in hits) and any(one.loaded_tokens < one.host_tokens for one in hits)
    saved = [sum(row["bytes"] for row in of_the_cache(one) if row["direction"] == "save") for one in told]
    blocks = [bytes_ // case.server.block_bytes for bytes_, case in zip(saved, cases, strict=True)]
    assert any(count > 2 * case.server.host_blocks for count, case in zip(blocks, cases, strict=True))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("spec", PRICES)
def test_they_agree_on_what_displacing_somebody_would_cost(spec: str, seed: int) -> None:
    """And record it: every victim's price is known."""
    case = priced(spec, seed, REQUESTS)
    builtin = account("builtin", case)
    assert not differences(builtin, account("vllm", case))
    rows = builtin.rows("displacements")
    assert rows and all(one["price_s"] is not None for row in rows for one in row["candidates"])
    assert {row["absence_tokens"] is None for row in builtin.rows("decisions")} == {False}


@pytest.mark.parametrize("seed", SHORT)
def test_they_agree_on_whose_copy_is_given_up(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what it saves, which here is not what the number of its tokens says."""
    case = short_of_slots(seed, REQUESTS)
    builtin = account("builtin", case)
    assert not differences(builtin, account("vllm", case))
    monkeypatch.setattr(HostCopy, "rank", property(lambda copy: rank_of(copy.tokens, None)))
    assert differences(builtin, account("builtin", case))


@pytest.mark.parametrize("seed", range(6))
def test_they_agree_where_requests_sit_steps_out(seed: int) -> None:
    case = ordered(seed, REQUESTS, "python:tests.holds:Holds")
    told = account("builtin", case)
    assert not differences(told, account("vllm", case))
    free = replace(case, server=replace(case.server, order=load("urgent:quantum=2")))
    assert told.scheduled != account("builtin", free).scheduled


@pytest.mark.parametrize("spec", ["mlfq:base=4,cool=0.05", "urgent:cool=0.2", "python:tests.holds:Measured"])
@pytest.mark.parametrize("seed", [1, 2, 4])
def test_they_agree_where_requests_cool_down_or_are_ranked_by_levels(seed: int, spec: str) -> None:
    case = ordered(seed, REQUESTS, spec)
    told = account("builtin", case)
    assert not differences(told, account("vllm", case))
    assert displaced(told) > 0


@pytest.mark.parametrize("seed", range(8))
def test_they_agree_where_prompts_take_many_steps(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever decodes has its token before them: without that the schedule is another one."""
    case = prompted(seed)
    told = account("builtin", case)
    assert not differences(told, account("vllm", case))
    monkeypatch.setattr(Scheduler, "_put_decodes_first", lambda self: None)
    assert told.scheduled != account("builtin", case).scheduled


@pytest.mark.parametrize("seed", TIED)
def test_they_agree_on_who_came_first_and_who_ended_first(seed: int) -> None:
    case = ordered(seed, 60)
    assert not differences(account("builtin", case), account("vllm", case))


@pytest.mark.parametrize("seed", CROWDS)
def test_they_agree_where_newcomers_come_while_others_are_swapped(seed: int) -> None:
    """Who returns runs before those who came meanwhile."""
    case = crowded(seed)
    builtin = account("builtin", case)
    assert not differences(builtin, account("vllm", case))
    assert len(returned_before_newcomers(builtin)) >= 5


@pytest.mark.parametrize("version", quick_and_others())
def test_other_versions_agree_where_newcomers_come_while_others_are_swapped(version: str, tmp_path: Path) -> None:
    """First come, first served, every version does what the built-in simulator does by the rules of one."""
    environment = harness.environment() | {"KVPOLICY_VLLM_SOURCE": source_or_skip(version)}
    result = harness.run_module("tests.vllm.alone", {"crowds": list(CROWDS)}, tmp_path, environment)
    assert result["differences"] == []


def test_the_cases_have_what_is_to_be_compared() -> None:
    """Preemptions of both kinds, full and absent host pools, blocks that others hold, loads beyond a local hit."""
    told = [account("builtin", drawn(seed, REQUESTS)) for seed in SEEDS]
    decisions = [row for one in told for row in one.rows("decisions")]
    assert {"recompute", "swap"} == {row["executed"] for row in decisions}
    assert {"", "host_full"} <= {row["reason"] for row in decisions}
    assert any(row["shared_blocks"] for row in decisions) and any(row["hashed_blocks"] for row in decisions)
    assert any(row["shared_blocks"] < row["hit_blocks"] < row["hashed_blocks"] - 1 for row in decisions)
    requests = [row for one in told for row in one.rows("requests")]
    assert {row["class"] for row in requests} == {"default", "urgent"} and {0, 1, 2} == {
        row["priority"] for row in requests
    }
    outcomes = [row for one in told for row in one.rows("outcomes")]
    assert any(row["local_hit_tokens"] and row["loaded_tokens"] for row in outcomes)
    assert any(row["recomputed_tokens"] for row in outcomes) and any(row["ended"] == "superseded" for row in outcomes)


def changed(case: Case) -> list[Case]:
    """The same case with one thing a little different."""
    server = case.server
    return [
        replace(case, server=replace(server, device_blocks=server.device_blocks + 1)),
        replace(case, server=replace(server, token_budget=server.token_budget - 1)),
        replace(case, server=replace(server, watermark=0.1)),
        replace(case, times=ConstantTimes(2e-3, (1e-5, 2e-6, 1e-7, 1e-9, 1e-4, 1.01e-8), 1e-4, 2e9, 1e-6)),
        replace(case, seed=case.seed + 1),
    ]


def test_a_difference_is_seen() -> None:
    """One block, one token of budget, a hundredth of one coefficient, another coin."""
    case = replace(drawn(2, REQUESTS), policy="random:0.5")
    told: Account = account("builtin", case)
    for other in changed(case):
        assert differences(told, account("builtin", other))
    assert not differences(told, account("builtin", case)) and agreement.SAME_S < 1e-8
