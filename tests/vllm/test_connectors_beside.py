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
CHUNKS = "OffloadingConnector"


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


def beside_chunks(model: str, folder: Path, connector: str, layers: str, asynchronous: bool) -> list[dict[str, Any]]:
    """Half of the requests go on where one of the others ended: they may load what was computed for it. ``connector``:
    a class of :mod:`tests.vllm.offloading_connector`."""
    skip_before_tables("what this test drives of it is")
    other = {
        "kv_connector": connector, "kv_connector_module_path": "tests.vllm.offloading_connector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 64 << 20},
    }  # fmt: skip
    more = {"asynchronous": asynchronous, "prefix_caching": True, "layers": layers, "requests": 40, "continued": True}
    tried = job(model, **more, beside=CHUNKS)
    tried["plugin"] = beside(harness.plugin("random:0.7"), other)
    done: list[dict[str, Any]] = run_alone(tried, folder, INSTALLED)["runs"]
    for result in done:
        assert harness.total(result["stats"], "preemptions", executed="swap") > 5
        assert harness.total(result["stats"], "loaded_tokens") > 0
        for name in ("offloaded_loads", "offloaded_stores", "flushes"):
            assert result[name] > 0, name
    return done


def test_offloading_beside_another_load_stores_what_was_loaded(model: str, tmp_path: Path) -> None:
    """Why the plugin refuses OffloadingConnector: let in, it stores under a prompt's key what kvpolicy has loaded into
    the block meanwhile, and who comes with that prompt reads it. Everything else is right: nothing is left behind, and
    no token is lost. Should this fail some day, the connector can be let in.

    It takes a store that is late by a step and a load into the same block: of four settings that were tried with the
    same draws, two came to it, and in this one it was read."""
    done = beside_chunks(model, tmp_path, "Offloading", "full-window", False)
    assert sum(result["stored_wrong"] for result in done) > 0
    assert any(result["wrong"] for result in done), "nobody has read what was stored wrong"
    for result in done:
        assert_right(result | {"wrong": []})


@pytest.mark.parametrize("layers", ["full", "full-window"])
@modes
def test_offloading_that_is_told_of_every_load_is_right(
    asynchronous: bool, layers: str, model: str, tmp_path: Path
) -> None:
    """The same with nothing changed but that: its scheduler side and kvpolicy's do not harm each other otherwise."""
    for result in beside_chunks(model, tmp_path, "ToldOffloading", layers, asynchronous):
        assert result["stored_wrong"] == 0
        assert_right(result)
