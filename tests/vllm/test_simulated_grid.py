"""`kvpolicy simulate --engine vllm`: the same figures as the built-in engine's, but for the time it takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import kvpolicy
from kvpolicy import integrations
from kvpolicy.study.config import Run
from kvpolicy_vllm.simulator.engine import VllmScheduler

pytestmark = [
    pytest.mark.scheduler,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),  # vLLM's own
]
CONFIG = {
    "model_type": "llama",
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 4096,
    "vocab_size": 32000,
    "torch_dtype": "bfloat16",
}
DIFFERS = ("simulator_wall_s", "steps", "inputs", "digest")
"""What two engines may differ in; steps that compute nothing are counted by neither rule."""


def test_both_engines_come_to_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is registered when the package is installed; here it may be an older one that is."""
    monkeypatch.setattr(integrations, "simulator", lambda name: VllmScheduler())
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    given: dict[str, Any] = {
        "workloads": ["azure-conversation-2023?n=24&context=1024"],
        "policies": ["always-recompute", "always-swap", "minwaste:analytic"],
        "kv_blocks": [150],
        "hardware": f"H100-SXM:{tmp_path}",
    }
    ours, theirs = (
        kvpolicy.simulate(**given, run=Run(engine=engine, jobs=0, cache=tmp_path / "cache"))
        for engine in ("builtin", "vllm")
    )
    assert len(ours.results) == len(theirs.results) == 3
    for one, other in zip(ours.results, theirs.results, strict=True):
        assert sum(one["preemptions"].values()) > 0
        for name in one.keys() - set(DIFFERS):
            assert other[name] == (
                pytest.approx(one[name], rel=1e-9) if isinstance(one[name], float) else _near(one[name])
            )


def _near(value: Any) -> Any:
    if isinstance(value, dict) and all(isinstance(one, int | float) for one in value.values()):
        return pytest.approx(value, rel=1e-2)  # p99s of inter-token times are read off a histogram
    return value
