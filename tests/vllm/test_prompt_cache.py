"""Prompts that go on in host memory: what is found there is what was computed, and is found by nobody else."""

from __future__ import annotations

import contextlib
import json
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus

from kvpolicy.caching import Hinted
from kvpolicy.cost import CostModel
from kvpolicy.cost.block_price import RENEWED_STEPS, SAMPLED_AT, block_price
from kvpolicy.events import Cost, Option, Preemption
from kvpolicy.features import features_of
from kvpolicy.policy import PricedPolicy
from kvpolicy.settings import GIB
from kvpolicy_vllm.plugin.messages import FileReport, StepJobs
from tests.vllm import alone, families, features, harness
from tests.vllm.conftest import ENGINE, PLENTY, SCARCE, job
from tests.vllm.test_faults import BLOCK_BYTES
from tests.vllm.test_same_schedule import BASE
from tests.vllm.versions import before_tables

CONVERSATIONS = 8


@pytest.fixture(scope="module")
def turns() -> list[dict[str, Any]]:
    """The first turns of conversations, requests of others, and the second turns, which begin with the first ones."""
    first = harness.prompts(CONVERSATIONS, (180, 300), (40, 90), seed=4)
    others = harness.prompts(4, (200, 300), (20, 40), seed=5)
    more = harness.prompts(CONVERSATIONS, (20, 60), (30, 60), seed=6)
    return [*first, *others, *(b | {"prompt": a["prompt"] + b["prompt"]} for a, b in zip(first, more, strict=True))]


