"""What is handed to vLLM's metrics."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from prometheus_client import REGISTRY, Counter, Gauge, Histogram

from kvpolicy_vllm.plugin.metrics import FROM_ZERO, KVPolicyPromMetrics, KVPolicyStats


def test_counters_add_up_and_gauges_stand() -> None:
    first = KVPolicyStats({"counters": {"fallbacks|reason=host_full": 1}, "gauges": {"host_slots_used": 3}})
    second = KVPolicyStats({"counters": {"fallbacks|reason=host_full": 2}, "gauges": {"host_slots_used": 0}})
    both = first.aggregate(second)
    assert both.data == {"counters": {"fallbacks|reason=host_full": 3}, "gauges": {"host_slots_used": 0}}
    assert KVPolicyStats().is_empty() and not both.is_empty()


def test_what_was_observed_is_kept_apart_by_label() -> None:
    first = KVPolicyStats({"observed": {"copy_seconds|direction=save": [0.1]}})
    second = KVPolicyStats({"observed": {"copy_seconds|direction=save": [0.2], "copy_seconds|direction=load": [0.3]}})
    both = first.aggregate(second).aggregate(KVPolicyStats())
    assert isinstance(both, KVPolicyStats)
    assert both.data["observed"] == {"copy_seconds|direction=save": [0.1, 0.2], "copy_seconds|direction=load": [0.3]}
    assert first.data["observed"] == {"copy_seconds|direction=save": [0.1]}, "what is added to stays as it was"


def test_counters_that_alerts_watch_are_there_before_they_count() -> None:
    """From one that appears with its first count Prometheus tells no rise."""
    kinds = {kind: kind for kind in (Counter, Gauge, Histogram)}
    made = KVPolicyPromMetrics(
        SimpleNamespace(kv_transfer_config=None), kinds, ["model_name", "engine"], {0: ["made", "0"], 1: ["made", "1"]}
    )
    try:
        for key in FROM_ZERO:
            name, _, label = key.partition("|")
            labels = dict([label.split("=")]) if label else {}
            for engine in "01":
                told = {"model_name": "made", "engine": engine} | labels
                assert REGISTRY.get_sample_value(f"vllm:kvpolicy_{name}_total", told) == 0.0, key
    finally:
        for metric in made._metrics.values():
            REGISTRY.unregister(metric)
