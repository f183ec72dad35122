"""The service that requests got, worked by hand."""

from __future__ import annotations

from math import nan

import numpy as np
import pytest

from kvpolicy.fields import WrongValue
from kvpolicy.latency import (
    NO_SLO,
    UNKNOWN,
    ClassTally,
    Histogram,
    Slo,
    Tail,
    by_prompt_length,
    fairness,
    length_edges,
)


def test_quantiles_are_within_half_a_percent() -> None:
    values = np.exp(np.random.default_rng(0).normal(-4, 2, 20_000))
    histogram = Histogram()
    for value in values[:5000]:
        histogram.add(float(value))
    histogram.extend(values[5000:].tolist(), 1)
    for level in (0.01, 0.5, 0.9, 0.99, 0.999):
        assert histogram.quantile(level) == pytest.approx(np.quantile(values, level), rel=5e-3)
    assert histogram.count == 20_000


def test_weights_count_as_often() -> None:
    histogram = Histogram()
    histogram.add(1.0, 99)
    histogram.add(2.0, 1)
    assert histogram.quantile(0.98) == pytest.approx(1.0, rel=5e-3)
    assert histogram.quantile(0.995) == pytest.approx(2.0, rel=5e-3)
    assert np.isnan(Histogram().quantile(0.5))


def test_two_histograms_are_one_with_the_values_of_both() -> None:
    low, high = Histogram(), Histogram()
    low.extend([1.0, 2.0], 3)
    high.add(8.0)
    low.include(high)
    assert low.count == 7 and high.count == 1
    assert low.quantile(1.0) == pytest.approx(8.0, rel=5e-3)
    low.include(Histogram())
    assert low.count == 7


def test_a_fair_share_is_one_and_all_for_one_is_one_over_n() -> None:
    """Rates of 1, 2 and 3 tokens a second: (1 + 2 + 3)^2 / (3 (1 + 4 + 9)) = 36 / 42."""
    assert fairness(np.array([1.0, 1 / 2, 1 / 3])) == pytest.approx(36 / 42)
    assert fairness(np.array([0.25] * 5)) == 1.0
    assert fairness(np.array([1e-9, 1e9, 1e9, 1e9])) == pytest.approx(1 / 4)
    assert fairness(np.array([0.0, 0.0, 2.0, 1.0])) == 1 / 2, "infinite rates: of four, two get everything"
    assert np.isnan(fairness(np.array([])))


def test_the_index_has_no_unit() -> None:
    seconds = np.random.default_rng(1).exponential(1.0, 50)
    assert fairness(1e-200 * seconds) == pytest.approx(fairness(seconds))


def three(slo: Slo = NO_SLO) -> ClassTally:
    """Arriving at 1, 2 and 3 s: four tokens at 2, 3, 5 and 6 s; a single one at 4 s; two at 4 and 13 s."""
    tally = ClassTally(slo)
    for gap_s in (1.0, 2.0, 1.0, 9.0):
        tally.itl.add(gap_s)
    tally.finished(1.0, 2.0, 6.0, 4, 2.0)
    tally.finished(2.0, 4.0, 4.0, 1, 77.0, 1.5, 0.001)
    tally.finished(3.0, 4.0, 13.0, 2, 9.0, None, 9.0)
    return tally


def test_a_class_by_hand() -> None:
    told = three().summary()
    assert (told.requests, told.output_tokens, told.makespan_s) == (3, 7, 12.0)
    assert told.throughput_tok_s == pytest.approx(7 / 12)
    assert told.e2e_s == Tail(pytest.approx(17 / 3), 5.0, pytest.approx(9.9))
    assert told.ttft_s == Tail(pytest.approx(4 / 3), 1.0, pytest.approx(1.98))
    assert told.itl_s.mean == pytest.approx(13 / 4)
    assert (told.itl_s.p50, told.itl_s.p99) == (pytest.approx(1.0, rel=5e-3), pytest.approx(9.0, rel=5e-3))
    assert told.longest_gap_s == Tail(5.5, 5.5, pytest.approx(8.93)), "a single token has no gap"
    assert told.e2e_per_token_s.mean == pytest.approx((5 / 4 + 2 + 5) / 3)
    rates = (4 / 5, 1 / 2, 1 / 5)
    assert told.fairness == pytest.approx(sum(rates) ** 2 / (3 * sum(rate**2 for rate in rates)))


def test_goodput_counts_who_met_all_of_its_deadlines() -> None:
    """The second waits 2 s instead of 1.5 for its first token, and has no second one; the third has 9 s a token."""
    told = three().summary()
    assert (told.deadline_requests, told.slo_share, told.goodput_req_s) == (2, 1 / 2, pytest.approx(1 / 12))


