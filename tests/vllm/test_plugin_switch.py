"""The plugin switched off and on in a running engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpolicy_vllm.bench.engine_process import EngineProcess, plugin_arguments
from kvpolicy_vllm.bench.overload import Settings
from kvpolicy_vllm.bench.plugin_switch import PluginSwitch
from kvpolicy_vllm.plugin.scheduler import PolicyHooks
from kvpolicy_vllm.plugin.settings import Settings as PluginSettings

SERVING = "kvpolicy_vllm.bench.serve_engine"


def test_with_workers_of_their_own_processes_the_plugin_stays_on() -> None:
    """As in a server's engine on the CPU, which `characterize` serves with."""

    class Adaptive(PolicyHooks, SimpleNamespace):
        def __init__(self, **fields: Any) -> None:
            SimpleNamespace.__init__(self, **fields)

    scheduler = Adaptive(connector=object(), requests={}, ordering=None)
    switch = PluginSwitch(SimpleNamespace(scheduler=scheduler, model_executor=SimpleNamespace()))
    switch.set(True)
    assert isinstance(scheduler, Adaptive) and scheduler.connector is not None
    with pytest.raises(ValueError, match="only where the worker is in the engine's own process"):
        switch.set(False)


def test_the_plugin_can_be_taken_out_and_put_back(model: str, tmp_path: Path) -> None:
    """Without it the scheduler is vLLM's own, does what a stock engine does, and reports nothing of ours. Nor does it
    matter whether an engine has so little memory, or some is held out of play."""
    engine = Settings(model, on_cpu=True, device_blocks=12, context_tokens=256).arguments()
    job = {"do": "serve", "requests": [[0.0, 60, 60]] * 6, "seed": 1, "gaps": False}
    with EngineProcess(SERVING, tmp_path / "stock.log") as process:
        process.ask({"do": "start", "engine": engine})
        stock = process.ask(job | {"policy": None})
    with EngineProcess(SERVING, tmp_path / "ours.log") as process:
        larger = engine | {"num_gpu_blocks_override": 20}
        process.ask({"do": "start", "engine": larger | plugin_arguments(PluginSettings("always-swap", host_gib=1.0))})
        runs = [process.ask(job | {"policy": policy, "device_blocks": 12}) for policy in (None, "always-swap", None)]
    assert stock["preemptions"] > 2
    for run in (runs[0], runs[2]):
        assert run["scheduler"] == ["SilentScheduler", "Silent", *stock["scheduler"]]
        assert not run["stats"]
        for same in ("tokens", "steps", "preemptions", "scheduled_tokens", "recomputed_tokens"):
            assert run[same] == stock[same]
    assert runs[1]["scheduler"] == ["AdaptiveSyncScheduler", "PolicyHooks", *stock["scheduler"]]
    assert runs[1]["stats"]["loaded_tokens"] > 0 and runs[1]["tokens"] == stock["tokens"]
