"""With the plugin on, `always-recompute` in the order `fcfs` schedules exactly as stock vLLM: the scheduler alone, step
by step.

On every vLLM that is claimed, where its sources are here, and those that ``KVPOLICY_VLLM_SOURCES`` names, separated as
in PATH.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vllm import harness
from tests.vllm.versions import INSTALLED, quick_and_others, source_or_skip

pytestmark = pytest.mark.scheduler

versions = pytest.mark.parametrize("version", quick_and_others(INSTALLED), scope="module")
"""One after the other: at each its vLLM is imported once."""
modes = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
SETTINGS: dict[str, dict[str, Any]] = {
    "fcfs": {},
    "prefix-caching": {"prefix_caching": True},
    "priority": {"scheduling": "priority"},
    "small-budget": {"budget": 128, "prefix_caching": True},
}
BASE: dict[str, Any] = {
    "sequences": 48, "budget": 2048, "prefix_caching": False, "scheduling": "fcfs", "blocks": 260,
    "requests": 250, "seed": 11, "plugin": None, "asynchronous": False,
}  # fmt: skip


def run_alone(job: dict[str, Any], folder: Path, version: str) -> dict[str, Any]:
    environment = harness.environment() | {"KVPOLICY_VLLM_SOURCE": source_or_skip(version)}
    return harness.run_module("tests.vllm.alone", job, folder, environment)


@pytest.mark.feature("asynchronous scheduling")
@versions
@modes
@pytest.mark.parametrize("setting", SETTINGS)
def test_always_recompute_is_stock(setting: str, asynchronous: bool, version: str, model: str, tmp_path: Path) -> None:
    job = BASE | SETTINGS[setting] | {"model": model, "asynchronous": asynchronous, "requests": 150}
    stock = run_alone(job, tmp_path, version)
    ours = run_alone(job | {"plugin": harness.plugin("always-recompute", order="fcfs")}, tmp_path, version)
    assert ("AsyncScheduler" in ours["base"]) == asynchronous
    assert "PolicyHooks" in ours["base"] and "PolicyHooks" not in stock["base"]
    assert harness.total(ours["stats"], "preemptions") > 20
    assert ours["schedule"] == stock["schedule"], "tokens, victims, and the order of the running requests"
    harness.assert_nothing_left(ours)


@versions
@modes
def test_swapping_leaves_nothing_behind(asynchronous: bool, version: str, model: str, tmp_path: Path) -> None:
    """Bookkeeping of saves and late loads over a thousand steps, also under asynchronous scheduling."""
    job = BASE | {"model": model, "asynchronous": asynchronous, "plugin": harness.plugin("random:0.5")}
    ours = run_alone(job | {"prefix_caching": True}, tmp_path, version)
    assert ours["unfinished"] == 0
    harness.assert_nothing_left(ours)
    assert harness.total(ours["stats"], "preemptions", executed="swap") > 20
    assert harness.total(ours["stats"], "loaded_tokens") > 0


@pytest.mark.feature("priority scheduling")
@pytest.mark.parametrize("scheduling", ["fcfs", "priority"])
@versions
@modes
def test_only_loaded_requests_keep_their_places(
    asynchronous: bool, version: str, scheduling: str, model: str, tmp_path: Path
) -> None:
    """Newcomers arrive in every step, also while others are away. Some loads fail: these requests are recomputed."""
    job = BASE | {"model": model, "asynchronous": asynchronous, "scheduling": scheduling, "symbolic": True}
    ours = run_alone(job | {"plugin": harness.plugin("random:0.7")}, tmp_path, version)
    assert ours["misplaced"] == []
    assert ours["put_back"] > 10 if scheduling == "fcfs" else ours["put_back"] == 0
    assert harness.total(ours["stats"], "fallbacks", reason="load_failed") > 3
    harness.assert_nothing_left(ours)


@pytest.mark.parametrize("order", ["fcfs", "mlfq:base=4", "urgent"])
@versions
@modes
def test_no_stream_waits_for_a_prompt(asynchronous: bool, version: str, order: str, model: str, tmp_path: Path) -> None:
    """With a small budget and memory for all: whoever has come last would have all of it, by its rank."""
    job = BASE | {"model": model, "asynchronous": asynchronous, "budget": 64, "blocks": 2000, "requests": 60}
    ours = run_alone(job | {"plugin": harness.plugin("always-recompute", order=order)}, tmp_path, version)
    assert ours["beside_prompts"] > 50 and ours["stalled"] == [] and ours["misplaced"] == []
    assert harness.total(ours["stats"], "preemptions") == 0 and ours["unfinished"] == 0


@pytest.mark.feature("aborts")
@pytest.mark.feature("resets of the prefix cache")
@pytest.mark.parametrize("seed", [1, 2, 3])
@versions
@modes
def test_aborts_and_resets_at_any_moment(
    asynchronous: bool, version: str, seed: int, model: str, tmp_path: Path
) -> None:
    """Whatever is queued, saved or being loaded when they come, bookkeeping ends empty."""
    job = BASE | {"model": model, "asynchronous": asynchronous, "plugin": harness.plugin("random:0.7")}
    harried = {"harry": True, "prefix_caching": True, "seed": seed, "measured": True}
    ours = run_alone(job | harried, tmp_path, version)
    assert ours["unfinished"] == 0
    harness.assert_nothing_left(ours)
    assert harness.total(ours["stats"], "preemptions", cause="reset") > 0
    assert harness.total(ours["stats"], "preemptions", executed="swap") > 20
    assert harness.total(ours["stats"], "fallbacks", reason="error") == 0
    assert harness.total(ours["stats"], "measured_preemptions") > 100
    assert ours["accounts"] <= 5, "those of the last two steps"


@pytest.mark.parametrize("scheduling", ["fcfs", "priority"])
@versions
def test_a_situation_is_counted_right(version: str, scheduling: str, model: str, tmp_path: Path) -> None:
    """Shared and hashed blocks, tokens of the others, blocks that lacked: what is counted once a step as one by one."""
    job = BASE | {"model": model, "plugin": harness.plugin("random:0.5"), "prefix_caching": True, "counts": True}
    counts = run_alone(job | {"harry": True, "scheduling": scheduling}, tmp_path, version)["counts"]
    shared, hashed, others, lacking = zip(*(by_hand for _, by_hand in counts), strict=True)
    assert len(counts) > 50 and any(shared) and len(set(hashed)) > 5 and len(set(others)) > 5 and len(set(lacking)) > 1
    assert [told for told, _ in counts] == [by_hand for _, by_hand in counts]
