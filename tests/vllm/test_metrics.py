"""What is handed to vLLM's metrics."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from kvpolicy_vllm.plugin.metrics import KVPolicyStats


def test_counters_add_up_and_gauges_stand() -> None:
    first = KVPolicyStats({"counters": {"fallbacks|reason=host_full": 1}, "gauges": {"host_slots_used": 3}})
    second = KVPolicyStats({"counters": {"fallbacks|reason=host_full": 2}, "gauges": {"host_slots_used": 0}})
    both = first.aggregate(second)
    assert both.data == {"counters": {"fallbacks|reason=host_full": 3}, "gauges": {"host_slots_used": 0}}
    assert KVPolicyStats().is_empty() and not both.is_empty()