@pytest.fixture(scope="module")
def stock(model: str, turns: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Unmodified vLLM with memory enough and no prefix caching."""
    work = job(model, turns, {"num_gpu_blocks_override": 800}, gaps=True)
    return harness.run(work, tmp_path_factory.mktemp("stock"))


WAVES = [[*range(CONVERSATIONS)], [*range(8, 12)], [*range(12, 20)]]
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lru": ({"cache": "lru"}, {}),
    "little-room": ({"cache": "cost", "host_gib": 50.5 * BLOCK_BYTES / GIB}, {}),
    "failing-and-late": (
        {"cache": "s3fifo", "copier": "tests.vllm.copiers.FaultyCopier"},
        {"late_polls": 3, "fail_saves": [3, 9], "fail_loads": [1, 3, 4]},
    ),
}


@pytest.mark.feature("prompts in host memory")
@pytest.mark.parametrize("case", ["lru", pytest.param("little-room", marks=pytest.mark.slow), "failing-and-late"])
def test_what_is_found_changes_no_token(
    case: str, model: str, turns: list[dict[str, Any]], stock: dict[str, Any], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The device loses what the first turns left, and is written over, before the second ones come; requests are
    preempted in between."""
    extra, faults = CASES[case]
    monkeypatch.setenv("KVPOLICY_TEST_FAULTS", json.dumps(faults))
    plugin = harness.plugin("always-swap", **extra)
    engine = SCARCE | {"enable_prefix_caching": True}
    work = job(model, turns, engine, scenario="waves", plugin=plugin, waves=WAVES, overwrite=True)
    result = harness.run(work, tmp_path)
    harness.assert_exact(stock, result)
    harness.assert_nothing_left(result)
    stats = result["stats"]
    assert harness.total(stats, "preemptions", executed="swap") > 2
    assert harness.total(stats, "cache_hits", outcome="loaded") >= 3
    assert harness.total(stats, "cache_loaded_tokens") >= 200
    assert harness.total(stats, "cache_blocks", event="stored") > 40
    assert result["cached_slots"] == harness.total(stats, "cached_slots") > 0
    assert (harness.total(stats, "cache_blocks", event="evicted") > 0) == (case == "little-room")
    failed = harness.total(stats, "fallbacks", reason="cache_load_failed") + harness.total(
        stats, "fallbacks", reason="load_failed"
    )
    assert failed == len(faults.get("fail_loads", ()))


@pytest.mark.feature("prompts in host memory")
@pytest.mark.feature("LoRA")
def test_no_adapter_finds_the_prompts_of_another(tmp_path: Path) -> None:
    """The same prompts under one adapter, another one and none, and under the first one again, each time after the
    device has lost them and was written over; then under all at once, in memory for half of them. vLLM's CPU build
    computes whoever has no adapter with that of the last slot, which stays empty here."""
    one, other = (
        {"adapter": [number, str(features.adapter(tmp_path / f"adapter-{number}", number))]} for number in (1, 2)
    )
    owners: list[list[dict[str, Any]]] = [[one], [other], [{}], [one], [one, other, {}]]
    prompts = harness.prompts(3, (150, 260), (30, 60), seed=8)
    asked = [[prompt | owner for owner in wave for prompt in prompts] for wave in owners]
    numbers = iter(range(sum(map(len, asked))))
    waves = [[next(numbers) for _ in wave] for wave in asked]
    requests = [request for wave in asked for request in wave]
    llm, slots = str(families.make("llama", tmp_path / "model")), {"max_loras": 3, "max_cpu_loras": 3}
    stock = harness.run(job(llm, requests, PLENTY | features.ADAPTERS | slots, gaps=True), tmp_path / "stock")
    engine = SCARCE | features.ADAPTERS | slots | {"enable_prefix_caching": True}
    plugin = harness.plugin("always-swap", cache="lru")
    work = job(llm, requests, engine, scenario="waves", plugin=plugin, waves=waves, overwrite=True)
    result = harness.run(work, tmp_path / "cached")
    for place in range(len(prompts)):
        texts = {tuple(stock["tokens"][f"r{wave[place]}"]) for wave in waves[:3]}
        assert len(texts) == 3, "what was computed under another adapter would change nothing"
    harness.assert_exact(stock, result)
    harness.assert_nothing_left(result)
    stats = result["stats"]
    loaded = [harness.total(counters, "cache_loaded_tokens") for counters in [*result["begun"], stats]]
    block = ENGINE["block_size"]
    found = sum((len(prompt["prompt"]) - 1) // block * block for prompt in prompts)
    *apart, at_once = (after - before for before, after in pairwise(loaded))
    assert apart == [0, 0, 0, found] and at_once > found
    assert harness.total(stats, "cache_hits", outcome="loaded") > 2 * len(prompts)
    assert harness.total(stats, "preemptions", executed="swap") > 0


# ---- on the scheduler alone ----


class PerToken(CostModel):
    """So many seconds for each token that is computed, and none for loads."""

    name = "per-token"

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def predict(self, situation: Preemption, options: Sequence[Option]) -> tuple[Cost, ...]:
        tokens = features_of(situation, Option("recompute")).recomputed_tokens
        return tuple(
            Cost(seconds, 0.0, 0.0, seconds, 0.0, seconds, seconds)
            for seconds in (self.seconds * tokens if option.kind == "recompute" else 0.0 for option in options)
        )


class PricesTokens(PricedPolicy):
    """Recomputes, and knows what that costs."""

    name = "prices-tokens"

    def __init__(self, seconds: float) -> None:
        self.cost_model = PerToken(seconds)

    def by_costs(
        self, situation: Preemption, options: Sequence[Option], costs: Sequence[Cost], state: Any
    ) -> tuple[float, ...]:
        return (1.0, *(0.0 for _ in options[1:]))


class Served:
    """A scheduler of little memory, with the cache on, and a worker whose copies take ``late`` steps."""

    def __init__(
        self, model: str, policy: str = "always-swap", late: int = 0, cache: str = "lru", host_gib: float | None = None,
        **engine: Any,
    ) -> None:  # fmt: skip
        room = {} if host_gib is None else {"host_gib": host_gib}
        plugin = harness.plugin(policy, cache=cache, allow_python_policies=True, **room)
        work = BASE | {"model": model, "plugin": plugin, "prefix_caching": True, "blocks": 41, "engine": engine}
        self.scheduler = alone.scheduler_for(work)
        self.controller = self.scheduler.kvpolicy
        self.worker = alone.Worker(late)
        self.number = 0

    def request(self, prompt: list[int], **more: Any) -> Any:
        self.number += 1
        return alone.made_request(self.number, prompt, SamplingParams(temperature=0.0, max_tokens=4), **more)

    def serve(self, *requests: Any) -> None:
        for _ in alone.drive(self.scheduler, deque(requests), self.worker.execute, False):
            pass

    def push_out(self) -> None:
        """Others take all of the device's memory."""
        rng = random.Random(self.number)
        for _ in range(3):
            self.serve(self.request([rng.randrange(1000) for _ in range(500)]))

    def found(self, request: Any) -> int:
        return int(self.controller.loadable_tokens(request, 0))


PROMPT = [*range(100, 200)]
"""Six blocks of 16 tokens and a part of a seventh."""


@pytest.mark.feature("prompts in host memory")
@pytest.mark.scheduler
def test_what_was_computed_is_found_by_the_same_prompt_only(model: str) -> None:
    served = Served(model, enable_lora=True, max_loras=1, max_cpu_loras=2)
    adapter = LoRARequest("adapter-1", 1, "/nowhere")
    served.serve(served.request(PROMPT, cache_salt="mine"), served.request([*range(300, 400)], lora_request=adapter))
    served.push_out()
    assert served.found(served.request([*PROMPT, 1], cache_salt="mine")) == 96
    assert served.found(served.request(PROMPT[:96], cache_salt="mine")) == 80, "one token is left to compute"
    assert served.found(served.request(PROMPT, cache_salt="another")) == served.found(served.request(PROMPT)) == 0
    assert served.found(served.request([*range(300, 400)], lora_request=adapter)) == 96
    assert served.found(served.request([*range(300, 400)])) == 0
    other = LoRARequest("adapter-2", 2, "/nowhere")
    assert served.found(served.request([*range(300, 400)], lora_request=other)) == 0
    assert served.found(served.request([*PROMPT[:20], 5, *PROMPT[21:]], cache_salt="mine")) == 16


@pytest.mark.feature("prompts in host memory")
@pytest.mark.scheduler
def test_the_same_tokens_are_there_once_for_each_adapter(model: str) -> None:
    """And once for none. In files nothing is kept beside adapters: tests/vllm/test_check.py has the refusal."""
    served = Served(model, enable_lora=True, max_loras=1, max_cpu_loras=2)
    owners = [*(LoRARequest(f"adapter-{number}", number, f"/nowhere/{number}") for number in (1, 2)), None]

    def asked() -> list[Any]:
        return [served.request(PROMPT, lora_request=adapter) for adapter in owners]

    for last, adapter in enumerate(owners):
        served.serve(served.request(PROMPT, lora_request=adapter))
        served.push_out()
        assert [served.found(request) for request in asked()] == [96 * (place <= last) for place in range(len(owners))]
    assert harness.total(served.controller.stats(), "cache_loaded_tokens") == 0
    for request in asked():
        served.serve(request)
    assert harness.total(served.controller.stats(), "cache_loaded_tokens") == 3 * 96


@pytest.mark.feature("prompts in host memory")
@pytest.mark.scheduler
def test_other_weights_under_an_adapters_name_find_what_vllm_lets_them_find(model: str) -> None:
    """The former ones' blocks, on the device and in host memory, until the prefix cache is reset: vLLM hashes the
    adapter's name and path. Its number is another one once it was unloaded and loaded anew, and is not hashed."""
    served = Served(model, enable_lora=True, max_loras=1, max_cpu_loras=2)
    loaded_anew = LoRARequest("tuned", 2, "/nowhere/1")
    in_place = LoRARequest("tuned", 1, "/nowhere/1", load_inplace=True)
    from_elsewhere = LoRARequest("tuned", 1, "/nowhere/2", load_inplace=True)

    def asked() -> list[Any]:
        return [served.request(PROMPT, lora_request=one) for one in (loaded_anew, in_place, from_elsewhere)]

    served.serve(served.request(PROMPT, lora_request=LoRARequest("tuned", 1, "/nowhere/1")))
    on_device = [served.scheduler.kv_cache_manager.get_computed_blocks(request)[1] for request in asked()]
    served.push_out()
    assert [served.found(request) for request in asked()] == on_device
    assert on_device[:2] == [96, 96] and (before_tables() or on_device[2] == 0)
    assert served.scheduler.reset_prefix_cache()
    assert [served.found(request) for request in asked()] == [0, 0, 0]


@pytest.mark.scheduler
def test_pictures_are_part_of_what_is_found(model: str) -> None:
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    def picture(name: str) -> list[Any]:
        place = PlaceholderRange(offset=4, length=8)
        return [MultiModalFeatureSpec(data=None, modality="image", identifier=name, mm_position=place)]

    served = Served(model)
    served.scheduler.max_num_encoder_input_tokens = 64
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

    served.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=64)
    served.serve(served.request(PROMPT, mm_features=picture("a")))
    served.push_out()
    assert served.found(served.request(PROMPT, mm_features=picture("a"))) == 96
    assert served.found(served.request(PROMPT, mm_features=picture("b"))) == 0
    assert served.found(served.request(PROMPT)) == 0


@pytest.mark.scheduler
def test_what_a_request_says_of_its_window_is_heeded(model: str) -> None:
    """A window that is kept is held back from eviction, on its way to host memory and there, until its session ends."""
    served = Served(model)
    cache = served.controller.copies.pool.cache
    said = {"keep_s": 60, "session": "s"}
    served.serve(served.request(PROMPT))
    assert isinstance(cache, Hinted) and cache.held_blocks == 0
    hinting = served.request([*PROMPT, 1])
    hinting.kv_transfer_params = {"kvpolicy": said}
    served.serve(hinting)
    assert cache.held_blocks == 6
    served.push_out()
    assert served.found(served.request(PROMPT)) == 96 and cache.held_blocks == 6
    over = served.request([1, 2, 3])
    over.kv_transfer_params = {"kvpolicy": {"session": "s", "ended": True}}
    served.serve(over)
    assert cache.held_blocks == 0 and len(cache._first) == 6
    stats = served.controller.stats()
    assert harness.total(stats, "hinted_blocks", event="held") >= 6
    assert harness.total(stats, "hinted_blocks", event="released") == 6


@pytest.mark.scheduler
def test_a_pin_of_the_whole_prompt_is_none_of_the_answer(model: str) -> None:
    served = Served(model)
    cache = served.controller.copies.pool.cache
    pinned = served.request(PROMPT[:94])
    pinned.kv_transfer_params = {"kvpolicy": {"pin": True}}
    served.serve(pinned)
    assert isinstance(cache, Hinted) and len(pinned.block_hashes) == 6 and cache.held_blocks == 5


@pytest.mark.scheduler
def test_hints_that_cannot_be_heeded_stop_nobody(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(model)
    monkeypatch.setattr(Hinted, "hinted", lambda self, *said: 1 / 0)
    hinting = served.request(PROMPT)
    hinting.kv_transfer_params = {"kvpolicy": {"keep_s": 60}}
    served.serve(hinting)
    served.push_out()
    assert served.found(served.request(PROMPT)) == 96
    assert harness.total(served.controller.stats(), "hints_failed") == 2


@pytest.mark.feature("prompts in host memory")
@pytest.mark.scheduler
def test_nothing_is_found_after_a_reset(model: str) -> None:
    served = Served(model)
    served.serve(served.request(PROMPT))
    served.push_out()
    assert served.found(served.request(PROMPT)) == 96
    assert served.scheduler.reset_prefix_cache()
    assert served.found(served.request(PROMPT)) == 0
    pool = served.controller.copies.pool
    assert (pool.cached, len(pool._by_key), len(pool.watched)) == (0, 0, 0)
    served.push_out()
    assert served.found(served.request(PROMPT)) == 0, "what was on the device before the reset is not stored after it"


@pytest.mark.scheduler
def test_nothing_is_found_after_a_reset_that_vllm_refuses(model: str) -> None:
    """It goes on finding on the device what the running request and one before it had computed."""
    served = Served(model)
    earlier = [*range(300, 400)]
    served.serve(served.request(earlier))
    running = served.request(PROMPT)
    served.scheduler.add_request(running)
    one_step(served)
    assert running.num_computed_tokens == 100 and not served.scheduler.reset_prefix_cache()
    served.scheduler.preempt_at_next_step(running.request_id)
    one_step(served)
    copies, stats = served.controller.copies, served.controller.stats()
    assert copies.of(running.request_id) is None and not copies.pool._by_key
    assert harness.total(stats, "fallbacks", reason="stale") == 1
    served.serve()
    assert running.num_output_tokens == 4
    served.serve(served.request([*PROMPT, 1]), served.request([*earlier, 1]))
    served.push_out()
    assert served.found(served.request(PROMPT)) == served.found(served.request(earlier)) == 0
    served.serve(served.request(PROMPT))
    served.push_out()
    assert served.found(served.request(PROMPT)) == 96, "what is computed anew is"


class SavesFail(alone.Worker):
    def execute(self, output: Any, sampled: dict[str, bool]) -> ModelRunnerOutput:
        answer = super().execute(output, sampled)
        copies = answer.kv_connector_output
        if copies is not None and copies.kv_connector_worker_meta is not None:
            done = copies.kv_connector_worker_meta.done
            done[:] = [replace(one, ok=one.direction != "save") for one in done]
        return answer


@pytest.mark.scheduler
def test_what_got_a_slot_and_was_not_saved_is_counted(model: str) -> None:
    served = Served(model)
    served.worker = SavesFail(0)
    served.serve(served.request(PROMPT))
    served.push_out()
    assert served.found(served.request(PROMPT)) == served.controller.copies.pool.cached == 0
    counted = {
        event: harness.total(served.controller.stats(), "cache_blocks", event=event)
        for event in ("stored", "spoiled", "evicted")
    }
    assert counted["stored"] == counted["spoiled"] >= 6 and not counted["evicted"]


@pytest.mark.scheduler
def test_requests_that_may_not_read_the_cache_do_not(model: str) -> None:
    served = Served(model)
    served.serve(served.request(PROMPT))
    served.push_out()
    request = served.request(PROMPT)
    request.skip_reading_prefix_cache = True
    assert served.found(request) == 0
    assert served.found(served.request(PROMPT, resumable=True)) == 0


@pytest.mark.feature("prompts in host memory")
@pytest.mark.scheduler
@pytest.mark.parametrize(
    ("policy", "short", "long"), [("always-recompute", 0, 0), ("threshold:150", 0, 192), ("always-swap", 96, 192)]
)
def test_the_policy_decides_what_is_stored_and_loaded(policy: str, short: int, long: int, model: str) -> None:
    served = Served(model, policy)
    served.serve(served.request(PROMPT), served.request([*range(300, 500)]))
    served.push_out()
    assert (served.found(served.request(PROMPT)), served.found(served.request([*range(300, 500)]))) == (short, long)
    assert harness.total(served.controller.stats(), "cache_blocks", event="refused") >= (not short) * 6


@pytest.mark.feature("prompts in host memory")
@pytest.mark.scheduler
def test_nothing_is_stored_while_the_saves_before_it_take_too_long(model: str) -> None:
    served = Served(model)
    served.serve(served.request(PROMPT))
    served.push_out()
    assert served.found(served.request(PROMPT)) == 96
    queues, others = served.controller.copies.queues, [*range(300, 400)]
    queues.add("save", 10**6 + 1)
    queues.ended("save", 1, 0.01)  # the worker of this test takes no time
    served.serve(served.request(others))
    served.push_out()
    assert served.found(served.request(others)) == 0 and served.found(served.request(PROMPT)) == 96
    assert harness.total(served.controller.stats(), "cache_blocks", event="refused") >= 6
    queues.add("save", -(10**6))
    served.serve(served.request(others))
    served.push_out()
    assert served.found(served.request(others)) == 96


@pytest.mark.scheduler
def test_shadow_mode_is_heeded_at_once_when_it_is_switched(model: str) -> None:
    """By the control file. What is worth storing is remembered for many steps."""
    served = Served(model)
    others = [*range(300, 400)]
    served.serve(served.request(PROMPT))
    served.push_out()
    served.controller.decider.shadow = True
    served.serve(served.request([*range(600, 700)]))
    served.push_out()
    assert served.found(served.request(PROMPT)) == 0
    served.controller.decider.shadow = False
    served.serve(served.request(others))
    served.push_out()
    found = [served.found(served.request(prompt)) for prompt in (others, [*range(600, 700)])]
    assert found == [96, 0], "the second one came in shadow mode"


@pytest.mark.scheduler
def test_what_is_not_loaded_for_its_price_is_counted(model: str) -> None:
    served = Served(model)
    served.serve(served.request([*range(300, 500)]))
    served.push_out()
    served.controller.adopt("threshold:150")
    served.serve(served.request([*range(300, 400)]), served.request([*range(300, 500)]))
    stats = served.controller.stats()
    assert harness.total(stats, "cache_hits", outcome="cheaper") == 1
    assert harness.total(stats, "cache_hit_tokens", outcome="cheaper") == 96
    assert harness.total(stats, "cache_hits", outcome="loaded") == 1
    assert harness.total(stats, "cache_loaded_tokens") <= 192


@pytest.mark.scheduler
def test_an_error_in_deciding_leaves_the_prompt_to_be_computed(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(model)
    served.serve(served.request(PROMPT))
    served.push_out()
    monkeypatch.setattr(served.controller.decider, "loads_hit", lambda *_: 1 / 0)
    request = served.request(PROMPT)
    served.serve(request)
    assert request.num_output_tokens == 4
    stats = served.controller.stats()
    assert harness.total(stats, "cache_undecided") == 1 and harness.total(stats, "cache_loaded_tokens") == 0


@pytest.mark.scheduler
def test_prices_that_cannot_be_predicted_stop_nobody(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin, small = harness.plugin, {"cache": "cost", "host_gib": 20.5 * BLOCK_BYTES / GIB}
    monkeypatch.setattr(harness, "plugin", lambda policy, **extra: plugin(policy, **extra | small))
    served = Served(model)
    monkeypatch.setattr(served.controller.decider, "predict", lambda situation, options: 1 / 0)
    served.serve(served.request(PROMPT))
    served.push_out()
    stats = served.controller.stats()
    assert harness.total(stats, "cache_undecided") > 0
    assert harness.total(stats, "cache_blocks", event="evicted") > 0, "prices were asked for"


@pytest.mark.scheduler
def test_prices_are_those_of_the_policy_that_serves_and_of_what_it_has_learned(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the very formula that prices blocks in the simulators."""
    plugin = harness.plugin
    monkeypatch.setattr(harness, "plugin", lambda policy, **extra: plugin(policy, **extra | {"cache": "cost"}))
    served = Served(model)
    controller = served.controller
    price, steps = controller.copies.pool.cache.inner._price, []

    def step(number: int) -> list[float]:
        controller.prompts.step_begins(served.scheduler, number, controller.clock)
        steps.append([price(index) for index in (0, 50, 500)])
        return steps[-1]

    assert step(1) == [1.0, 1.0, 1.0], "always-swap predicts nothing"
    by_cost = PricesTokens(1e-6)
    controller.decider.adopt(by_cost)
    expected = block_price(by_cost.cost_model.predict, 16, BLOCK_BYTES, controller.copies.segment_bytes)
    assert step(2) == [expected(0), expected(50), expected(500)] != [0.0, 0.0, 0.0]
    by_cost.cost_model.seconds *= 2
    assert step(3) == steps[1], "predicting takes time"
    assert step(2 + RENEWED_STEPS) == pytest.approx([2 * seconds for seconds in steps[1]])


@pytest.mark.scheduler
@pytest.mark.parametrize("kind", ["cost", "lru"])
def test_workers_are_told_the_prices_of_files(
    kind: str, model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Those of host memory, less what a block takes to get there; no others where their policy has no use for them."""
    plugin, more = harness.plugin, {"cache": "lru", "cache_files": str(tmp_path), "cache_files_policy": kind}
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    monkeypatch.setattr(harness, "plugin", lambda policy, **extra: plugin(policy, **extra | more))
    served = Served(model)
    controller = served.controller
    controller.decider.adopt(PricesTokens(1e-6))
    monkeypatch.setattr(controller.prompts.files, "read_s", lambda blocks: 3e-6 * blocks)

    def told(number: int) -> tuple[float, ...]:
        controller.prompts.step_begins(served.scheduler, number, controller.clock)
        return tuple(controller.prompts.with_files(StepJobs(number)).file_prices)

    first = told(1)
    in_host_memory = [controller.prompts.prices(index) for index in SAMPLED_AT]
    assert first == (tuple(pytest.approx(price - 3e-6) for price in in_host_memory) if kind == "cost" else ())
    assert told(2) == () and told(1 + RENEWED_STEPS) == first


@pytest.mark.scheduler
def test_a_caching_policy_of_files_that_fails_in_a_worker_is_counted(
    model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plugin, more = harness.plugin, {"cache": "lru", "cache_files": str(tmp_path)}
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    monkeypatch.setattr(harness, "plugin", lambda policy, **extra: plugin(policy, **extra | more))
    served = Served(model)
    controller = served.controller
    controller.prompts.files.acknowledge([FileReport(policy_failed="evict")])
    assert harness.total(controller.stats(), "cache_failed", method="evict") == 1


@pytest.mark.scheduler
def test_a_request_that_is_aborted_while_it_is_loaded_leaves_nothing(model: str) -> None:
    served = Served(model, late=5)
    served.serve(served.request(PROMPT))
    served.push_out()
    request = served.request(PROMPT)
    served.scheduler.add_request(request)
    one_step(served)
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    pool = served.controller.copies.pool
    assert pool.used == 6 and pool.obtainable(1000, pool.total) == pool.total - 6, "they are not given away meanwhile"
    served.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
    for _ in range(8):
        one_step(served)
    device = served.scheduler.kv_cache_manager.block_pool
    assert (pool.used, served.controller.copies.loading) == (0, 0)
    assert device.get_num_free_blocks() == device.num_gpu_blocks - 1
    assert len(served.controller.prompts) == 0
    assert served.found(served.request(PROMPT)) == 96, "what others left is still there"


@pytest.mark.scheduler
def test_a_reset_while_it_is_loaded_leaves_the_request_waiting_as_a_new_one(model: str) -> None:
    """Whether its load is under way or has ended: it never ran, so that a worker does not know it."""
    for steps in (0, 7):
        served = Served(model, late=5)
        served.serve(served.request(PROMPT))
        served.push_out()
        request = served.request(PROMPT)
        served.scheduler.add_request(request)
        one_step(served)
        for _ in range(steps):
            output = served.scheduler.schedule()
            sampled = dict.fromkeys(output.num_scheduled_tokens, True)
            served.scheduler.update_from_output(output, served.worker.execute(output, sampled))
            if request.request_id in served.scheduler.finished_recving_kv_req_ids:
                break
        with contextlib.suppress(RuntimeError):  # vLLM gives up while somebody is being loaded
            served.scheduler.reset_prefix_cache(reset_running_requests=True)
        served.serve()
        assert request.num_output_tokens == 4 and request.num_preemptions == 0
        assert served.controller.copies.pool.used == 0
        served.push_out()
        assert served.found(served.request(PROMPT)) == 96, "it has computed all of its prompt after the reset"


def one_step(served: Served) -> None:
    output = served.scheduler.schedule()
    sampled = {name: not served.scheduler.requests[name].is_prefill_chunk for name in output.num_scheduled_tokens}
    served.scheduler.update_from_output(output, served.worker.execute(output, sampled))
