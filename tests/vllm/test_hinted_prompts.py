"""Hints that requests bring reach the cache of prompts in host memory, on vLLM's scheduler alone."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.request import RequestStatus

from kvpolicy.caching import Hinted
from kvpolicy.settings import GIB
from tests.vllm import harness
from tests.vllm.test_faults import BLOCK_BYTES
from tests.vllm.test_prompt_cache import PROMPT, Served, one_step

pytestmark = [pytest.mark.scheduler, pytest.mark.feature("hints about KV")]
OTHER = [*range(300, 400)]
"""As long as PROMPT: six blocks of 16 tokens and a part of a seventh."""


def hinted(served: Served, prompt: list[int], cache_salt: str | None = None, **hints: Any) -> Any:
    request = served.request(prompt, cache_salt=cache_salt)
    request.kv_transfer_params = {"kvpolicy": hints}
    return request


def fill_host(served: Served) -> None:
    """Other prompts take all of host memory, twice."""
    pool = served.controller.copies.pool
    while harness.total(served.controller.stats(), "cache_blocks", event="stored") < 3 * pool.total:
        served.push_out()


@pytest.fixture
def served(model: str, monkeypatch: pytest.MonkeyPatch) -> Served:
    plugin = harness.plugin
    small = {"host_gib": 60.5 * BLOCK_BYTES / GIB}
    monkeypatch.setattr(harness, "plugin", lambda policy, **extra: plugin(policy, **extra, **small))
    return Served(model)


def test_what_is_to_be_kept_outlasts_what_is_not(served: Served) -> None:
    served.serve(hinted(served, PROMPT, keep_s=500), hinted(served, OTHER))
    fill_host(served)
    assert served.found(served.request([*PROMPT, 1])) == 96
    assert served.found(served.request([*OTHER, 1])) == 0


def test_a_pin_holds_the_shared_prefix_alone(served: Served) -> None:
    served.serve(hinted(served, PROMPT, pin=40))
    fill_host(served)
    assert served.found(served.request(PROMPT)) == 32


def test_a_preempted_request_holds_its_window_while_it_is_away(served: Served) -> None:
    """Nothing of it was there when it came."""
    request, cache = hinted(served, PROMPT, keep_s=500), served.controller.copies.pool.cache
    assert isinstance(cache, Hinted)
    served.scheduler.add_request(request)
    one_step(served)
    assert request.num_computed_tokens == 100 and cache.held_blocks == 0
    served.scheduler.preempt_at_next_step(request.request_id)
    one_step(served)
    assert request.num_preemptions == 1 and cache.held_blocks == 6
    served.serve()
    assert request.num_output_tokens == 4 and cache.held_blocks == 6


def test_of_a_request_that_nobody_repeats_nothing_is_stored(served: Served) -> None:
    served.serve(hinted(served, PROMPT, once=True), hinted(served, OTHER, once=True, pin=32))
    served.push_out()
    assert served.found(served.request(PROMPT)) == 0
    assert served.found(served.request(OTHER)) == 32


def test_the_window_of_a_session_that_is_over_goes_first(served: Served) -> None:
    served.serve(hinted(served, PROMPT, session="a", keep_s=500))
    served.push_out()
    assert served.found(served.request(PROMPT)) == 96
    served.serve(hinted(served, [*PROMPT, 1], session="a", ended=True))
    pool = served.controller.copies.pool
    while pool.free and pool.cached < pool.total:
        served.push_out()
    before = harness.total(served.controller.stats(), "cache_blocks", event="evicted")
    while harness.total(served.controller.stats(), "cache_blocks", event="evicted") < before + 6:
        served.push_out()
    assert served.found(served.request(PROMPT)) == 0


def test_a_request_that_is_cancelled_holds_what_there_is_of_its_window(served: Served) -> None:
    """Of a first turn what it, or anybody, has computed, and of a later one that waits the turns before it."""
    cache = served.controller.copies.pool.cache
    assert isinstance(cache, Hinted)

    def cancelled(prompt: list[int], session: str, steps: int = 0) -> int:
        """How many blocks are held by then, and how many after it."""
        request = hinted(served, prompt, session=session, keep_s=500)
        served.scheduler.add_request(request)
        for _ in range(steps):
            one_step(served)
        served.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
        return cache.held_blocks

    assert cancelled(PROMPT, "a") == 0
    served.serve(hinted(served, PROMPT, session="a", keep_s=500))
    assert cancelled([*PROMPT, *OTHER], "a") == 6
    served.push_out()
    assert cancelled([*PROMPT, *OTHER], "a") == 6, "they are in host memory"
    served.scheduler.add_request(served.request(OTHER))
    one_step(served)
    assert cancelled(OTHER, "b") == 6 + 6, "a request that runs has computed them"
    served.serve()
    served.scheduler.max_num_scheduled_tokens = 40
    assert cancelled([*range(600, 700)], "c", steps=1) == 12 + 2
    assert harness.total(served.controller.stats(), "hints_failed") == 0


def test_nobody_holds_back_more_than_its_share(served: Served) -> None:
    pool = served.controller.copies.pool
    for first in range(0, 900, 100):
        served.serve(hinted(served, [*range(first, first + 100)], keep_s=500))
    fill_host(served)
    kept = sum(served.found(served.request([*range(at, at + 100)])) for at in range(0, 900, 100))
    assert 0 < kept <= pool.total // 4 * 16


def test_a_session_outlasts_one_of_its_name_with_another_salt(served: Served) -> None:
    served.serve(hinted(served, PROMPT, "anne", session="s", keep_s=500))
    served.serve(hinted(served, OTHER, "ben", session="s"), hinted(served, OTHER, "ben", session="s", ended=True))
    served.serve(hinted(served, OTHER, session="s", ended=True))
    fill_host(served)
    assert served.found(served.request([*PROMPT, 1], cache_salt="anne")) == 96
    served.serve(hinted(served, OTHER, "anne", session="s", ended=True))
    fill_host(served)
    assert served.found(served.request([*PROMPT, 1], cache_salt="anne")) == 0


def test_nobody_with_a_salt_holds_back_more_than_a_clients_share(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 121 blocks 30 are a class's and 6, as many as a prompt has, a client's."""
    plugin = harness.plugin
    limits = {"host_gib": 60.5 * BLOCK_BYTES / GIB, "hints": "client=0.05"}
    monkeypatch.setattr(harness, "plugin", lambda policy, **extra: plugin(policy, **extra, **limits))
    served = Served(model)
    prompts = [[*range(first, first + 100)] for first in range(0, 400, 100)]
    served.serve(hinted(served, prompts[0], "anne", keep_s=500))
    for prompt in prompts[1:]:
        served.serve(hinted(served, prompt, "ben", keep_s=500))
    fill_host(served)
    found = [served.found(served.request([*prompt, 1], cache_salt="ben")) for prompt in prompts]
    assert found == [0, 0, 0, 96] and served.found(served.request([*prompts[0], 1], cache_salt="anne")) == 96


def test_hints_that_cannot_be_read_are_counted_and_change_nothing(served: Served) -> None:
    request = hinted(served, PROMPT, pin=-3)
    served.serve(request, hinted(served, OTHER, keep_s=1e6))
    served.push_out()
    assert request.num_output_tokens == 4
    assert served.found(served.request(PROMPT)) == served.found(served.request(OTHER)) == 96
    stats = served.controller.stats()
    assert harness.total(stats, "invalid_marks", reason="pin") == 1
    assert harness.total(stats, "clamped_marks", mark="keep_s") == 1
