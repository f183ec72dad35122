"""What an engine has beside plain attention, and what its requests may ask for, is the same after a swap, bit for bit:
one request alone, forced out, with the device's memory overwritten in between. Real engines."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from kvpolicy.settings import ServerSettings
from kvpolicy_vllm.check import Group, check
from tests.vllm import families, features, harness
from tests.vllm.test_families import CASES, ENGINE, INSIDE, LATER, OUTPUT, SWAPPED, asked
from tests.vllm.versions import skip_before_tables

KV_BLOCKS_OF_ONE = {"num_gpu_blocks_override": 11, "max_model_len": 320}
"""Memory for one request of the greatest length: what vLLM keeps free for drafted tokens is not there."""


def marked(name: str) -> Any:
    slow = [pytest.mark.slow] if features.ENGINES[name].slow else []
    return pytest.param(name, marks=[pytest.mark.feature(features.feature_of(name)), *slow])


@pytest.fixture(scope="module", params=[*map(marked, features.ENGINES)])
def result(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All cases of a feature in one engine."""
    name, folder = request.param, tmp_path_factory.mktemp("feature")
    feature = features.ENGINES[name]
    family = (families.PLAIN | families.FAMILIES)[feature.family]
    families.skip_unless_served(family)
    families.skip_unless_stored(feature.engine)
    if feature.drafts:
        skip_before_tables("speculation is")
    model = families.make(feature.family, folder / "model")
    prepared = feature.prepare(folder, model) if feature.prepare else {}
    drafts = features.budget_of(feature) or (KV_BLOCKS_OF_ONE if prepared else {})
    job = {
        "scenario": "interrupted", "model": str(model), "cases": CASES, "request": asked(),
        "plugin": harness.plugin("always-swap"),
        "engine": ENGINE | {"dtype": family.dtype} | family.engine | feature.engine | prepared | drafts,
    }  # fmt: skip
    return harness.run(job, folder) | {"feature": feature, "model": model, "engine": job["engine"]}


@pytest.mark.parametrize("case", SWAPPED)
def test_a_swap_changes_no_bit(case: str, result: dict[str, Any]) -> None:
    if case == "in its prefill" and (not result["chunks"] or features.budget_of(result["feature"])):
        pytest.skip("vLLM computes this family's prompts whole on this machine, or in one step")
    found, reference = result["cases"][case], result["cases"]["undisturbed"]
    assert len(set(reference["tokens"])) > 30, "a text that repeats itself may hide a wrong KV entry"
    assert_swapped(found, CASES[case]["tokens"], exactly=not result["feature"].drafts)
    assert_same(found, reference, result["feature"].tolerance)
    if result["feature"].prepare is features.itself_as_drafter:  # a draft that is rejected costs a step
        assert found["steps"] <= reference["steps"] + 2 * len(found["out_at"])
    elif result["feature"].drafts:
        assert_drafts_alike(found["drafts"], reference["drafts"], since=CASES[case]["tokens"][0])


def test_a_block_has_the_bytes_that_the_check_says(result: dict[str, Any]) -> None:
    """Also in fp8, beside experts, and where a drafter's layers are in the blocks: by the bytes that the engine saves.
    Drafted tokens may take a block more of each group."""
    engine = {name: value for name, value in result["engine"].items() if name in SHAPING}
    flags = [text for name, value in engine.items() for text in (f"--{name.replace('_', '-')}", as_text(value))]
    report = check(str(result["model"]), ServerSettings("always-swap", host_gib=0.25), flags)
    assert report.ok, report.text()
    found = result["cases"][SWAPPED[0]]
    blocks = sum(needed_blocks(group, tokens) for group in report.groups for tokens in found["out_at"])
    drafted = len(report.groups) if result["feature"].drafts else 0
    saved_bytes = harness.total(found["stats"], "copy_bytes", direction="save")
    assert saved_bytes % report.block_bytes == 0
    assert blocks <= saved_bytes / report.block_bytes <= blocks + drafted


SHAPING = ("dtype", "max_model_len", "block_size", "kv_cache_dtype", "speculative_config")
"""Engine arguments on which the bytes of a block depend, or whether they are taken."""


def as_text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict) else str(value)


