"""What goes wrong costs time, never a token: real engines with copies that fail, are late, or have no room."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvpolicy import trace
from tests.vllm import harness
from tests.vllm.conftest import SCARCE, job

BLOCK_BYTES = 32 * 2 * 4 * 32 * 4 * 4
"""32 tokens x keys and values x 4 KV heads x 32 wide x 4 bytes x 4 layers: one block of the small model."""

FAULTS: dict[str, dict[str, Any]] = {
    "loads-late": {"late_polls": 7},
    "saves-fail": {"fail_saves": [0, 2, 3, 7]},
    "loads-fail": {"fail_loads": [0, 1, 4]},
    "everything": {"late_polls": 3, "fail_saves": [1, 4], "fail_loads": [0, 3]},
}


@pytest.mark.feature("failed copies")
@pytest.mark.parametrize("fault", FAULTS)
def test_failing_and_late_copies(
    fault: str,
    model: str,
    requests: list[dict[str, Any]],
    references: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = FAULTS[fault]
    monkeypatch.setenv("KVPOLICY_TEST_FAULTS", json.dumps(plan))
    swap = harness.plugin("always-swap", copier="tests.vllm.copiers.FaultyCopier")
    result = harness.run(job(model, requests, SCARCE, plugin=swap), tmp_path)
    harness.assert_exact(references["requests"], result)
    harness.assert_nothing_left(result)
    stats = result["stats"]
    assert harness.total(stats, "fallbacks", reason="save_failed") == len(plan.get("fail_saves", ()))
    assert harness.total(stats, "fallbacks", reason="load_failed") == len(plan.get("fail_loads", ()))
    assert harness.total(stats, "loaded_tokens") > 0


@pytest.mark.feature("tensor parallelism")
@pytest.mark.feature("failed copies")
def test_a_rank_that_fails_alone(
    model: str,
    requests: list[dict[str, Any]],
    references: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With two workers, each with its own half of every block, a copy counts only where both made it, and a time where
    both know it; here each fails some that the other makes."""
    plans = [{"fail_saves": [1]}, {"fail_loads": [0, 2], "fail_watch": [9]}]
    monkeypatch.setenv("KVPOLICY_TEST_FAULTS", json.dumps({"by_rank": plans}))
    swap = harness.plugin("always-swap", copier="tests.vllm.copiers.FaultyCopier", trace=str(tmp_path / "trace"))
    work = job(model, requests, SCARCE | {"tensor_parallel_size": 2}, plugin=swap)
    result = harness.run(work, tmp_path, workers=2)
    harness.assert_exact(references["requests"], result)
    harness.assert_nothing_left(result)
    stats = result["stats"]
    assert harness.total(stats, "fallbacks", reason="save_failed") == 1
    assert harness.total(stats, "fallbacks", reason="load_failed") == 2
    assert harness.total(stats, "preemptions", executed="swap") >= 4
    assert harness.total(stats, "loaded_tokens") > 0
    assert_timed(tmp_path / "trace", stats, failures=1)


def test_host_pool_of_three_blocks(
    model: str, requests: list[dict[str, Any]], references: dict[str, Any], tmp_path: Path
) -> None:
    """Most victims do not fit: they are recomputed, and that is counted."""
    swap = harness.plugin("always-swap", host_gib=3.5 * BLOCK_BYTES / 2**30)
    result = harness.run(job(model, requests, SCARCE, plugin=swap), tmp_path)
    harness.assert_exact(references["requests"], result)
    harness.assert_nothing_left(result)
    assert result["stats"]["host_slots_total"] == 3
    assert harness.total(result["stats"], "fallbacks", reason="host_full") > 0


@pytest.mark.feature("aborts")
def test_aborts_in_every_stage(
    model: str,
    requests: list[dict[str, Any]],
    references: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request aborted while saved, while loading or while running takes nobody with it."""
    monkeypatch.setenv("KVPOLICY_TEST_FAULTS", json.dumps({"late_polls": 5}))
    swap = harness.plugin("always-swap", copier="tests.vllm.copiers.FaultyCopier")
    result = harness.run(job(model, requests, SCARCE, scenario="aborts", plugin=swap), tmp_path)
    assert set(result["aborted"]) == {"saved", "loading", "running"}
    harness.assert_exact(references["requests"], result, leave_out=list(result["aborted"].values()))
    harness.assert_nothing_left(result)


@pytest.mark.feature("resets of the prefix cache")
@pytest.mark.parametrize("stage", ["saved", "loading"])
def test_reset_after_the_weights_changed(
    stage: str, model: str, requests: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a reset nothing saved by the old weights is used: every continuation is the changed model's own.

    vLLM itself refuses to finish the reset while somebody is being loaded; serving goes on all the same.
    """
    monkeypatch.setenv("KVPOLICY_TEST_FAULTS", json.dumps({"late_polls": 5}))
    swap = harness.plugin("always-swap", copier="tests.vllm.copiers.FaultyCopier")
    work = job(model, requests, SCARCE, scenario="reset", plugin=swap) | {"while": stage}
    result = harness.run(work, tmp_path)
    assert result["seen"].get("saved") and result["seen"].get(stage) and result["seen"]["running"]
    assert bool(result["raised"]) == bool(result["seen"].get("loading"))
    harness.assert_nothing_left(result)
    assert len(result["tokens"]) == len(requests)
    after = {name: result["tokens"][name][len(had) :] for name, had in result["before"].items()}
    continued = {name: tokens for name, tokens in after.items() if tokens}
    harness.assert_exact(result["checks"], {"tokens": continued})


def test_the_trace_folder_is_removed(
    model: str, requests: list[dict[str, Any]], references: dict[str, Any], tmp_path: Path
) -> None:
    """Records are dropped and counted; requests do not notice."""
    folder = tmp_path / "trace"
    swap = harness.plugin("always-swap", trace=str(folder))
    work = job(model, requests, SCARCE, scenario="losing_trace", plugin=swap) | {"remove": str(folder)}
    result = harness.run(work, tmp_path)
    harness.assert_exact(references["requests"], result)
    harness.assert_nothing_left(result)
    assert harness.total(result["stats"], "records_dropped") > 0
    assert not folder.exists()


def test_forward_passes_that_cannot_be_timed(
    model: str,
    requests: list[dict[str, Any]],
    references: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their steps are recorded without the device's time, and counted; the other steps have it, within their own."""
    monkeypatch.setenv("KVPOLICY_TEST_FAULTS", json.dumps({"fail_watch": [0, 9, 10]}))
    swap = harness.plugin("always-swap", copier="tests.vllm.copiers.FaultyCopier", trace=str(tmp_path / "trace"))
    result = harness.run(job(model, requests, SCARCE, plugin=swap), tmp_path)
    harness.assert_exact(references["requests"], result)
    harness.assert_nothing_left(result)
    assert_timed(tmp_path / "trace", result["stats"], failures=3)


def assert_timed(folder: Path, stats: dict[str, float], failures: int) -> None:
    """Forward passes were timed, each within its step, but for so many that could not be and were counted."""
    assert harness.total(stats, "untimed_forwards") == failures
    assert harness.total(stats, "records_dropped") == 0
    steps = [row for row in trace.read(folder).rows("steps") if row["scheduled_tokens"]]
    assert sum(row["device_s"] is None for row in steps) == failures
    timed = [row for row in steps if row["device_s"] is not None]
    assert len(timed) > 20 and all(0 < row["device_s"] <= row["duration_s"] for row in timed)
