"""What the plugin does not serve is refused when the engine starts, by name and with what would be right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vllm import harness
from tests.vllm.test_same_schedule import BASE, run_alone

GOOD = harness.plugin("always-swap")
TRANSFER = GOOD["kv_transfer_config"]


def transfer(**changes: Any) -> dict[str, Any]:
    return GOOD | {"kv_transfer_config": TRANSFER | changes}


def extra(**changes: Any) -> dict[str, Any]:
    return transfer(kv_connector_extra_config=TRANSFER["kv_connector_extra_config"] | changes)


REFUSALS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "scheduler without connector": ({"scheduler_cls": GOOD["scheduler_cls"]}, ("--kv-transfer-config", "connector")),
    "connector without scheduler": (
        {"kv_transfer_config": TRANSFER},
        ("--scheduler-cls kvpolicy_vllm.AdaptiveScheduler",),
    ),
    "consumer role": (transfer(kv_role="kv_both"), ("kv_both", "kv_producer")),
    "loads may fail requests": (transfer(kv_load_failure_policy="fail"), ("kv_load_failure_policy", "recompute")),
    "unknown key": (extra(polcy="always-swap"), ("'polcy'", "policy")),
    "unknown policy": (extra(policy="sometimes-swap"), ("sometimes-swap", "threshold:TOKENS")),
    "no such cost model": (extra(policy="cheapest:no-such-model"), ("no-such-model",)),
    "wrong type": (extra(host_gib="much"), ("host_gib", "number")),
    "nothing fits": (extra(host_gib=1e-9), ("host_gib", "holds no KV block")),
    "too much memory": (extra(host_gib=1e6), ("host_gib", "force_host_gib")),
    "bad link": (extra(link="fast"), ("link", "BYTES_PER_S")),
    "offloading as well": (GOOD | {"kv_offloading_size": 1.0}, ("kv-offloading-size",)),
    "offloading as well, by entry point": (
        transfer(kv_connector_module_path=None) | {"kv_offloading_size": 1.0},
        ("kv-offloading-size",),
    ),
    "another connector": (
        transfer(kv_connector="ExampleConnector", kv_connector_module_path=None),
        ("ExampleConnector", "KVPolicyConnector"),
    ),
    "several connectors": (
        transfer(
            kv_connector="MultiConnector",
            kv_connector_module_path=None,
            kv_connector_extra_config={"connectors": [TRANSFER]},
        ),
        ("MultiConnector",),
    ),
    "speculative decoding": (
        GOOD | {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}},
        ("speculative",),
    ),
    "context parallelism": (GOOD | {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}, ("context",)),
    "pipeline parallelism": (GOOD | {"pipeline_parallel_size": 2}, ("pipeline",)),
}


@pytest.fixture(scope="module")
def messages(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """All configurations tried in one process, by the scheduler's own start-up."""
    folder: Path = tmp_path_factory.mktemp("refusals")
    tried = {name: arguments for name, (arguments, _) in REFUSALS.items()}
    found = run_alone(BASE | {"model": model, "refusals": tried}, folder, "")
    return dict(found["messages"])


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_by_name(name: str, messages: dict[str, str]) -> None:
    for words in REFUSALS[name][1]:
        assert words in messages[name]


def test_two_kv_cache_groups(messages: dict[str, str]) -> None:
    assert "2 KV cache groups" in messages["groups"]


def test_version_out_of_range(messages: dict[str, str]) -> None:
    assert "0.24 to 0.33" in messages["version"]
