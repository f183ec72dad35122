"""Whether choosing better is worth it in a live server, by its counters. Worked by hand."""

from __future__ import annotations

import pytest

from kvpolicy.server_gain import NO_PLUGIN, NO_STEP_TIMES, gain_of, work_of
from kvpolicy.server_metrics import Metrics

COUNTS = {
    "vllm:num_preemptions_total": 20.0,
    "vllm:generation_tokens_total": 10_000.0,
    "vllm:kvpolicy_preemptions_total": 20.0,
    "vllm:kvpolicy_priced_preemptions_total": 20.0,
    "vllm:kvpolicy_avoidable_cost_microseconds_total": 40_000.0,
    "vllm:kvpolicy_recomputed_tokens_total": 1_000.0,
    "vllm:kvpolicy_recompute_microseconds_total": 50_000.0,
    "vllm:kvpolicy_beside_recompute_microseconds_total": 20_000.0,
    "vllm:kvpolicy_beside_recompute_tokens_total": 200.0,
    "process_start_time_seconds": 1_000.0,
}
"""A decoded token takes 100 us, all of them 1 s; recomputed ones add 0.05 s, of which 0.04 s need not have been."""
NOW_S = 1_002.0
SWAPPED = {
    'vllm:kvpolicy_resumed_total{executed="swap"}': 12.0,
    'vllm:kvpolicy_measured_preemptions_total{executed="swap"}': 10.0,
    'vllm:kvpolicy_measured_cost_microseconds{executed="swap"}': 25_000.0,
}


def said(counts: dict[str, float], **more: float) -> Metrics:
    samples = counts | {f"vllm:kvpolicy_{name}": value for name, value in more.items()}
    return Metrics.of("\n".join(f"{name} {value}" for name, value in samples.items()))


def test_the_work_is_that_of_the_counters() -> None:
    work = work_of(said(COUNTS | SWAPPED))
    assert (work.decoded_tokens, work.recomputed_tokens) == (10_000, 1_000)
    assert (work.decode_s, work.recompute_s) == (pytest.approx(1.0), pytest.approx(0.05))
    assert work.swap_s == pytest.approx(0.03), "12 of 2.5 ms"
    assert work_of(said(COUNTS | SWAPPED, resumed_total=3)).swap_s == pytest.approx(0.03), "recomputes are no swaps"
    unmeasured = {name: value for name, value in SWAPPED.items() if "measured" not in name}
    assert work_of(said(COUNTS | unmeasured)).swap_s is None


def test_worth_it_where_even_a_server_that_was_never_idle_gains() -> None:
    """0.04 s of its age, 2 s, are 2.04% of the rest; of the 1.05 s that decodes and recomputes take, 3.96%."""
    gain = gain_of(said(COUNTS), NOW_S)
    assert gain.text() == (
        "worth it: 10% of the decoded tokens were computed again; at most 5% of throughput at saturation is to be won "
        "here, and at least 2% is likely."
    )


def test_not_worth_it_where_the_bound_or_the_prices_say_so() -> None:
    assert (
        gain_of(said(COUNTS, recompute_microseconds_total=9_000.0), NOW_S)
        .text()
        .endswith("at most 0.9% of throughput at saturation is to be won here.")
    )
    gain = gain_of(said(COUNTS, avoidable_cost_microseconds_total=5_000.0), NOW_S)
    assert gain.verdict == "not worth it" and gain.why.endswith("at most 0.48% is likely."), "0.005 of 1.05 - 0.005"
    nothing = gain_of(said(COUNTS | {"vllm:num_preemptions_total": 0.0}), NOW_S)
    assert nothing.text() == "not worth it: nothing was preempted since the server started."


def test_it_cannot_tell_without_knowing_how_long_a_server_was_busy() -> None:
    gain = gain_of(said(COUNTS), NOW_S + 100)
    assert gain.verdict == "cannot tell" and "likely is 0.039% to 4%" in gain.why
    unknown = {name: value for name, value in COUNTS.items() if name != "process_start_time_seconds"}
    gain = gain_of(said(unknown), NOW_S)
    assert gain.verdict == "cannot tell" and "likely is 4%" in gain.why
    two = {name: value for name, value in COUNTS.items() if "generation" not in name}
    cores = {f'vllm:generation_tokens_total{{engine="{core}"}}': 5_000.0 for core in (0, 1)}
    assert gain_of(said(two | cores), NOW_S + 1).verdict == "cannot tell", "two cores were there for 3 s each"


def test_it_says_what_it_needs() -> None:
    without = {name: value for name, value in COUNTS.items() if "microseconds" not in name}
    gain = gain_of(said(without), NOW_S)
    assert gain.verdict == "cannot tell" and gain.why.startswith("10% of the decoded tokens were computed again;")
    assert NO_STEP_TIMES in gain.why
    gain = gain_of(said(COUNTS, priced_preemptions_total=19.0), NOW_S)
    assert gain.verdict == "cannot tell" and "no cost model says what the other option would have cost" in gain.why
    stock = {name: value for name, value in COUNTS.items() if "kvpolicy" not in name}
    assert gain_of(said(stock), NOW_S).text() == f"cannot tell: 20 requests were preempted; {NO_PLUGIN}."
    assert gain_of(Metrics.of(""), NOW_S).text() == "cannot tell: no token was decoded."
