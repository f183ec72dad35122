"""The engine core in a process of its own, and shadow mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.alternating import ALTERNATING
from kvpolicy import shadow_savings, trace
from kvpolicy.hardware import available_memory_bytes
from kvpolicy.settings import GIB, ServerSettings
from kvpolicy_vllm import launch
from kvpolicy_vllm.plugin.settings import SCHEDULER, transfer_config
from tests.evaluation.test_log_headroom import Rates
from tests.vllm import harness
from tests.vllm.conftest import SCARCE, job


@pytest.mark.feature("metrics")
def test_a_policy_goes_to_the_other_process_and_metrics_come_back(
    model: str, requests: list[dict[str, Any]], references: dict[str, Any], tmp_path: Path
) -> None:
    """A policy may be given itself: it travels with vLLM's configuration and needs no switch. `LLM.get_metrics()` tells
    what the engine core's plugin counted. Both options come about, as the policy named in the settings never would."""
    plugin = harness.plugin("always-swap")
    work = job(model, requests, SCARCE, scenario="own_process", plugin=plugin, object=ALTERNATING)
    result = harness.run(work, tmp_path, multiprocess=True)
    harness.assert_exact(references["requests"], result)
    part = result["metrics"]
    assert part["preemptions"] >= 2, "both options, in turn"
    assert part["recomputed_tokens"] > 0 and part["loaded_tokens"] > 0
    assert part["copy_bytes"] > 0 and part["copy_microseconds"] > 0
    assert part["host_slots_used"] == 0 and part["host_slots_total"] > 0


def test_a_vllm_that_loads_no_plugin_of_ours_finds_the_connector(
    model: str, requests: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With VLLM_PLUGINS set to something else, the flags that `serve` and `config` write are enough."""
    monkeypatch.setenv("VLLM_PLUGINS", "somebody_elses")
    extra = launch.options(ServerSettings("always-swap", host_gib=0.25))
    plugin = {"scheduler_cls": SCHEDULER, "kv_transfer_config": transfer_config(extra)}
    work = job(model, requests[:8], SCARCE, scenario="own_process", plugin=plugin)
    result = harness.run(work, tmp_path, multiprocess=True)
    assert [len(tokens) for tokens in result["tokens"].values()] == [request["max_tokens"] for request in requests[:8]]
    assert result["metrics"]["host_slots_total"] > 0


def test_shadow_decides_and_records_but_recomputes(
    model: str, requests: list[dict[str, Any]], references: dict[str, Any], tmp_path: Path
) -> None:
    """Every decision to swap is written down as intended and executed as vLLM's own recompute. No host memory is taken:
    a server that is not in shadow mode would be refused so much. A cost model says what it would have saved."""
    folder = tmp_path / "trace"
    too_much = 0.55 * available_memory_bytes() / GIB
    swap = harness.plugin("always-swap", shadow=True, trace=str(folder), host_gib=too_much)
    work = job(model, requests, SCARCE, scenario="harried", plugin=swap, host_pool=True)
    result = harness.run(work, tmp_path)
    harness.assert_exact(references["requests"], result)
    harness.assert_nothing_left(result)
    stats = result["stats"]
    assert harness.total(stats, "copy_bytes") == 0 and harness.total(stats, "loaded_tokens") == 0
    rows = trace.read(folder).rows("decisions")
    feasible = [row for row in rows if len(row["options"]) == 2]
    assert feasible and all(row["options"][row["chosen"]]["kind"] == "swap" for row in feasible)
    assert {(row["executed"], row["reason"]) for row in feasible} == {("recompute", "shadow")}
    assert harness.total(stats, "fallbacks", reason="shadow") == len(feasible)
    assert harness.total(stats, "shadow_preemptions", intended="swap") == len(feasible)
    assert harness.total(stats, "shadow_untold", reason="no_prediction") == len(feasible)
    assert result["host_pool_bytes"] == 0 and result["copier"] == "ShadowCopier"
    found = shadow_savings([folder], Rates(1e-3))
    assert found.intended == {"recompute": 0, "swap": len(feasible)} and found.told == len(feasible)
    assert found.hours is not None and found.per_hour is not None and found.per_hour.low_s <= found.per_hour.mean_s
