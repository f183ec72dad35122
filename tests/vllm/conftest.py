"""The small model and the runs with memory enough that other runs are compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vllm import harness

ENGINE: dict[str, Any] = {
    "block_size": 32,
    "max_model_len": 1024,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 2048,
    "enable_prefix_caching": False,
}
PLENTY = {"num_gpu_blocks_override": 800}
SCARCE = {"num_gpu_blocks_override": 44}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from kvpolicy_vllm.bench.models import make_llama

    return str(make_llama(tmp_path_factory.mktemp("llama"), seed=0))


def job(model: str, requests: list[dict[str, Any]], engine: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"scenario": "plain", "model": model, "requests": requests, "engine": ENGINE | engine, **more}


@pytest.fixture(scope="session")
def requests() -> list[dict[str, Any]]:
    """Unrelated prompts, with priorities that are used only where the engine schedules by them."""
    result = harness.prompts(24, (60, 320), (60, 120), seed=1)
    return [request | {"priority": i % 3} for i, request in enumerate(result)]


@pytest.fixture(scope="session")
def related() -> list[dict[str, Any]]:
    """Prompts that begin alike, for prefix caching."""
    return harness.prompts(24, (40, 200), (60, 120), seed=2, shared=96)


@pytest.fixture(scope="session")
def sampled() -> list[dict[str, Any]]:
    result = harness.prompts(8, (60, 200), (60, 100), seed=3)
    return [request | {"temperature": 0.8, "seed": 100 + i, "n": 4} for i, request in enumerate(result)]


@pytest.fixture(scope="session")
def references(
    tmp_path_factory: pytest.TempPathFactory,
    model: str,
    requests: list[dict[str, Any]],
    related: list[dict[str, Any]],
    sampled: list[dict[str, Any]],
) -> dict[str, dict[str, Any]]:
    """Stock vLLM with memory enough for everybody, by workload."""
    folder: Path = tmp_path_factory.mktemp("references")
    workloads = {"requests": requests, "related": related, "sampled": sampled}
    outcome = harness.run(job(model, [], PLENTY, scenario="several", workloads=workloads, gaps=True), folder)
    assert not outcome["preempted"], "the reference run had too little memory"
    return {name: outcome[name] for name in workloads}
