"""What is made of an overload's runs, by hand; no engine runs here."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from kvpolicy.hardware.link import SimulatedLink
from kvpolicy.stats import Ratio, bootstrap_ratio, mean_and_percentiles, widened_tail
from kvpolicy_vllm.bench.exactness import Comparison, compare
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
    found = summary(runs, Targets(ttft_s=2.0, itl_s=1.0))
    assert found["throughput_tok_s"] == 1.0  # 8 tokens in 8 seconds, not the mean of 2 and 2/3
    assert found["goodput"] == 0.5
    assert found["ttft_s"]["mean"] == pytest.approx(0.875)
    assert found["itl_s"]["mean"] == pytest.approx(0.375)
    assert found["preemptions"] == {"recompute": 6, "swap": 0}
    assert found["recomputed_tokens"] == 80
    assert found["runs"] == 2


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
    found = throughput_ratio(runs["fast"], runs["slow"], random.Random(0))
    assert (found.value, found.low, found.high) == pytest.approx((2.0, 2.0, 2.0))


def test_ratio_is_the_geometric_mean() -> None:
    found = bootstrap_ratio([2.0, 8.0], [1.0, 1.0], random.Random(0))
    assert found.value == pytest.approx(4.0)
    assert (found.low, found.high) == pytest.approx((2.0, 8.0))


def test_ratio_turned_round_is_its_inverse() -> None:
    above, below = [1.1, 1.3, 0.9, 1.2], [1.0, 1.1, 1.05, 0.8]
    there, back = (bootstrap_ratio(a, b, random.Random(0)) for a, b in ((above, below), (below, above)))
    assert there.value * back.value == pytest.approx(1.0)
    assert there.low * back.high == pytest.approx(1.0, rel=0.02)


def test_ratio_is_repeatable() -> None:
    above, below = [1.1, 1.3, 0.9], [1.0, 1.1, 1.05]
    assert bootstrap_ratio(above, below, random.Random(5)) == bootstrap_ratio(above, below, random.Random(5))


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    rng = random.Random(0)
    missed = 0
    for trial in range(400):
        noisy = [math.exp(rng.gauss(0.0, 0.05)) for _ in range(8)]
        missed += bootstrap_ratio(noisy, [1.0] * 8, random.Random(trial), resamples=1000).significant
    assert 0.01 <= missed / 400 <= 0.10


def test_few_blocks_widen_the_tails() -> None:
    """At 8 blocks t is 2.365 and 2.365 sqrt(8/7) = 2.528 normal errors, beyond which lie 0.574%."""
    assert widened_tail(8) == pytest.approx(0.00574, abs=1e-5)
    assert widened_tail(10_000) == pytest.approx(0.025, rel=0.01)


@pytest.mark.parametrize(
    ("above", "below", "message"),
    [([1.0], [1.0], "at least 2"), ([1.0, 2.0], [1.0], "as many"), ([1.0, 0.0], [1.0, 1.0], "above 0")],
)
def test_ratios_that_make_no_sense_are_refused(above: list[float], below: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bootstrap_ratio(above, below, random.Random(0))


def test_an_interval_that_includes_one_is_not_significant() -> None:
    assert not Ratio(1.02, 0.99, 1.05, 8).significant
    assert Ratio(1.02, 1.01, 1.05, 8).significant


def test_percentiles_by_hand() -> None:
    found = mean_and_percentiles([4.0, 1.0, 3.0, 2.0, 5.0])
    assert found == {"mean": 3.0, "p50": 3.0, "p99": pytest.approx(4.96)}
    with pytest.raises(ValueError, match="no values"):
        mean_and_percentiles([])


def test_comparison_counts_ties_and_faults() -> None:
    reference, gaps = [[1, 2, 3], [4, 5, 6], [7, 8, 9]], [[1.0, 1.0, 1.0], [1.0, 5e-5, 1.0], [1.0, 1.0, 5e-5]]
    assert compare(reference, gaps, reference, "same") == Comparison(9)
    tied = compare(reference, gaps, [[1, 2, 3], [4, 0, 0], [7, 8, 9]], "tied")
    assert (tied.ties, tied.wrong, tied.exact) == (1, (), True)
    wrong = compare(reference, gaps, [[1, 0, 3], [4, 5, 6], [7, 8, 9]], "wrong")
    assert wrong.wrong == ("wrong, request 0: token 1 is 0, should be 2",)
    assert not wrong.exact
    short = compare(reference, gaps, [[1, 2], [4, 5, 6], [7, 8, 9]], "short")
    assert "3 tokens expected, 2 generated" in short.wrong[0]


def test_ties_are_allowed_one_in_fifty_thousand() -> None:
    assert Comparison(200_000, 4).exact
    assert not Comparison(200_000, 5).exact
    assert Comparison(10, 1).exact
    assert (Comparison(60_000, 1) + Comparison(60_000, 2)).ties == 3


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
