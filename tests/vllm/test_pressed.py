"""Under memory pressure, with drawn actions, priorities, aborts, forced preemptions and resets, every request of every
family says what it says alone, and nothing is left behind. Real engines, in float32; in bfloat16 texts depend on the
batch."""

from __future__ import annotations

import random
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from kvpolicy.settings import ServerSettings
from kvpolicy_vllm.check import check
from tests.vllm import families, features, harness
from tests.vllm.versions import skip_before_tables

ENGINE = {
    "max_model_len": 512, "max_num_seqs": 12, "num_gpu_blocks_override": 240, "max_num_batched_tokens": 128,
    "scheduling_policy": "priority",
}  # fmt: skip
EXACT = [name for name, family in families.FAMILIES.items() if family.dtype == "float32"]
ROUNDED = [name for name in families.FAMILIES if name not in EXACT]


def requests(seed: int) -> list[dict[str, Any]]:
    drawn = harness.prompts(20, (40, 160), (60, 120), seed=seed, shared=64)
    return [request | {"priority": i % 3} for i, request in enumerate(drawn)]


def pressed(
    family: str,
    asked: list[dict[str, Any]],
    engine: dict[str, Any],
    folder: Path,
    model: Path | None = None,
    order: str = "fcfs",
) -> dict[str, Any]:
    """``model``: the family's, where it was made before."""
    kind = (families.PLAIN | families.FAMILIES)[family]
    families.skip_unless_served(kind)
    llm = model or families.make(family, folder / "model")
    job = {
        "scenario": "pressed", "model": str(llm), "requests": asked, "seed": 3,
        "gaps": True, "engine": ENGINE | kind.engine | {"enable_prefix_caching": True, "dtype": kind.dtype} | engine,
        "plugin": harness.plugin("random:0.7", order=order),
    }  # fmt: skip
    return harness.run(job, folder, workers=engine.get("tensor_parallel_size", 1), torchvision=kind.torchvision)


def assert_unharmed(result: dict[str, Any]) -> None:
    harness.assert_exact(result["reference"], result, leave_out=result["aborted"])
    assert_eventful(result)


def assert_eventful(result: dict[str, Any]) -> None:
    """It really was under pressure, by both options, and left nothing."""
    harness.assert_nothing_left(result)
    stats = result["stats"]
    assert result["aborted"] and result["resets"]
    assert harness.total(stats, "preemptions", executed="swap") >= 5
    assert harness.total(stats, "preemptions", executed="recompute") >= 2
    assert harness.total(stats, "loaded_tokens") > 0
    assert harness.total(stats, "fallbacks", reason="error") == 0


def assert_unharmed_of(family: str, asked: list[dict[str, Any]], result: dict[str, Any]) -> None:
    """As :func:`assert_unharmed`. In bfloat16 what is said depends on the batch: there, that it is as long."""
    if (families.PLAIN | families.FAMILIES)[family].dtype == "float32":
        assert_unharmed(result)
        return
    assert_eventful(result)
    whole = {f"r{i}": request["max_tokens"] for i, request in enumerate(asked) if f"r{i}" not in result["aborted"]}
    assert {name: len(result["tokens"][name]) for name in whole} == whole


def marked(name: str) -> Any:
    slow = [] if name == "granite-4" else [pytest.mark.slow]
    return pytest.param(name, marks=[pytest.mark.feature(families.FAMILIES[name].feature), *slow])


@pytest.mark.parametrize("family", [*map(marked, EXACT)])
def test_a_family_under_pressure(family: str, tmp_path: Path) -> None:
    assert_unharmed(pressed(family, requests(11), {}, tmp_path))


@pytest.mark.feature("LoRA")
def test_no_copy_made_under_one_adapter_is_loaded_under_another(tmp_path: Path) -> None:
    """Every prompt comes under both, so that a content which was found by its tokens alone would be another one's. None
    comes without: vLLM's CPU build gives such a request the adapter of the last slot, once there is one."""
    folders = [features.adapter(tmp_path / f"adapter-{number}", number) for number in (1, 2)]
    adapters = [{"adapter": [number, str(folder)]} for number, folder in enumerate(folders, 1)]
    asked = [request | adapter for request in requests(12)[:10] for adapter in adapters]
    result = pressed("llama", asked, features.ADAPTERS, tmp_path)
    texts = result["reference"]["tokens"]
    assert all(texts[f"r{first}"] != texts[f"r{first + 1}"] for first in range(0, len(asked), 2))
    assert_unharmed(result)


def has_several(name: str) -> bool:
    return len(families.FAMILIES[name].groups) > 1


