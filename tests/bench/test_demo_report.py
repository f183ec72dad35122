"""The demo's report in words and in JSON."""

from __future__ import annotations

import math
from typing import Any

from kvpolicy.stats import Ratio
from kvpolicy_vllm.bench.demo_report import DemoReport, LinkReport
from kvpolicy_vllm.bench.exactness import Comparison


def link_report(name: str, **more: Any) -> LinkReport:
    one = {"mean": 0.2, "p50": 0.1, "p99": 1.0}
    arm = {
        "throughput_tok_s": 1000.0,
        "goodput": 2.5,
        "ttft_s": one,
        "itl_s": one,
        "preemptions": {"recompute": 3, "swap": 4},
        "recomputed_tokens": 50,
        "moved_bytes": 6_000_000,
        "runs": 8,
    }
    values: dict[str, Any] = {
        "name": name,
        "link": {"kind": "native"},
        "policies": {"vllm": arm},
        "ratios": {
            "throughput a / b": Ratio(1.02, 0.99, 1.05, 8),
            "throughput learned / always-swap": Ratio(1.2, 1.1, 1.3, 8),
        },
        "no_pressure_ratio": Ratio(1.0, 0.99, 1.01, 8),
        "no_pressure_preemptions": 0,
        "evaluate": {},
        "train": {"always_wins": "swap", "best_threshold": "always-swap"},
        "comparison": Comparison(1000),
        "targets": {},
        "workload": {},
        "makespan_s": {"vllm": (1.0,)},
    }
    return LinkReport(**values | more)


def test_a_tie_is_called_a_tie_and_a_constant_policy_constant() -> None:
    text = DemoReport((link_report("native"),), "demo.json").text()
    assert "throughput a / b: tie (1.020, 0.990 to 1.050)" in text
    assert "throughput learned / always-swap: 1.200 (1.100 to 1.300)" in text
    assert "the learned policy is constant" in text
    assert "no simulated link" in text


def test_the_best_threshold_is_named_and_whether_the_learned_policy_serves_more() -> None:
    text = DemoReport((link_report("native"),), "demo.json").text()
    assert "best threshold on the training states: always-swap; the learned policy's throughput is better" in text
    own_arm = link_report("native")
    one = own_arm.policies["vllm"]
    report = link_report(
        "native",
        train={"always_wins": None, "best_threshold": "threshold:200"},
        policies={"learned": one, "best threshold": one},
        ratios={"throughput learned / best threshold": Ratio(1.02, 0.99, 1.05, 8)},
    )
    text = DemoReport((report,), "demo.json").text()
    assert "threshold:200; the learned policy's throughput is no better" in text
    report = link_report("native", ratios={"throughput learned / always-swap": Ratio(0.9, 0.85, 0.95, 8)})
    assert "always-swap; the learned policy's throughput is no better" in DemoReport((report,), "demo.json").text()


def test_inexact_tokens_are_reported_first() -> None:
    wrong = Comparison(1000, 0, ("always-swap, block 0, request 3: token 1 is 2, should be 3",))
    report = DemoReport((link_report("native"), link_report("simulated", comparison=wrong)), "demo.json")
    assert not report.exact
    assert "NOT EXACT" in report.text()
    assert "request 3" in report.text()
    assert [result["exact"] for result in report.to_dict().values()] == [True, False]


def test_a_simulated_link_is_labelled() -> None:
    link = {"kind": "simulated", "bytes_per_s": 2e8, "latency_s": 0.01}
    assert "SIMULATED link: 2e+08 bytes/s, 0.01 s latency" in DemoReport((link_report("s", link=link),), "x").text()


def test_the_json_holds_no_nan() -> None:
    values = link_report("native").to_dict()
    assert all(math.isfinite(value) for ratio in values["ratios"].values() for value in ratio.values())
