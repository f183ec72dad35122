"""Whether choosing better is worth it in a live server, by its counters. Worked by hand."""

from __future__ import annotations

import pytest

from kvpolicy.server_gain import NO_DECODE_TIME, NO_PLUGIN, NO_STEP_TIMES, SPECULATES, gain_of, work_of
from kvpolicy.server_metrics import Metrics

COUNTS = {
    "vllm:num_preemptions_total": 20.0,
    "vllm:generation_tokens_total": 10_100.0,
    "vllm:time_to_first_token_seconds_count": 100.0,
    "vllm:kvpolicy_preemptions_total": 20.0,
    "vllm:kvpolicy_priced_preemptions_total": 20.0,
    "vllm:kvpolicy_avoidable_cost_microseconds_total": 40_000.0,
    "vllm:kvpolicy_recomputed_tokens_total": 1_000.0,
    "vllm:kvpolicy_recompute_microseconds_total": 50_000.0,
    "vllm:kvpolicy_beside_recompute_microseconds_total": 20_000.0,
    "vllm:kvpolicy_beside_recompute_tokens_total": 200.0,
    "process_start_time_seconds": 1_000.0,
}
"""A decoded token takes 100 us, all 10,000 of them 1 s, without first tokens. Recomputed ones add 0.05 s; of these,
0.04 s need not have been."""
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
    assert gain.verdict == "cannot tell" and "likely is at most 4%" in gain.why
    two = {name: value for name, value in COUNTS.items() if "generation" not in name}
    cores = {f'vllm:generation_tokens_total{{engine="{core}"}}': 5_050.0 for core in (0, 1)}
    assert gain_of(said(two | cores), NOW_S + 1).verdict == "cannot tell", "two cores were there for 3 s each"


@pytest.mark.parametrize("now_s", [900.0, 1_000.5])
def test_a_clock_behind_the_servers_says_nothing_of_its_age(now_s: float) -> None:
    """Which spent 1.05 s since it started, in 0.5 s by this clock, or before."""
    gain = gain_of(said(COUNTS), now_s)
    assert gain.verdict == "cannot tell" and "likely is at most 4%" in gain.why


def test_first_tokens_are_computed_by_prompts() -> None:
    assert work_of(said(COUNTS | {"vllm:time_to_first_token_seconds_count": 5_100.0})).decoded_tokens == 5_000
    assert gain_of(said(COUNTS | {"vllm:time_to_first_token_seconds_count": 10_100.0}), NOW_S).text() == (
        "cannot tell: no token was decoded."
    )


def test_it_cannot_tell_of_a_server_that_speculates() -> None:
    gain = gain_of(said(COUNTS | {"vllm:spec_decode_num_draft_tokens_total": 7.0}), NOW_S)
    assert gain.text() == f"cannot tell: 20 requests were preempted; {SPECULATES}."
    assert gain_of(said(COUNTS | {"vllm:spec_decode_num_draft_tokens_total": 0.0}), NOW_S).verdict == "worth it"


def test_where_all_victims_were_swapped_the_time_of_a_decoded_token_is_not_known() -> None:
    """And that of the steps is, by the server's model."""
    swapped = {name: value for name, value in COUNTS.items() if "recompute" not in name} | SWAPPED
    gain = gain_of(said(swapped), NOW_S)
    assert gain.verdict == "cannot tell" and gain.why.endswith(f"is not known: {NO_DECODE_TIME}.")


def test_a_few_preemptions_without_a_price_count_as_the_others_do() -> None:
    """0.038 s of 19 are 0.04 s of 20."""
    nineteen = said(COUNTS, priced_preemptions_total=19.0, avoidable_cost_microseconds_total=38_000.0)
    assert gain_of(nineteen, NOW_S).text() == (
        f"{gain_of(said(COUNTS), NOW_S).text()} No price: 1 of 20 preemptions, counted like the others."
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_counter_that_is_no_number_counts_nothing(value: float) -> None:
    broken = said(COUNTS | {'vllm:generation_tokens_total{engine="1"}': value})
    assert work_of(broken) == work_of(said(COUNTS))
    assert gain_of(said(COUNTS | {"vllm:generation_tokens_total": value}), NOW_S).verdict == "cannot tell"


def test_it_says_what_it_needs() -> None:
    without = {name: value for name, value in COUNTS.items() if "microseconds" not in name}
    gain = gain_of(said(without), NOW_S)
    assert gain.verdict == "cannot tell" and gain.why.startswith("10% of the decoded tokens were computed again;")
    assert NO_STEP_TIMES in gain.why
    gain = gain_of(said(COUNTS, priced_preemptions_total=18.0), NOW_S)
    assert gain.verdict == "cannot tell"
    assert "no cost model says what the other option would have cost (2 of 20 preemptions)." in gain.why
    stock = {name: value for name, value in COUNTS.items() if "kvpolicy" not in name}
    assert gain_of(said(stock), NOW_S).text() == f"cannot tell: 20 requests were preempted; {NO_PLUGIN}."
    assert gain_of(Metrics.of(""), NOW_S).text() == "cannot tell: no token was decoded."
