"""The demo on real engines, tiny: both loads through every arm, and what a resumed demo does not serve again."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from rich.console import Console

from kvpolicy.study.demo_report import DemoReport
from kvpolicy_vllm.bench import run_demo
from kvpolicy_vllm.bench.demo_rounds import Measured
from kvpolicy_vllm.bench.resumed_inputs import versions
from kvpolicy_vllm.bench.run_demo import QUICK, Loop

SHAPE: Mapping[str, object] = {"hidden": 128, "intermediate": 256, "layers": 2, "heads": 4, "kv_heads": 2}
TINY = dataclasses.replace(
    QUICK, requests=12, batch_requests=10, blocks=20, load=1e6, warm_up_requests=2, rounds=2, shape=SHAPE
)
"""At so high a load all requests are there at once, whatever the capacity of a busy machine."""
ORDER = "mlfq:base=8"
ARMS = {
    "one class above capacity": ["vllm", "best threshold", "learned", f"learned, {ORDER}"],
    "urgent requests beside a batch": ["vllm", "learned", "learned, urgent"],
}


def loop(out: Path) -> Loop:
    """With thresholds in the place of what a profile would have taught."""
    measured = Measured.opened(out, {"seed": 0, "order": ORDER, **dataclasses.asdict(TINY)})
    if "train" not in measured.values:
        measured.values["policy"], measured.values["evaluate"] = "threshold:60", {}
        measured.keep("train", {"best_threshold": "always-swap"})
    return Loop(out, TINY, 0, ORDER, measured, Console(stderr=True))


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def report(out: Path) -> DemoReport:
    return loop(out).run()


def test_all_arms_say_the_same(report: DemoReport) -> None:
    assert report.exactness is not None and report.exact, report.exactness["wrong"]
    outputs = [one.details["workload"] for one in report.scenarios]
    assert report.exactness["tokens"] > 1000 and all(len(one["requests"]) == TINY.rounds for one in outputs)


def test_every_arm_does_what_it_is_named_for(report: DemoReport) -> None:
    assert {one.name: list(one.arms) for one in report.scenarios} == ARMS
    for scenario in report.scenarios:
        stock, judged = (scenario.policies[arm] for arm in (scenario.stock, scenario.judged))
        assert stock["preemptions"]["swap"] == stock["moved_bytes"] == 0
        assert judged["preemptions"]["swap"] > 0 and judged["moved_bytes"] > 0
        assert all(values["runs"] == TINY.rounds for values in scenario.policies.values())
    one, two = report.scenarios
    assert one.policies["vllm"]["preemptions"]["recompute"] > 0
    assert one.policies["best threshold"]["preemptions"]["recompute"] == 0, "always-swap"
    assert set(two.policies["vllm"]["classes"]) == {"batch", "urgent"}
    assert all("unmodified vLLM" in scenario.arms["vllm"] for scenario in report.scenarios)


def test_what_preemptions_cost_is_told_from_a_recorded_run(report: DemoReport) -> None:
    assert report.bound.recomputed_tokens > 0 and report.bound.decoded_tokens > 100
    assert report.bound.tax is not None and report.bound.tax > 0
    assert {"model", "capacity and bound", *ARMS} <= set(report.seconds)


def test_json_has_the_promised_shape(report: DemoReport) -> None:
    whole = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert [entry["name"].partition(":")[0] for entry in whole["headline"]] == list(ARMS)
    assert all(entry["low"] <= entry["ratio"] <= entry["high"] for entry in whole["headline"])
    assert whole["machine"]["cpus"] >= 1 and whole["capacity_per_s"] > 0
    assert whole["seed"] == 0 and whole["versions"] == versions() and whole["versions"]["vllm"]
    for part in whole["scenarios"].values():
        assert {"policies", "ratios", "exact", "targets", "workload", "makespan_s"} <= set(part)
        for values in part["policies"].values():
            assert set(values) == {
                *("throughput_tok_s", "goodput", "ttft_s", "itl_s", "preemptions"),
                *("recomputed_tokens", "moved_bytes", "runs"),
                *("e2e_s", "e2e_per_token_s", "longest_gap_s", "fairness", "classes"),
            }


def test_a_resumed_demo_serves_only_what_is_missing(
    report: DemoReport, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_engine(*_: object) -> None:
        raise AssertionError("an engine was started")

    monkeypatch.setattr(run_demo, "Arms", no_engine)
    again = loop(out).run()
    assert [one.figures for one in again.scenarios] == [one.figures for one in report.scenarios]
    (out / "rounds" / "two-1.json").unlink()
    with pytest.raises(AssertionError, match="an engine was started"):
        loop(out).run()
