"""What vLLM asks before it admits a request: told without asking it, and right on all versions."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams

from kvpolicy_vllm.plugin import admission
from kvpolicy_vllm.plugin.admission import Admission
from tests.vllm import alone, fuzz, soak
from tests.vllm.models import write_llama
from tests.vllm.setups import Setup
from tests.vllm.test_ordering import ORDERED
from tests.vllm.versions import FETCHED_BY_MAKE, INSTALLED, quick_and_others, source_or_skip

pytestmark = pytest.mark.scheduler

BESIDES: tuple[dict[str, Any], ...] = (
    {"reserves_whole": False, "token_budget": 48}, {"reserves_whole": False, "long_prefill": 40}, {"long_prefill": 40},
    {"sessions": True, "asynchronous": False, "max_running": 4}, {"throttled": True},
)  # fmt: skip
NO_PREFIX_CACHE: dict[str, Any] = {
    "kv_cache_manager": SimpleNamespace(enable_caching=False),
    "kvpolicy": SimpleNamespace(loadable_tokens=lambda request, local_tokens: 0),
}
PLAIN = {"sessions": False, "reserves_whole": True, "long_prefill": 0, "throttled": False}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("model"))


def schedule(model: Path, **fixed: Any) -> fuzz.Schedule:
    return fuzz.Schedule(Setup.draw(1, **ORDERED | PLAIN | fixed), model)


@pytest.mark.soak
@pytest.mark.parametrize("version", quick_and_others(INSTALLED, FETCHED_BY_MAKE))
def test_whoever_others_are_displaced_for_comes_in_on_every_version(version: str, tmp_path: Path) -> None:
    source_or_skip(version)
    setups = [Setup.draw(seed, **ORDERED | PLAIN | more) for seed, more in enumerate(BESIDES)]
    done = soak.run(version, setups, tmp_path)
    assert not done.failed, "\n".join([str(done), *done.replays()])
    assert all(outcome["displaced"] > 5 for outcome in done.outcomes)
    missed, displaced = (sum(outcome[what] for outcome in done.outcomes) for what in ("missed", "displaced"))
    assert missed <= 0.01 * displaced, "a wrong count of blocks, places or tokens misses far more"


@pytest.mark.parametrize("reserves_whole", [True, False])
@pytest.mark.parametrize("tokens", [40, 64, 65, 200])
def test_vllm_admits_with_just_as_many_blocks(tokens: int, reserves_whole: bool, model: Path) -> None:
    """Of a prompt in chunks of 64 tokens the first one must fit, or all of it."""
    for spare in (0, -1):
        made = schedule(model, reserves_whole=reserves_whole, token_budget=64)
        scheduler = made.scheduler
        request = alone.made_request(999, [5] * tokens, SamplingParams(temperature=0.0, max_tokens=4))
        need = Admission(scheduler).need_blocks(request, (), 0, 0)
        pool = scheduler.kv_cache_manager.block_pool
        pool.get_new_blocks(pool.get_num_free_blocks() - need - spare)
        scheduler.add_request(request)
        assert ("r999" in scheduler.schedule().num_scheduled_tokens) == (not spare), (need, spare)


def test_a_prompt_that_may_not_be_computed_in_parts_is_told(model: Path) -> None:
    assert Admission(schedule(model).scheduler).space().chunked
    setup = Setup.draw(1, **ORDERED | PLAIN)
    job = fuzz._job(setup, model) | {"budget": 2048}
    job["engine"] |= {"enable_chunked_prefill": False}
    assert not Admission(alone.scheduler_for(job)).space().chunked


def test_the_watermark_is_free_beside_every_request_while_others_run(model: Path) -> None:
    """Once for all that come in: vLLM asks for it at each admission, and none of them takes it."""
    made = schedule(model, reserves_whole=True, token_budget=64)
    scheduler, manager = made.scheduler, made.scheduler.kv_cache_manager
    requests = [alone.made_request(number, [number] * 20, SamplingParams(max_tokens=4)) for number in range(900, 903)]
    scheduler.add_request(requests[0])
    scheduler.schedule()
    needs = Admission(scheduler)
    assert needs.watermark_blocks() == 0 and needs.need_blocks(requests[1], (), 0, 0) == 2
    manager.watermark_blocks = 3
    assert needs.watermark_blocks() == 3 and needs.need_blocks(requests[1], (), 0, 0) == 5
    manager.block_pool.get_new_blocks(manager.block_pool.get_num_free_blocks() - (2 + 2 + 3))
    for request in requests[1:]:
        scheduler.add_request(request)
    assert {"r901", "r902"} <= scheduler.schedule().num_scheduled_tokens.keys()


def test_an_idle_session_keeps_its_place(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = schedule(model).scheduler
    scheduler.num_waiting_for_streaming_input = 3
    assert Admission(scheduler).space().places == 13
    monkeypatch.setattr(admission, "engine_version", lambda allow_untested: (0, 24))
    assert Admission(scheduler).space().places == 16


def engine(**values: Any) -> Any:
    config = SimpleNamespace(
        enable_chunked_prefill=True, long_prefill_token_threshold=values.pop("long_prefill", 0),
        max_num_batched_tokens=64,
    )  # fmt: skip
    made = {
        "block_size": 16, "scheduler_config": config, "scheduler_reserve_full_isl": False, "running": [],
        "max_num_scheduled_tokens": 64, "kv_cache_manager": SimpleNamespace(), "max_model_len": 2048,
        "prefill_capacity_bound": False, "get_request_counts": lambda: (1, 1),
    }  # fmt: skip
    return SimpleNamespace(**made | values)


def test_a_long_prompt_is_computed_in_chunks_of_so_many_tokens() -> None:
    request = SimpleNamespace(num_tokens=640, num_computed_tokens=0)

    def first_chunk(**values: Any) -> int:
        return Admission(engine(**values)).need_blocks_besides(request, 0)

    assert first_chunk() == 4 and first_chunk(long_prefill=20) == 2
    assert first_chunk(long_prefill=20, adaptive_long_prefill_threshold=True) == 2, "two share 64 tokens"
    assert first_chunk(long_prefill=20, adaptive_long_prefill_threshold=True, get_request_counts=lambda: (0, 1)) == 4


@pytest.mark.parametrize(
    ("throttled", "values", "deferred"),
    [
        (False, {}, False),
        (True, {}, True),
        (True, {"prefill_capacity_bound": True}, False),
        (True, {"running": [SimpleNamespace(is_prefill_chunk=True)]}, False),
        (False, {"local_prefill_interval": 4, "num_executed_steps": 9, "last_prefill_step": 7}, True),
        (False, {"local_prefill_interval": 4, "num_executed_steps": 10, "last_prefill_step": 7}, False),
    ],
)
def test_steps_that_compute_no_prompts(throttled: bool, values: dict[str, Any], deferred: bool) -> None:
    made = engine(**{"running": [SimpleNamespace(is_prefill_chunk=False)]} | values)
    assert Admission(made).defers_prefills(throttled) == deferred


@pytest.mark.parametrize(
    ("computed", "budget", "free", "cached", "lacks"),
    [
        (0, 100, 100, [], False), (0, 49, 100, [], False), (10, 49, 100, [], True), (10, 100, 49, [], True),
        (10, 50, 50, [], False), (10, 0, 0, ["picture"], False), (60, 0, 0, [], False),
    ],
)  # fmt: skip
def test_an_input_that_the_encoder_cannot_take_keeps_its_request_waiting(
    computed: int, budget: int, free: int, cached: list[str], lacks: bool
) -> None:
    """A picture of 50 tokens from position 10 on: the text before it can be computed without it."""
    picture = SimpleNamespace(identifier="picture", mm_position=SimpleNamespace(offset=10, length=50))
    request = SimpleNamespace(
        has_encoder_inputs=True, mm_features=[picture], num_computed_tokens=computed,
        get_num_encoder_embeds=lambda number: 50,
    )  # fmt: skip
    cache = SimpleNamespace(cached=cached, num_freeable_slots=free)
    made = engine(max_num_encoder_input_tokens=budget, encoder_cache_manager=cache, **NO_PREFIX_CACHE)
    assert Admission(made).lacks_encoder_room(request) == lacks
    request.has_encoder_inputs = False
    assert not Admission(made).lacks_encoder_room(request)


@pytest.mark.parametrize(("hit", "loads", "lacks"), [(0, 0, False), (10, 0, True), (60, 0, False), (10, 16, False)])
def test_an_input_counts_that_follows_what_is_cached(hit: int, loads: int, lacks: bool) -> None:
    """Past a prefix that is cached the picture comes first; nothing is encoded in the step that loads blocks."""
    picture = SimpleNamespace(identifier="picture", mm_position=SimpleNamespace(offset=10, length=50))
    request = SimpleNamespace(
        has_encoder_inputs=True, mm_features=[picture], num_computed_tokens=0, num_tokens=90, block_hashes=[],
        skip_reading_prefix_cache=False, get_num_encoder_embeds=lambda number: 50,
    )  # fmt: skip
    coordinator = SimpleNamespace(find_longest_cache_hit=lambda hashes, tokens: ((), hit))
    made = engine(
        max_num_encoder_input_tokens=40, encoder_cache_manager=SimpleNamespace(cached=[], num_freeable_slots=90),
        kv_cache_manager=SimpleNamespace(enable_caching=True, coordinator=coordinator),
        kvpolicy=SimpleNamespace(loadable_tokens=lambda request, local: loads),
    )  # fmt: skip
    assert Admission(made).lacks_encoder_room(request) == lacks
    request.skip_reading_prefix_cache = True
    assert not Admission(made).lacks_encoder_room(request)


@pytest.mark.soak
@pytest.mark.parametrize("version", quick_and_others(INSTALLED, FETCHED_BY_MAKE))
def test_nobody_is_displaced_for_a_picture_that_cannot_be_encoded(version: str, tmp_path: Path) -> None:
    """Where the encoder takes one large picture at a time. A request is passed over while its picture has no room, and
    others come in before it: drawn schedules fail where others were displaced for it."""
    source_or_skip(version)
    pictures: dict[str, Any] = {"pictures": 60, "encoder_room": 1.0, "token_budget": 128, "spare_blocks": 4}
    setups = [
        Setup.draw(seed, **ORDERED | PLAIN | pictures | {"order": order, "prefix_caching": prefix_caching})
        for seed, (order, prefix_caching) in enumerate(product(("urgent", "mlfq:base=4"), (True, False)))
    ]
    done = soak.run(version, setups, tmp_path)
    assert not done.failed, "\n".join([str(done), *done.replays()])
    assert sum(outcome["let_in_with_pictures"] for outcome in done.outcomes) > 20


def test_a_picture_without_room_is_seen_where_it_is_not_heeded(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Admission, "lacks_encoder_room", lambda admission, request: False)
    setup = Setup.draw(1, **ORDERED | PLAIN | {"pictures": 60, "encoder_room": 1.0, "token_budget": 128})
    assert any("pictures cannot be encoded" in problem for problem in fuzz.run(setup, model).problems)
