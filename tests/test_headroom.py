"""What there is to win, worked by hand, and what always holds of it."""

from __future__ import annotations

import json
from math import inf, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.errors import InputError
from kvpolicy.fields import WrongValue
from kvpolicy.headroom import NO_DECODES, NO_PRICES, NO_STEP_TIMES, Work, headroom, mean, saving_s, share_text, total

RUN = Work(decoded_tokens=1000, recomputed_tokens=200, decode_s=10.0, recompute_s=0.4, busy_s=12.4)
"""A decoded token takes 10 ms, one that is recomputed beside it 2 ms; prompts took another 2 s."""
SECONDS = st.floats(0.0, 1e6)


def test_tax_times_price_is_the_bound() -> None:
    found = headroom(RUN, saved_s=0.4)
    assert found.tax == pytest.approx(0.2)
    assert (found.recompute_token_s, found.decode_token_s) == (pytest.approx(0.002), pytest.approx(0.010))
    assert found.price_ratio == pytest.approx(0.2)
    assert found.bound == pytest.approx(0.2 * 0.2)


def test_free_options_would_win_what_the_run_was_slower() -> None:
    """12.4 s instead of 12: 3.3% more throughput, of at most 4%."""
    found = headroom(RUN, saved_s=0.4)
    assert found.forecast == pytest.approx(0.4 / 12.0)
    assert found.unknown == ""


def test_what_swaps_cost_is_taken_off_the_forecast() -> None:
    """Two preemptions of 0.3 s and 0.1 s; a swap would have cost 0.05 s and 0.2 s. The second stays a recompute."""
    saved_s = saving_s([0.3, 0.1], [0.05, 0.2])
    assert saved_s == pytest.approx(0.25)
    assert headroom(RUN, saved_s).forecast == pytest.approx(0.25 / 12.15)


def test_what_executed_swaps_cost_can_be_won_too() -> None:
    """Under always-swap nothing is recomputed, and a recompute may still have been cheaper."""
    swapped = Work(decoded_tokens=100, decode_s=1.0, swap_s=0.5, busy_s=1.5)
    found = headroom(swapped, saving_s([0.5], [0.1]))
    assert (found.tax, found.price_ratio) == (0.0, None)
    assert found.bound == pytest.approx(0.5) and found.forecast == pytest.approx(0.4 / 1.1)


def test_a_preemption_without_another_option_saves_nothing() -> None:
    assert saving_s([0.3, 0.2], [inf, 0.1]) == pytest.approx(0.1)
    assert saving_s([], []) == 0.0


def test_the_sentence() -> None:
    assert headroom(RUN, 0.4).sentence() == (
        "at most 4% of throughput at saturation is to be won here by choosing better; about 3.3% is likely."
    )
    assert headroom(RUN, None).sentence() == (
        "at most 4% of throughput at saturation is to be won here by choosing better; how much of it is likely is not "
        f"known: {NO_PRICES}."
    )
    unpriced = Work(decoded_tokens=1000, recomputed_tokens=200, decode_s=None, recompute_s=None, busy_s=12.4)
    assert headroom(unpriced, None).sentence() == (
        "20% of the decoded tokens were computed again; how much of throughput is to be won here by choosing better "
        f"is not known: {NO_STEP_TIMES}."
    )
    assert headroom(Work(), 0.0).sentence() == (
        "at most 0% of throughput at saturation is to be won here by choosing better; about 0% is likely."
    )


def test_what_is_not_known_is_said_and_not_guessed() -> None:
    found = headroom(RUN, None, "no trace")
    assert (found.bound, found.forecast, found.unknown) == (pytest.approx(0.04), None, "no trace")
    found = headroom(Work(recomputed_tokens=5, recompute_s=1.0, busy_s=1.0), 0.5)
    assert (found.tax, found.bound, found.forecast, found.unknown) == (None, None, None, NO_DECODES)
    found = headroom(Work(decoded_tokens=5, recomputed_tokens=5, decode_s=1.0, recompute_s=0.5, busy_s=None), 0.5)
    assert (found.bound, found.forecast) == (0.5, None)