def needed_blocks(group: Group, tokens: int) -> int:
    """Those with tokens that the next one attends to."""
    seen = group.window if group.kind == "SlidingWindowSpec" and group.window else tokens + 1
    return -(-tokens // group.block_size) - max(0, tokens + 1 - seen) // group.block_size


def assert_drafts_alike(drafts: dict[str, Any], reference: dict[str, Any], since: int) -> None:
    """After the same tokens the same is drafted. A drafter with KV of its own gets that back, too: its drafts change no
    token, so nothing else would show it."""
    common = {length for length in drafts.keys() & reference.keys() if int(length) > since}
    assert len(common) >= 5
    assert {length: drafts[length] for length in common} == {length: reference[length] for length in common}


def assert_swapped(found: dict[str, Any], lengths: list[int], exactly: bool = True) -> None:
    """It was forced out as often as it should be, and all that it had was loaded. ``exactly``: at these lengths."""
    assert len(found["out_at"]) == len(lengths)
    if exactly:
        assert found["out_at"] == lengths
    assert all(out >= length for out, length in zip(found["out_at"], lengths, strict=True))
    assert harness.total(found["stats"], "loaded_tokens") == sum(found["out_at"])
    assert harness.total(found["stats"], "fallbacks") == 0


def assert_same(found: dict[str, Any], reference: dict[str, Any], tolerance: float = 0.0) -> None:
    """Bit for bit, but for log-probabilities where there is a tolerance."""
    assert found["tokens"] == reference["tokens"]
    assert found["of_the_prompt"] == reference["of_the_prompt"]
    if not tolerance:
        assert found["logprobs"] == reference["logprobs"]
    for entry, wanted in zip(found["logprobs"], reference["logprobs"], strict=True):
        assert [token for token, _ in entry] == [token for token, _ in wanted]
        assert max(abs(one - other) for (_, one), (_, other) in zip(entry, wanted, strict=True)) <= tolerance


def test_a_failed_load_is_a_recompute(result: dict[str, Any]) -> None:
    found, recomputed = result["cases"]["its load fails"], result["cases"]["recomputed"]
    assert harness.total(found["stats"], "fallbacks", reason="load_failed") == 1
    assert harness.total(found["stats"], "loaded_tokens") == 0
    assert_same(found, recomputed)


def test_nothing_is_left(result: dict[str, Any]) -> None:
    harness.assert_nothing_left(result)


def test_what_a_model_drafts_for_itself_is_accepted(result: dict[str, Any]) -> None:
    """Drafts of the other drafters are rejected, nearly all of them."""
    accepts = result["feature"].prepare is features.itself_as_drafter
    assert (result["cases"]["undisturbed"]["steps"] < OUTPUT / 2) == accepts


@pytest.mark.slow
@pytest.mark.feature("tensor parallelism")
@pytest.mark.parametrize("name", ["llama", "gpt-oss", "llama-4", "granite-4", "qwen3-next", "deepseek-v2"])
def test_two_ranks(name: str, tmp_path: Path) -> None:
    """Each with its own part of every block. Latent KV is the same on both: one saves it, and both load it."""
    family = (families.PLAIN | families.FAMILIES)[name]
    families.skip_unless_served(family)
    job = {
        "scenario": "interrupted", "model": str(families.make(name, tmp_path / "model")), "request": asked(),
        "cases": {case: CASES[case] for case in ("undisturbed", *SWAPPED)}, "plugin": harness.plugin("always-swap"),
        "engine": ENGINE | {"tensor_parallel_size": 2, "dtype": family.dtype} | family.engine,
    }  # fmt: skip
    result = harness.run(job, tmp_path, workers=2)
    assert tuple(result["groups"]) == family.groups
    for case in (case for case in SWAPPED if result["chunks"] or case != "in its prefill"):
        assert_swapped(result["cases"][case], CASES[case]["tokens"])
        assert_same(result["cases"][case], result["cases"]["undisturbed"])
    saved, loaded = (harness.total(result["stats"], "copy_bytes", direction=one) for one in ("save", "load"))
    assert loaded == saved * (2 if family.feature == "MLA" else 1)
    harness.assert_nothing_left(result)


# ---- what a request asks for ----

PROMPT_TOKENS = 80
REQUESTS: dict[str, dict[str, Any]] = {
    "n > 1": {"n": 3, "temperature": 0.8, "seed": 7},
    "structured output": {"pattern": "[a-z ]{2000}"},
    "prompt embeddings": {"embeds": [PROMPT_TOKENS, features.HIDDEN, 3]},
    "logprobs": {},
}
"""By feature of the support matrix, what is asked for beside a prompt."""
EARLY, LATE = 101, 170
"""Computed tokens at the preemptions."""


def numbers(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, 2000) for _ in range(count)]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All of them in one engine, and a beam search. Seeded sampling fails on a CPU where a prompt is computed in
    chunks, by vLLM itself."""
    folder = tmp_path_factory.mktemp("requests")
    cases: dict[str, Any] = {}
    plain = {"prompt": numbers(PROMPT_TOKENS, 5), "max_tokens": 150}
    for name, extra in {**REQUESTS, "prompt logprobs": {"prompt_logprobs": 2}}.items():
        cases[name] = {"tokens": [], "kind": "swap", "request": plain | extra}
        cases[f"{name}, swapped"] = cases[name] | {"tokens": [EARLY, LATE]}
    cases["prompt logprobs, recomputed"] = cases["prompt logprobs"] | {"tokens": [EARLY], "kind": "recompute"}
    job = {
        "scenario": "interrupted", "model": str(families.make("llama", folder / "model")), "cases": cases,
        "beams": {"prompt": numbers(300, 6), "width": 3, "max_tokens": 6, "times": 1},
        "engine": ENGINE | families.PLAIN["llama"].engine | {
            "max_num_batched_tokens": 256, "skip_tokenizer_init": False, "enable_prompt_embeds": True,
        },
        "plugin": harness.plugin("always-swap"),
    }  # fmt: skip
    return harness.run(job, folder)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.feature(name)) for name in REQUESTS])
def test_an_answer_is_the_same_after_swaps(name: str, answers: dict[str, Any]) -> None:
    found, reference = answers["cases"][f"{name}, swapped"], answers["cases"][name]
    count = REQUESTS[name].get("n", 1)
    assert len(reference["tokens"]) == 150 * count and len(set(reference["tokens"])) > 30
    assert_swapped(found, [EARLY] * count + [LATE] * count)
    assert_same(found, reference)


@pytest.mark.feature("structured output")
def test_the_answer_keeps_to_its_pattern(answers: dict[str, Any]) -> None:
    """Otherwise it would be the plain text, and say nothing of grammars."""
    assert answers["cases"]["structured output"]["tokens"] != answers["cases"]["logprobs"]["tokens"]


@pytest.mark.feature("prompt logprobs")
def test_a_request_for_the_log_probabilities_of_its_prompt_is_recomputed(answers: dict[str, Any]) -> None:
    """vLLM loads nothing for such a request: it is never swapped, and says what vLLM's own recompute says."""
    found, recomputed = answers["cases"]["prompt logprobs, swapped"], answers["cases"]["prompt logprobs, recomputed"]
    assert found["out_at"] == [EARLY, LATE] and len(found["of_the_prompt"]) == PROMPT_TOKENS - 1
    assert harness.total(found["stats"], "loaded_tokens") == 0
    assert harness.total(found["stats"], "preemptions", executed="swap") == 0
    assert_same(found, recomputed)


