"""What is read of a server's metrics and of its trace. What is shown of it is in tests/cli/test_screen.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpolicy.errors import InputError
from kvpolicy.server_metrics import Metrics, last_decisions, metrics_address
from kvpolicy.trace import core_folders
from kvpolicy.trace.parts import part_path, parts_of
from tests.synthetic import make_trace

TEXT = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a model, {x}"} 3.0
vllm:num_requests_running{engine="1",model_name="a model, {x}"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 11.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.97
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
vllm:num_preemptions_total{engine="0",model_name="m"} 20.0
vllm:kvpolicy_preemptions_total{cause="memory",engine="0",executed="swap",intended="swap",model_name="m"} 15.0
vllm:kvpolicy_preemptions_total{cause="memory",engine="0",executed="recompute",intended="swap",model_name="m"} 5.0
vllm:kvpolicy_other_cheaper_total{engine="0",executed="recompute",model_name="m"} 2.0
vllm:kvpolicy_fallbacks_total{engine="0",model_name="m",reason="host_full"} 5.0
vllm:kvpolicy_fallbacks_total{engine="0",model_name="m",reason="error"} 0.0
vllm:kvpolicy_priced_preemptions_total{engine="0",executed="swap",model_name="m"} 12.0
vllm:kvpolicy_predicted_cost_microseconds_total{engine="0",executed="swap",model_name="m"} 30000.0
vllm:kvpolicy_measured_cost_microseconds{engine="0",executed="swap",model_name="m"} 26000.0
vllm:kvpolicy_measured_preemptions_total{engine="0",executed="swap",model_name="m"} 10.0
vllm:kvpolicy_victim_delay_microseconds_total{engine="0",executed="swap",model_name="m"} 1.2e+06
vllm:kvpolicy_resumed_total{engine="0",executed="swap",model_name="m"} 12.0
vllm:kvpolicy_host_slots_used{engine="0",model_name="m"} 7.0
vllm:kvpolicy_host_slots_total{engine="0",model_name="m"} 128.0
vllm:kvpolicy_open_preemptions{engine="0",model_name="m"} 4.0
vllm:kvpolicy_cost_model{digest="0123456789abcdef",engine="0",model_name="m",policy="cheapest:mine"} 1.0
vllm:kvpolicy_cost_model{digest="",engine="0",model_name="m",policy="former"} 0.0
vllm:kvpolicy_order{engine="0",model_name="m",order="urgent"} 1.0
vllm:kvpolicy_shadow{engine="0",model_name="m"} 0.0
something broken
"""


def test_samples_are_read_and_summed() -> None:
    metrics = Metrics.of(TEXT)
    assert metrics.total("vllm:num_requests_running") == 7 and metrics.largest("vllm:kv_cache_usage_perc") == 0.97
    assert metrics.total("vllm:kvpolicy_preemptions_total", executed="swap") == 15
    assert metrics.by("vllm:kvpolicy_fallbacks_total", "reason") == {("host_full",): 5, ("error",): 0}
    assert Metrics.of("a NaN\nb +Inf\nc -Inf\nd 1\n").samples == {("d", ()): 1.0}
    assert metrics.largest("nothing") is None and metrics.total("nothing") == 0 and metrics.has_plugin


def test_the_last_decisions_come_from_the_newest_files(tmp_path: Path) -> None:
    make_trace(states=3, repeats=2).write(tmp_path / "trace")
    rows = last_decisions(tmp_path / "trace", 4)
    times = [row["time_s"] for row in rows]
    assert len(rows) == 4 and times == sorted(times, reverse=True)


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/metrics", "http://h:1/v1"])
def test_addresses(url: str) -> None:
    assert metrics_address(url) == "http://h:1/metrics"
    for wrong in ("localhost:8000", "file:///etc/passwd", ""):
        with pytest.raises(InputError, match="is no address of a server"):
            metrics_address(wrong)


def test_the_last_decisions_are_the_same_of_merged_files(tmp_path: Path) -> None:
    make_trace(states=3, repeats=2).write(tmp_path / "trace")
    before = last_decisions(tmp_path / "trace", 4)
    for core in core_folders(tmp_path / "trace"):
        for name in ("decisions", "outcomes"):
            (only,) = parts_of(core / name)
            only.path.rename(part_path(core / name, 0, 31))
            only.path.write_bytes(b"left behind by an interrupted merge")
    assert last_decisions(tmp_path / "trace", 4) == before