def test_it_can_be_written_as_json() -> None:
    values = json.loads(json.dumps(headroom(RUN, 0.4).to_dict(), allow_nan=False))
    assert values["bound"] == pytest.approx(0.04) and values["unknown"] == ""


def test_the_work_of_several_runs_is_their_sum_unless_one_does_not_know_it() -> None:
    assert total([]) == Work()
    assert total([RUN, RUN]) == Work(2000, 400, 20.0, 0.8, 24.8, 0.0)
    assert total([RUN, Work(1, 1, None, 1.0, 1.0, None)]) == Work(1001, 201, None, 1.4, 13.4, None)


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0, "0%"), (0.00041, "0.041%"), (4e-7, "0.00004%"), (0.0949, "9.5%"), (0.0996, "10%"), (1.234, "123%")],
)
def test_shares_have_two_digits(share: float, text: str) -> None:
    assert share_text(share) == text


@pytest.mark.parametrize(
    ("field", "value"),
    [("decoded_tokens", -1), ("recomputed_tokens", 0.5), ("decode_s", -1.0), ("recompute_s", nan), ("busy_s", inf)],
)
def test_impossible_work_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(WrongValue, match=field):
        Work(**{field: value})


def test_impossible_prices_are_refused_by_row() -> None:
    with pytest.raises(WrongValue, match=r"spent_s\[1\] is inf"):
        saving_s([1.0, inf], [1.0, 1.0])
    with pytest.raises(WrongValue, match=r"other_s\[0\] is nan"):
        saving_s([1.0], [nan])
    with pytest.raises(InputError, match="1 costs and 2 of the other options"):
        saving_s([1.0], [1.0, 2.0])
    with pytest.raises(WrongValue, match="saved_s"):
        headroom(RUN, -1.0)


@given(st.integers(1, 10**6), st.integers(0, 10**6), st.floats(1e-6, 1e6), SECONDS, SECONDS, SECONDS, SECONDS)
def test_the_forecast_is_never_above_the_bound(
    decoded: int, recomputed: int, decode_s: float, recompute_s: float, swap_s: float, busy_s: float, saved_s: float
) -> None:
    """However long the steps took, shorter than they are priced too, and whatever prices say that could be saved."""
    found = headroom(Work(decoded, recomputed, decode_s, recompute_s, busy_s, swap_s), saved_s)
    assert found.bound is not None and found.forecast is not None
    assert 0.0 <= found.forecast <= found.bound * (1 + 1e-9)


@given(st.lists(st.tuples(SECONDS, SECONDS), max_size=20), st.floats(0.0, 10.0))
def test_dearer_alternatives_never_save_more(costs: list[tuple[float, float]], extra_s: float) -> None:
    spent_s, other_s = [spent for spent, _ in costs], [other for _, other in costs]
    saved_s = saving_s(spent_s, other_s)
    assert saving_s(spent_s, [other + extra_s for other in other_s]) <= saved_s <= sum(spent_s) * (1 + 1e-9)


def test_the_mean_of_several_runs() -> None:
    """Prices per token go by the tokens, shares by the runs."""
    runs = [headroom(RUN, 0.4), headroom(Work(3000, 0, 60.0, 0.0, 60.0), 0.0)]
    found = mean(runs)
    assert (found.decoded_tokens, found.recomputed_tokens, found.tax) == (4000, 200, pytest.approx(0.05))
    assert found.recompute_token_s == pytest.approx(0.002) and found.decode_token_s == pytest.approx(70 / 4000)
    assert found.bound == pytest.approx(0.02) and found.forecast == pytest.approx(0.4 / 12.0 / 2)
    found = mean([headroom(RUN, 0.4), headroom(RUN, None)])
    assert found.bound == pytest.approx(0.04) and (found.forecast, found.unknown) == (None, NO_PRICES)
    with pytest.raises(InputError, match="no runs"):
        mean([])
