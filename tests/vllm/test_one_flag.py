"""`KVPOLICY=...` alone makes the engine configuration that the flags make, and says what is wrong where it is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs

import kvpolicy_vllm.plugin
from kvpolicy.errors import InputError
from kvpolicy.settings import ServerSettings
from kvpolicy_vllm import launch
from kvpolicy_vllm.plugin.settings import SCHEDULER, transfer_config
from tests.vllm import harness

pytestmark = pytest.mark.scheduler


@pytest.fixture(autouse=True)
def wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that was started with the variable; vLLM's own method is back afterwards."""
    monkeypatch.setattr(EngineArgs, "create_engine_config", EngineArgs.create_engine_config)
    monkeypatch.setenv("KVPOLICY", "always-swap")
    kvpolicy_vllm.plugin.register()
    kvpolicy_vllm.plugin.register()


def arguments(model: str, kind: Any = AsyncEngineArgs, **more: Any) -> Any:
    return kind(model=model, dtype="float32", skip_tokenizer_init=True, **more)


@pytest.mark.parametrize("kind", [EngineArgs, AsyncEngineArgs])
def test_it_is_what_the_flags_are(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    folder = tmp_path / "trace"
    monkeypatch.setenv("KVPOLICY", f"always-swap,order=urgent,host_gib=0.25,trace={folder}")
    made = arguments(model, kind)
    config = made.create_engine_config()
    extra = launch.options(ServerSettings("always-swap", host_gib=0.25, trace=folder, order="urgent"))
    wanted = transfer_config(extra)
    assert config.scheduler_config.scheduler_cls == SCHEDULER
    assert {name: getattr(config.kv_transfer_config, name) for name in wanted} == wanted
    assert config.shutdown_timeout == launch.SHUTDOWN_S, "time to write the trace"
    again = made.create_engine_config()
    assert again.kv_transfer_config.kv_connector_extra_config == extra, "API processes make it again"


@pytest.mark.parametrize("value", ["", " ", "off"])
def test_without_it_nothing_is_changed(model: str, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("KVPOLICY", value)
    config = arguments(model).create_engine_config()
    assert config.kv_transfer_config is None and config.scheduler_config.scheduler_cls is None


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("always-swop", "always-swop"),
        ("cheapest:no/such/model", "no/such/model"),
        ("always-swap,order=fastest", "fastest"),
        ("always-swap,host_gib=much", "KVPOLICY: host_gib is 'much', should be a number"),
        ("order=urgent", "KVPOLICY: key 'policy' is missing"),
    ],
)
def test_a_bad_value_ends_the_start(model: str, monkeypatch: pytest.MonkeyPatch, value: str, words: str) -> None:
    monkeypatch.setenv("KVPOLICY", value)
    with pytest.raises(Exception, match=words):
        arguments(model).create_engine_config()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"scheduler_cls": "somebody.Elses"}, "--scheduler-cls is given as well"),
        ({"kv_offloading_size": 1.0}, "--kv-offloading-size is given as well"),
        (harness.plugin("always-recompute"), "--kv-transfer-config is given as well"),
    ],
)
def test_flags_that_contradict_it_are_named(model: str, given: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        arguments(model, **given).create_engine_config()