def prioritised(name: str) -> Any:
    feature = "priority scheduling over several KV cache groups" if has_several(name) else "priority scheduling"
    return pytest.param(name, marks=[*map(pytest.mark.feature, (families.FAMILIES[name].feature, feature))])


@pytest.mark.slow
@pytest.mark.parametrize("family", [*map(prioritised, ROUNDED)])
def test_a_family_of_bfloat16_under_pressure(family: str, tmp_path: Path) -> None:
    """Under drawn priorities without an order: those of the first have ended before those of the last, on average."""
    rng = random.Random(16)
    asked = [request | {"priority": rng.randrange(3)} for request in requests(16)]
    result = pressed(family, asked, {}, tmp_path)
    assert_unharmed_of(family, asked, result)
    places: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for place, name in enumerate(result["tokens"]):  # as they ended
        places[asked[int(name.removeprefix("r"))]["priority"]].append(place)
    assert fmean(places[0]) < fmean(places[1]) < fmean(places[2]), places


def ordered(name: str) -> Any:
    feature = "an order of service over several KV cache groups" if has_several(name) else "orders of service"
    return pytest.param(name, marks=pytest.mark.feature(feature))


@pytest.mark.slow
@pytest.mark.parametrize("family", [*map(ordered, families.FAMILIES)])
def test_an_order_under_pressure(family: str, tmp_path: Path) -> None:
    assert_served_in_order(family, {}, tmp_path)


def assert_served_in_order(family: str, engine: dict[str, Any], folder: Path) -> None:
    """First come, first served by vLLM, so that the order is the plugin's."""
    asked = requests(18)
    result = pressed(family, asked, {"scheduling_policy": "fcfs"} | engine, folder, order="mlfq:base=32")
    assert_unharmed_of(family, asked, result)
    assert harness.total(result["stats"], "preemptions", cause="displaced") > 0


@pytest.mark.slow
@pytest.mark.feature("tensor parallelism")
@pytest.mark.parametrize("family", families.FAMILIES)
def test_two_ranks_under_pressure(family: str, tmp_path: Path) -> None:
    asked = requests(17)
    assert_unharmed_of(family, asked, pressed(family, asked, {"tensor_parallel_size": 2}, tmp_path))


@pytest.mark.slow
@pytest.mark.feature("tensor parallelism")
@pytest.mark.parametrize("family", [*map(ordered, ["gpt-oss", "granite-4"])])
def test_an_order_on_two_ranks_under_pressure(family: str, tmp_path: Path) -> None:
    assert_served_in_order(family, {"tensor_parallel_size": 2}, tmp_path)


@pytest.mark.slow
@pytest.mark.feature("more ranks than KV heads")
@pytest.mark.parametrize("family", ["llama", "granite-4"])
def test_more_ranks_than_kv_heads_under_pressure(family: str, tmp_path: Path) -> None:
    """Both ranks keep the one head's keys and values, and half of the states each: copies weigh as the check says."""
    model = families.make(family, tmp_path / "model", kv_heads=1)
    result = pressed(family, requests(19), {"tensor_parallel_size": 2}, tmp_path, model)
    assert_unharmed(result)
    flags = ["--dtype", "float32", "--tensor-parallel-size", "2"]
    for limit in ("max_num_seqs", "max_num_batched_tokens"):
        flags += [f"--{limit.replace('_', '-')}", str(ENGINE[limit])]
    if size := (families.PLAIN | families.FAMILIES)[family].engine.get("block_size"):
        flags += ["--block-size", str(size)]
    found = check(str(model), ServerSettings("always-swap", host_gib=harness.HOST_GIB), flags)
    assert found.ok and found.host_blocks == result["stats"]["host_slots_total"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.feature(features.feature_of(name)))
        for name, feature in features.ENGINES.items()
        if feature.drafts
    ],
)
def test_drafts_under_pressure(name: str, tmp_path: Path) -> None:
    skip_before_tables("speculation is")
    feature = features.ENGINES[name]
    model = families.make(feature.family, tmp_path / "model")
    prepared = feature.prepare(tmp_path, model) if feature.prepare else {}
    asked, engine = requests(13), feature.engine | prepared | features.budget_of(feature)
    assert_unharmed_of(feature.family, asked, pressed(feature.family, asked, engine, tmp_path, model))


@pytest.mark.slow
@pytest.mark.feature("MoE")
def test_experts_under_pressure(tmp_path: Path) -> None:
    assert_unharmed(pressed("mixtral", requests(14), {}, tmp_path))


@pytest.mark.slow
@pytest.mark.feature("fp8 KV cache")
def test_fp8_under_pressure(tmp_path: Path) -> None:
    engine = {"kv_cache_dtype": "fp8"}
    families.skip_unless_stored(engine)
    assert_unharmed(pressed("llama", requests(15), engine, tmp_path))
