"""Under memory pressure, with drawn actions, priorities, aborts, forced preemptions and resets, every request of every
family says what it says alone, and nothing is left behind. Real engines, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vllm import families, features, harness

ENGINE = {
    "max_model_len": 512, "max_num_seqs": 12, "num_gpu_blocks_override": 240, "max_num_batched_tokens": 128,
    "scheduling_policy": "priority",
}  # fmt: skip
EXACT = {name: family for name, family in families.FAMILIES.items() if family.dtype == "float32"}


def requests(seed: int) -> list[dict[str, Any]]:
    drawn = harness.prompts(20, (40, 160), (60, 120), seed=seed, shared=64)
    return [request | {"priority": i % 3} for i, request in enumerate(drawn)]


def pressed(family: str, asked: list[dict[str, Any]], engine: dict[str, Any], folder: Path) -> dict[str, Any]:
    kind = (families.PLAIN | families.FAMILIES)[family]
    job = {
        "scenario": "pressed", "model": str(families.make(family, folder / "model")), "requests": asked, "seed": 3,
        "gaps": True, "engine": ENGINE | kind.engine | {"enable_prefix_caching": True, "dtype": kind.dtype} | engine,
        "plugin": harness.plugin("random:0.7"),
    }  # fmt: skip
    return harness.run(job, folder)


def assert_unharmed(result: dict[str, Any]) -> None:
    harness.assert_exact(result["reference"], result, leave_out=result["aborted"])
    harness.assert_nothing_left(result)
    stats = result["stats"]
    assert result["aborted"] and result["resets"]
    assert harness.total(stats, "preemptions", executed="swap") >= 5
    assert harness.total(stats, "preemptions", executed="recompute") >= 2
    assert harness.total(stats, "loaded_tokens") > 0
    assert harness.total(stats, "fallbacks", reason="error") == 0


def marked(name: str) -> Any:
    slow = [] if name == "granite-4" else [pytest.mark.slow]
    return pytest.param(name, marks=[pytest.mark.feature(EXACT[name].feature), *slow])


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


@pytest.mark.slow
@pytest.mark.feature("speculation")
def test_drafts_under_pressure(tmp_path: Path) -> None:
    drafter = families.make("llama", tmp_path / "drafter")
    assert_unharmed(pressed("llama", requests(13), features.itself_as_drafter(tmp_path, drafter), tmp_path))


@pytest.mark.slow
@pytest.mark.feature("MoE")
def test_experts_under_pressure(tmp_path: Path) -> None:
    assert_unharmed(pressed("mixtral", requests(14), {}, tmp_path))


@pytest.mark.slow
@pytest.mark.feature("fp8 KV cache")
def test_fp8_under_pressure(tmp_path: Path) -> None:
    assert_unharmed(pressed("llama", requests(15), {"kv_cache_dtype": "fp8"}, tmp_path))
