"""kvpolicy's connector beside another one that loads, sends and fails, under vLLM's MultiConnector: the scheduler
alone, every context position checked (`tests.vllm.store`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvpolicy_vllm.plugin.settings import transfer_config
from tests.vllm import harness, store
from tests.vllm.test_same_schedule import BASE, modes, run_alone, versions
from tests.vllm.test_symbolic import assert_right
from tests.vllm.versions import INSTALLED, skip_before_tables

pytestmark = pytest.mark.scheduler

SEEDS = range(1, 5)
OFFLOADING = "SimpleCPUOffloadConnector"


def beside(own: dict[str, Any], *others: dict[str, Any]) -> dict[str, Any]:
    """The engine arguments of ``own``, with other connectors."""
    extra = own["kv_transfer_config"]["kv_connector_extra_config"]
    return own | {"kv_transfer_config": transfer_config(extra, others)}


def job(model: str, policy: str = "random:0.7", **more: Any) -> dict[str, Any]:
    plugin = beside(harness.plugin(policy), store.SETTINGS)
    size = {"requests": 80, "blocks": 140, "budget": 512, "symbolic": True, "beside": True, "harry": True}
    return BASE | size | {"model": model, "plugin": plugin, "resets": False, "seeds": [*SEEDS]} | more


def older_than_deferred_frees(version: str) -> bool:
    return version != INSTALLED and tuple(map(int, version.split(".")[:2])) < (0, 30)


@pytest.mark.feature("MultiConnector")
@pytest.mark.parametrize("prefix_caching", [False, True], ids=["no-prefixes", "prefixes"])
@modes
@versions
def test_every_position_is_right_whoever_loads(
    version: str, asynchronous: bool, prefix_caching: bool, model: str, tmp_path: Path
) -> None:
    tried = job(model, asynchronous=asynchronous, prefix_caching=prefix_caching)
    if asynchronous and older_than_deferred_frees(version):
        with pytest.raises(harness.EngineFailed, match="--no-async-scheduling"):
            run_alone(tried, tmp_path, version)
        return
    done = run_alone(tried, tmp_path, version)["runs"]
    for result in done:
        assert_right(result)
        assert harness.total(result["stats"], "preemptions", executed="swap") > 5
        assert harness.total(result["stats"], "loaded_tokens") > 0
        for name in ("store_loads", "store_loads_in_steps", "store_failed", "sent"):
            assert result[name] > 0, name
    if prefix_caching:
        assert sum(result["met"] for result in done), "nobody loaded into blocks that a copy still needed"


@pytest.mark.feature("beside SimpleCPUOffloadConnector")
@pytest.mark.parametrize(
    "lazy", [pytest.param(False, id="eager"), pytest.param(True, id="lazy", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("layers", ["full", "full-window"])
@modes
def test_every_position_is_right_beside_what_vllm_offloads(
    asynchronous: bool, layers: str, lazy: bool, model: str, tmp_path: Path
) -> None:
    """Its stores read blocks until they end, those of victims, too; its loads may come for who has no copy."""
    skip_before_tables("what this test drives of it is")
    settings = {"cpu_bytes_to_use": 4 << 20, "lazy_offload": lazy}
    other = {"kv_connector": OFFLOADING, "kv_role": "kv_both", "kv_connector_extra_config": settings}
    tried = job(model, asynchronous=asynchronous, prefix_caching=True, layers=layers, beside=OFFLOADING)
    tried["plugin"] = beside(harness.plugin("random:0.7"), other)
    for result in run_alone(tried, tmp_path, INSTALLED)["runs"]:
        assert_right(result)
        assert harness.total(result["stats"], "preemptions", executed="swap") > 5
        assert harness.total(result["stats"], "loaded_tokens") > 0
        for name in ("offloaded_loads", "offloaded_stores", "flushes"):
            assert result[name] > 0, name
