"""What is made of an overload's runs, by hand; no engine runs here."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvpolicy.hardware.link import SimulatedLink
from kvpolicy_vllm.bench.overload import Arm, Run, Targets, by_arm, summary, throughput_ratio


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


def test_arms_that_differ_only_in_policy_share_an_engine() -> None:
    swap, threshold = Arm("a", "always-swap", "1e9"), Arm("b", "threshold:64", "1e9")
    assert swap.engine == threshold.engine
    assert swap.engine != Arm("a", "always-swap").engine, "another link"
    assert swap.engine == Arm("a", None, "1e9").engine, "the plugin can be taken out of it"
    assert Arm("a", None, device_blocks=9).engine != Arm("a", None).engine
