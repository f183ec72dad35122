"""A request that was swapped or recomputed says what it would have said with memory enough. Real engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vllm import harness
from tests.vllm.conftest import SCARCE, job

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "blocks-32": ("requests", {}),
    "blocks-64": ("requests", {"block_size": 64, "num_gpu_blocks_override": 22}),
    "prefix-caching": ("related", {"enable_prefix_caching": True}),
    "chunked-prefill": ("requests", {"max_num_batched_tokens": 64}),
    "priority": ("requests", {"scheduling_policy": "priority"}),
    "all-together": (
        "related",
        {"enable_prefix_caching": True, "max_num_batched_tokens": 96, "scheduling_policy": "priority"},
    ),
    "seeded-n-4": ("sampled", {"max_num_batched_tokens": 4096}),
}


FEATURES = {
    "blocks-32": "full attention", "blocks-64": "full attention", "prefix-caching": "prefix caching",
    "chunked-prefill": "chunked prefill", "priority": "priority scheduling", "all-together": "priority scheduling",
    "seeded-n-4": "seeded sampling, n > 1",
}  # fmt: skip


@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.feature(FEATURES[case])) for case in CASES])
def test_mixed_actions_change_no_token(
    case: str, model: str, references: dict[str, Any], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Greedy (or seeded) tokens under both options in turn equal those of the run with memory enough."""
    workload, engine = CASES[case]
    requests = request.getfixturevalue(workload)
    result = harness.run(job(model, requests, SCARCE | engine, plugin=harness.alternating()), tmp_path)
    harness.assert_exact(references[workload], result)
    harness.assert_nothing_left(result)
    stats = result["stats"]
    assert harness.total(stats, "preemptions", executed="swap") >= 2
    assert harness.total(stats, "preemptions", executed="recompute") >= 2
    assert harness.total(stats, "loaded_tokens") > 0
    assert harness.total(stats, "fallbacks", reason="error") == 0


@pytest.mark.feature("tensor parallelism")
@pytest.mark.slow
def test_two_tensor_parallel_workers(
    model: str, requests: list[dict[str, Any]], references: dict[str, Any], tmp_path: Path
) -> None:
    """The same with two worker processes, each with its own half of every block. With copies that fail they are in
    `test_faults` at every run."""
    work = job(model, requests, SCARCE | {"tensor_parallel_size": 2}, plugin=harness.alternating())
    result = harness.run(work, tmp_path, workers=2)
    harness.assert_exact(references["requests"], result)
    harness.assert_nothing_left(result)
    assert harness.total(result["stats"], "preemptions", executed="swap") >= 2


def test_blocks_come_back_bit_for_bit(model: str, related: list[dict[str, Any]], tmp_path: Path) -> None:
    """Every restored block has the digest of the block that was saved."""
    swap = harness.plugin("always-swap", copier="tests.vllm.copiers.DigestCopier")
    engine = SCARCE | {"enable_prefix_caching": True}
    result = harness.run(job(model, related, engine, scenario="digests", plugin=swap), tmp_path)
    assert len(result["restored"]) >= 10
    different = [key for key, digest in result["restored"].items() if result["saved"][key] != digest]
    assert not different


def test_a_restored_request_is_not_the_next_victim(model: str, tmp_path: Path) -> None:
    """Equal requests, of which memory holds one and a half when they end: two run, until both grow.

    The second is swapped out and comes back while the third is admitted. The next victim is the third, the younger one.
    """
    crowd = harness.prompts(6, (90, 90), (96, 96), seed=9)
    engine = {"num_gpu_blocks_override": 9, "max_model_len": 256}
    result = harness.run(job(model, crowd, engine, scenario="victims", plugin=harness.plugin("always-swap")), tmp_path)
    victims = result["victims"]
    assert harness.total(result["stats"], "loaded_tokens") > 0
    names = [name for name, _ in victims]
    assert len(names) >= 3 and len(set(names)) == len(names), names
    restored = [(victim, others) for victim, others in victims if set(others) & set(names[: names.index(victim)])]
    assert restored, "a restored request ran when a younger one was preempted"
    assert all(int(other[1:]) < int(victim[1:]) for victim, others in victims for other in others)
    assert {len(tokens) for tokens in result["tokens"].values()} == {96}
    harness.assert_nothing_left(result)
