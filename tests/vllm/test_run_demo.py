"""The bench on a real engine: a small overload through every arm, and how engine processes live and die."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from rich.console import Console

from kvpolicy.hardware.link import SimulatedLink
from kvpolicy_vllm.bench.demo_report import DemoReport
from kvpolicy_vllm.bench.run_demo import QUICK, LinkResult, Loop

TINY = dataclasses.replace(QUICK, requests=16, warm_up_requests=2, calm_requests=2)


ARMS = {"vllm", "always-recompute", "always-swap", "learned", "best threshold"}


@pytest.fixture(scope="module")
def report(model: str, tmp_path_factory: pytest.TempPathFactory) -> DemoReport:
    """The demo's overload over a simulated link, with a threshold in the learned policy's place."""
    out = tmp_path_factory.mktemp("demo")
    loop = Loop(out, Path(model), True, TINY, 0, Console(stderr=True))
    header = {"kind": "simulated", "bytes_per_s": 1e9, "latency_s": 0.001}
    trained = {"always_wins": None, "best_threshold": "threshold:60"}
    link = LinkResult("simulated", SimulatedLink(1e9, 0.001), header, "threshold:100", trained, {})
    return DemoReport(tuple(loop.overload([link])), str(out / "demo.json"))


def test_all_arms_say_the_same(report: DemoReport) -> None:
    comparison = report.links[0].comparison
    assert comparison.exact, comparison.wrong
    assert comparison.tokens > 1000
    assert comparison.tokens % len(ARMS) == 0, "every arm's tokens are compared"


def test_every_arm_does_what_it_is_named_for(report: DemoReport) -> None:
    policies = report.links[0].policies
    assert set(policies) == ARMS
    assert policies["vllm"]["preemptions"]["recompute"] > 0
    # Everything arrives at once, so the plugin's recompute must schedule exactly as vLLM alone does.
    for name in ("preemptions", "recomputed_tokens", "moved_bytes"):
        assert policies["always-recompute"][name] == policies["vllm"][name]
    assert policies["vllm"]["recomputed_tokens"] > 0
    assert policies["vllm"]["moved_bytes"] == 0
    assert policies["always-swap"]["preemptions"]["swap"] > 0
    assert policies["always-swap"]["preemptions"]["recompute"] == 0
    assert policies["always-swap"]["moved_bytes"] > 0
    assert all(values["runs"] == TINY.blocks for values in policies.values())


def test_the_pair_without_pressure_has_none(report: DemoReport) -> None:
    assert report.links[0].no_pressure_preemptions == 0
    ratio = report.links[0].no_pressure_ratio
    assert 0 < ratio.low <= ratio.value <= ratio.high


def test_json_has_the_promised_shape(report: DemoReport) -> None:
    part = json.loads(json.dumps(report.to_dict()))["simulated"]
    assert part["link"]["kind"] == "simulated"
    for values in part["policies"].values():
        assert set(values) == {
            *("throughput_tok_s", "goodput", "ttft_s", "itl_s", "preemptions"),
            *("recomputed_tokens", "moved_bytes", "runs"),
            *("e2e_s", "e2e_per_token_s", "longest_gap_s", "fairness", "classes"),
        }
        assert set(values["ttft_s"]) == set(values["itl_s"]) == {"mean", "p50", "p99"}
        assert set(values["preemptions"]) == {"recompute", "swap"}
    for ratio in (*part["ratios"].values(), part["no_pressure_ratio"]):
        assert set(ratio) == {"value", "low", "high"}
    assert {f"throughput learned / {arm}" for arm in ARMS - {"learned"}} <= set(part["ratios"])
    assert part["exact"] is True
    assert {"ttft_s", "itl_s", "from"} <= set(part["targets"])


def test_the_table_shows_arms_and_names_the_simulated_link(report: DemoReport) -> None:
    text = report.text()
    assert all(arm in text for arm in ARMS)
    assert "SIMULATED link: 1e+09 bytes/s" in text
    assert "best threshold on the training states: threshold:60; the learned policy's throughput is" in text
    assert "exact: " in text


def test_a_constant_threshold_is_no_arm_of_its_own() -> None:
    link = LinkResult("native", None, {"kind": "native"}, "cheapest:x", {"best_threshold": "always-swap"}, {})
    assert [arm.name for arm in link.arms()] == ["vllm", "always-recompute", "always-swap", "learned"]
