"""p / d of a load from one more run that is recorded; tests/vllm/test_live_bench.py records one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvpolicy.bench_settings import BenchTarget
from kvpolicy.errors import EngineFailed
from kvpolicy.settings import ServerSettings
from kvpolicy.simulator import Server
from kvpolicy_vllm import launch
from kvpolicy_vllm.bench.recorded_prices import recorded_prices, recording_arm, sentence
from tests.simulator.worlds import LINEAR, random_workload, run

SERVER = Server(block_size=4, block_bytes=4096, device_blocks=80, host_blocks=80, token_budget=64, max_running=16)


def test_prices_are_those_of_the_trace(tmp_path: Path) -> None:
    def serve() -> None:
        run(random_workload(5, 200, 60.0), SERVER, "always-recompute", LINEAR)[1].write(tmp_path / "trace")

    found = recorded_prices(serve, tmp_path / "trace")
    assert not found["unknown"] and found["prompt_tokens"] > 200 and found["decoded_tokens"] > 200
    assert found["price_ratio"] == pytest.approx(found["prompt_token_s"] / found["decoded_token_s"])
    assert 1 <= found["batch"] <= 16 and found["lost_price_ratio"] > 0
    assert sentence(found).startswith(f"p / d at the batches that ran, {found['batch']:.1f} decodes a step: ")
    assert "of tokens that preemptions lost" in sentence(found)
    assert "preemptions" not in sentence(found | {"lost_price_ratio": None})
    json.dumps(found, allow_nan=False)


def test_what_cannot_be_served_leaves_them_unknown(tmp_path: Path) -> None:
    """The rounds were run all the same."""

    def serve() -> None:
        raise EngineFailed("the server ended:\n  it keeps windows")

    found = recorded_prices(serve, tmp_path / "trace")
    assert found["price_ratio"] is None and "not known: the server ended: it keeps windows" in sentence(found)
    nothing = recorded_prices(lambda: None, tmp_path / "nowhere")
    assert nothing["price_ratio"] is None and "nowhere" in nothing["unknown"]


def test_the_server_decides_as_vllm_does_and_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "require", lambda name: None)
    at = BenchTarget(
        "llm", settings=ServerSettings("always-swap", order="las", cache="cost"), vllm_flags=("--seed", "3")
    )
    command = recording_arm(at, tmp_path).command
    extra = json.loads(next(word for word in command if word.startswith("{")))["kv_connector_extra_config"]
    assert extra == {"policy": "always-recompute", "shadow": True, "trace": str(tmp_path)}
    assert command[-2:] == ("--seed", "3")