def test_deadlines_of_the_run_are_for_requests_without_their_own() -> None:
    """The first takes 4/3 s a token after its first; the second keeps its own 1.5 s; the third its own 9 s a token."""
    assert three(Slo(tpot_s=1.4)).summary().slo_share == pytest.approx(2 / 3)
    assert three(Slo(tpot_s=1.3)).summary().slo_share == pytest.approx(1 / 3)
    assert three(Slo(ttft_s=0.9)).summary().slo_share == 0.0, "the third brings none for its first token"
    assert three(Slo(5.0, 10.0)).summary().goodput_req_s == pytest.approx(2 / 12)


def test_without_deadlines_there_is_no_goodput() -> None:
    tally = ClassTally()
    tally.finished(0.0, 1.0, 2.0, 2, 1.0)
    told = tally.summary()
    assert (told.deadline_requests, told.slo_share, told.goodput_req_s) == (0, None, None)


def test_bins_by_prompt_length_are_quartiles_with_their_edges() -> None:
    """Of lengths 1 to 8, two a bin; the request of n tokens arrives at 0, has its first one at n s and ends at 2n."""
    tally, parts = ClassTally(), [ClassTally(), ClassTally()]
    for number, tokens in enumerate((8, 1, 5, 3, 2, 7, 4, 6)):
        for one in (tally, parts[number % 2]):
            one.finished(0.0, float(tokens), 2.0 * tokens, 2, 1.0, prompt_tokens=tokens)
    bins = tally.summary().by_prompt_length
    assert [(one.min_tokens, one.max_tokens, one.requests) for one in bins] == [
        (1, 2, 2),
        (3, 4, 2),
        (5, 6, 2),
        (7, 8, 2),
    ]
    assert [one.ttft_s.mean for one in bins] == [1.5, 3.5, 5.5, 7.5] and bins[3].e2e_s.p50 == 15.0
    assert ClassTally.merged(parts).summary().by_prompt_length == bins
    assert three().summary().by_prompt_length == () == ClassTally().summary().by_prompt_length


def test_equal_lengths_are_in_one_bin() -> None:
    lengths = [10] * 6 + [30, 40]
    assert length_edges(lengths) == [10, 10, 40] and length_edges([]) == []
    bins = by_prompt_length(lengths, lengths, lengths)
    assert [(one.min_tokens, one.max_tokens, one.requests) for one in bins] == [(10, 10, 6), (11, 40, 2)]
    (only, none) = by_prompt_length([10], [1.0], [2.0], [10, 10, 40])
    assert (only.requests, none.requests, none.ttft_s) == (1, 0, UNKNOWN), "edges of more requests than these"


def test_nobody_finished() -> None:
    told = ClassTally().summary()
    assert told.e2e_s is told.itl_s is told.longest_gap_s is UNKNOWN
    assert (told.requests, told.makespan_s, told.slo_share) == (0, 0.0, None) and np.isnan(told.fairness)


def test_classes_together_are_what_all_their_requests_are() -> None:
    one, other = three(), ClassTally()
    other.finished(0.5, 1.0, 20.0, 3, 11.0, 1.0, None)
    other.itl.extend([8.0, 11.0], 1)
    both = three()
    both.finished(0.5, 1.0, 20.0, 3, 11.0, 1.0, None)
    both.itl.extend([8.0, 11.0], 1)
    merged = ClassTally.merged([one, other, ClassTally()])
    assert merged.summary() == both.summary()
    assert (merged.first_arrival_s, one.summary()) == (0.5, three().summary()), "the parts stay as they are"


def test_requests_of_several_runs_have_the_sum_of_their_makespans() -> None:
    told = three().summary(makespan_s=28.0)
    assert (told.throughput_tok_s, told.goodput_req_s) == (0.25, pytest.approx(1 / 28))


@pytest.mark.parametrize(
    ("text", "slo"),
    [("ttft=1,tpot=0.05", Slo(1.0, 0.05)), ("tpot=.05", Slo(None, 0.05)), ("ttft=2e-1", Slo(0.2))],
)
def test_deadlines_by_name(text: str, slo: Slo) -> None:
    assert Slo.parse(text) == slo == Slo.parse(slo.text)
    assert NO_SLO.text == ""


@pytest.mark.parametrize(
    "text", ["", "ttft", "ttft=0", "ttft=1,ttft=2", "itl=1", "ttft=inf", "ttft=1;tpot=2", "tpot=x"]
)
def test_other_deadlines_are_refused(text: str) -> None:
    with pytest.raises(WrongValue, match="should be ttft=SECONDS,tpot=SECONDS, or one of them, each above 0"):
        Slo.parse(text)
    with pytest.raises(WrongValue, match="ttft_s is nan, should be a number above 0"):
        Slo(nan)
