"""What is made of an overload's runs, by hand; no engine runs here."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvpolicy.errors import InputError
from kvpolicy.hardware.link import SimulatedLink
from kvpolicy.workload import ClosedLoop, Request, Workload
from kvpolicy_vllm.bench.engine_process import EngineProcess
from kvpolicy_vllm.bench.overload import Arm, Arms, Run, Settings, Targets, by_arm, summary, throughput_ratio


def result(**more: Any) -> dict[str, Any]:
    """As an engine answers: two requests, the second arriving late and with a single token."""
    values: dict[str, Any] = {
        "makespan_s": 2.0,
        "arrival_s": [0.0, 0.5],
        "times_s": [[0.25, 0.5, 1.0], [2.0]],
        "tokens": [[7, 8, 9], [5]],
        "gaps": [[], []],
        "preemptions": 3,
        "recomputed_tokens": 40,
        "stats": {},
    }
    return values | more


PLUGIN_STATS = {
    "preemptions|intended=swap|executed=swap|cause=memory": 2,
    "preemptions|intended=swap|executed=recompute|cause=memory": 1,
    "preemptions|intended=recompute|executed=recompute|cause=memory": 4,
    "copy_bytes|direction=save": 100.0,
    "copy_bytes|direction=load": 60.0,
    "copy_microseconds|direction=load": 9.0,
}


def test_run_by_hand() -> None:
    run = Run.of("vllm", 0, result())
    assert run.ttft_s == (0.25, 1.5)
    assert run.itl_s == ((0.25, 0.5), ())
    assert run.output_tokens == 4
    assert run.throughput_tok_s == 2.0
    assert run.preemptions == {"recompute": 3, "swap": 0}
    assert run.moved_bytes == 0


def test_preemptions_count_by_what_was_executed() -> None:
    run = Run.of("always-swap", 0, result(stats=PLUGIN_STATS))
    assert run.preemptions == {"recompute": 5, "swap": 2}
    assert run.moved_bytes == 160


def test_goodput_needs_both_targets() -> None:
    run = Run.of("vllm", 0, result())
    assert run.goodput(Targets(ttft_s=2.0, itl_s=1.0)) == 1.0
    assert run.goodput(Targets(ttft_s=1.0, itl_s=1.0)) == 0.5
    assert run.goodput(Targets(ttft_s=2.0, itl_s=0.3)) == 0.5  # the first's mean is 0.375; the second has no gaps
    assert run.goodput(Targets(ttft_s=0.1, itl_s=0.1)) == 0.0


def test_summary_pools_blocks() -> None:
    runs = [Run.of("vllm", 0, result()), Run.of("vllm", 1, result(makespan_s=6.0))]
    figures = summary(runs, Targets(ttft_s=2.0, itl_s=1.0))
    assert figures["throughput_tok_s"] == 1.0  # 8 tokens in 8 seconds, not the mean of 2 and 2/3
    assert figures["goodput"] == 0.5
    assert figures["ttft_s"]["mean"] == pytest.approx(0.875)
    assert figures["itl_s"]["mean"] == pytest.approx(0.375)
    assert figures["preemptions"] == {"recompute": 6, "swap": 0}
    assert figures["recomputed_tokens"] == 80
    assert figures["runs"] == 2
    assert figures["classes"] == {} and figures["e2e_s"]["mean"] is None, "nobody said what was asked for"


def test_a_summary_has_the_classes_that_were_asked_for() -> None:
    """The targets are the deadlines of a request that brings none."""
    asked = (Request(0.0, 5, 3, class_name="batch"), Request(0.5, 5, 1, class_name="urgent", ttft_s=2.0))
    figures = summary([Run.of("vllm", block, result(), asked) for block in (0, 1)], Targets(ttft_s=0.2, itl_s=1.0))
    assert figures["e2e_s"]["mean"] == figures["e2e_s"]["p50"] == 1.25
    assert figures["longest_gap_s"] == {"mean": 0.5, "p50": 0.5, "p99": 0.5}
    assert figures["e2e_per_token_s"]["mean"] == pytest.approx((1 / 3 + 1.5) / 2)
    batch, urgent = figures["classes"]["batch"], figures["classes"]["urgent"]
    assert (batch["slo_share"], urgent["slo_share"], urgent["requests"]) == (0.0, 1.0, 2)
    assert urgent["itl_s"] == {"mean": None, "p50": None, "p99": None}
    assert json.loads(json.dumps(figures, allow_nan=False))["classes"] == figures["classes"]


def test_only_whole_blocks_are_compared() -> None:
    runs = [Run.of(arm, block, result()) for block in (1, 0) for arm in ("a", "b")]
    assert {arm: [run.block for run in mine] for arm, mine in by_arm(runs).items()} == {"a": [0, 1], "b": [0, 1]}
    with pytest.raises(ValueError, match="arm b has blocks"):
        by_arm(runs[:-1])


def test_throughput_ratio_pairs_by_block() -> None:
    """The second block is ten times slower for both: the ratio is 2 all the same, and certain."""
    runs = {
        arm: [Run.of(arm, block, result(makespan_s=factor * slow)) for block, slow in enumerate((1.0, 10.0, 1.0))]
        for arm, factor in (("fast", 1.0), ("slow", 2.0))
    }
    ratio = throughput_ratio(runs["fast"], runs["slow"], random.Random(0))
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((2.0, 2.0, 2.0))


def test_an_arm_without_policy_is_stock() -> None:
    assert Arm("vllm", None).arguments() == {}
    arguments = Arm("x", "always-swap", link=SimulatedLink(1e9, 0.001)).arguments()
    extra = arguments["kv_transfer_config"]["kv_connector_extra_config"]
    assert (extra["policy"], extra["link"]) == ("always-swap", "1e9,0.001")


def test_an_order_is_the_plugins_or_vllms_own(tmp_path: Path) -> None:
    extra = Arm("x", "always-swap", order="urgent").arguments()["kv_transfer_config"]["kv_connector_extra_config"]
    assert (extra["policy"], extra["order"]) == ("always-swap", "urgent")
    assert Arm("x", None, order="priority").arguments() == {"scheduling_policy": "priority"}
    with pytest.raises(InputError, match="arm x: order mlfq:base=8 is the plugin's: give the arm a policy"):
        Arm("x", None, order="mlfq:base=8").arguments()
    own = Arm("x", "always-swap", order="urgent/python:tests.unruly:Raising").arguments()
    assert own["kv_transfer_config"]["kv_connector_extra_config"]["allow_python_policies"] is True
    with_trace = Arm("x", "always-swap", extra=(("trace", str(tmp_path)),)).arguments()
    assert with_trace["kv_transfer_config"]["kv_connector_extra_config"]["trace"] == str(tmp_path)


def test_engines_of_different_orders_are_not_shared() -> None:
    urgent = Arm("a", "always-swap", order="urgent")
    assert urgent.engine == Arm("b", "threshold:64", order="urgent").engine != Arm("c", "always-swap").engine
    assert Arm("a", None).engine == Arm("b", "always-swap").engine, "the plugin can be taken out of it"
    assert Arm("a", None, order="priority").engine != Arm("b", "always-swap", order="priority").engine, "its queue not"


class NoEngine(EngineProcess):
    """Takes a job and answers as an engine does, without a process."""

    def __init__(self) -> None:
        self.job: dict[str, Any] = {}

    def ask(self, job: dict[str, Any], news: Callable[[dict[str, Any]], None] | None = None) -> dict[str, Any]:
        self.job = job
        return result()


def test_requests_say_what_they_are_where_the_plugin_is_on() -> None:
    asked = (Request(0.0, 5, 3), Request(0.5, 5, 1, class_name="urgent", priority=-1, ttft_s=2.0))
    arms, engine = Arms(Settings("m", True, 9)), NoEngine()
    for arm in (Arm("on", "always-swap"), Arm("off", None)):
        arms._arms[arm.name], arms._engines[arm.engine] = arm, engine
        run = arms.serve(arm.name, Workload("w", asked, 3), 0)
        assert (run.requests, run.arrival_s) == (asked, (0.0, 0.5)) and engine.job["priorities"] == [0, -1]
        marks = {"class": "urgent", "ttft_s": 2.0, "tpot_s": None}
        assert engine.job["transfer_params"] == [None, {"kvpolicy": marks} if arm.policy else None]


@pytest.mark.parametrize("waits", [{"loop": ClosedLoop(2)}, {"session": "s", "think_s": 0.0}])
def test_requests_that_wait_for_others_are_refused(waits: dict[str, Any]) -> None:
    work, arms = Workload("w", (Request(0.0, 5, 3), Request(0.0, 5, 3, **waits)), 0), Arms(Settings("m", True, 9))
    arms._arms["off"] = Arm("off", None)
    with pytest.raises(InputError, match="workload w, request 1: waits for others to end"):
        arms.serve("off", work, 0)


def test_arms_that_differ_only_in_policy_share_an_engine() -> None:
    swap, threshold = Arm("a", "always-swap", "1e9"), Arm("b", "threshold:64", "1e9")
    assert swap.engine == threshold.engine
    assert swap.engine != Arm("a", "always-swap").engine, "another link"
    assert swap.engine == Arm("a", None, "1e9").engine, "the plugin can be taken out of it"
    assert Arm("a", None, device_blocks=9).engine != Arm("a", None).engine