@pytest.mark.feature("beam search")
def test_beams_are_the_same_after_swaps(answers: dict[str, Any]) -> None:
    """Each token of a beam is a request of its own: they are forced out in their prefills."""
    found, reference = answers["beams"]["swap"], answers["beams"]["undisturbed"]
    assert harness.total(found["stats"], "preemptions", executed="swap") >= 6
    assert harness.total(found["stats"], "loaded_tokens") > 0
    assert found["beams"] == reference["beams"]


def test_no_request_leaves_anything(answers: dict[str, Any]) -> None:
    harness.assert_nothing_left(answers)


# ---- adapters ----


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One prompt under two adapters and under none."""
    folder = tmp_path_factory.mktemp("adapters")
    cases: dict[str, Any] = {}
    for number in range(3):
        own = {"adapter": [number, str(features.adapter(folder / f"adapter-{number}", number))]} if number else {}
        cases[f"{number}"] = {"tokens": [], "kind": "swap", "request": asked() | own}
        cases[f"{number}, swapped"] = cases[f"{number}"] | {"tokens": [INSIDE, LATER]}
    job = {
        "scenario": "interrupted", "model": str(families.make("llama", folder / "model")), "cases": cases,
        "engine": ENGINE | families.PLAIN["llama"].engine | features.ADAPTERS,
        "plugin": harness.plugin("always-swap"),
    }  # fmt: skip
    return harness.run(job, folder)


@pytest.mark.feature("LoRA")
@pytest.mark.parametrize("number", range(3))
def test_an_adapter_is_the_same_after_swaps(number: int, adapted: dict[str, Any]) -> None:
    found, reference = adapted["cases"][f"{number}, swapped"], adapted["cases"][f"{number}"]
    assert_swapped(found, [INSIDE, LATER])
    assert_same(found, reference)


@pytest.mark.feature("LoRA")
def test_adapters_say_different_things(adapted: dict[str, Any]) -> None:
    """Otherwise a copy made under another one might change nothing."""
    texts = [adapted["cases"][f"{number}"]["tokens"] for number in range(3)]
    assert len({tuple(text) for text in texts}) == 3
    harness.assert_nothing_left(adapted)
