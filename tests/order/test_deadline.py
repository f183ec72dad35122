"""The order by deadlines: levels of slack, when they are looked at again, and who sits out."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

import pytest

from kvpolicy.order import Progress, Rank, View, load
from kvpolicy.order.deadline import Deadline
from tests.order.made import progress, view


def ranked(spec: str, now_s: float, **values: Any) -> Rank:
    return load(spec).rank(progress(**values), view(now_s))


@pytest.mark.parametrize(
    ("slack_s", "level"),
    [(0, 0), (0.99, 0), (1, 1), (1.99, 1), (2, 2), (3.9, 2), (4, 3), (8, 4), (16, 5), (19.9, 5), (20, 6), (1e6, 6),
     (-0.01, -1), (-0.19, -1), (-0.21, inf), (-1e6, inf)],
)  # fmt: skip
def test_levels_of_slack_double_and_who_is_lost_goes_last(slack_s: float, level: int) -> None:
    assert ranked("deadline:ttft=0,tpot=.1", 100.0, arrival_s=100.0 + slack_s).value == (level,)


def test_a_request_goes_by_its_own_deadlines() -> None:
    spec = "deadline:ttft=3,tpot=.5"
    assert ranked(spec, 10.0, arrival_s=9.0).value == (2,)
    assert ranked(spec, 10.0, arrival_s=9.0, output_tokens=4).value == (3,)
    assert ranked(spec, 10.0, arrival_s=9.0, ttft_s=1.0).value == (0,)
    assert ranked(spec, 10.0, arrival_s=9.0, output_tokens=4, tpot_s=0.0).value == (2,)


def test_the_first_level_is_as_wide_as_asked() -> None:
    assert ranked("deadline:ttft=3,tpot=.5,step=4", 0.0).value == (0,)
    assert ranked("deadline:ttft=5,tpot=.5,step=4", 0.0).value == (1,)
    assert ranked("deadline:ttft=29,tpot=.5,step=30", 0.0).value == (0,)


def test_a_rank_holds_until_time_or_tokens_can_have_changed_it() -> None:
    spec = "deadline:ttft=3,tpot=.5"
    late = ranked(spec, 10.25, arrival_s=9.0)  # slack 1.75, in the level from 1 to 2
    assert (late.value, late.until_s, late.until_tokens) == ((1,), pytest.approx(11.0), 1)
    low = ranked(spec, 10.0, arrival_s=11.5)  # slack 4.5, in the level from 4 to 8
    assert (low.value, low.until_s, low.until_tokens) == ((3,), pytest.approx(10.5), 7)
    high = ranked(spec, 10.0, arrival_s=14.9)  # slack 7.9: a quarter of the level is 2 tokens
    assert (high.value, high.until_tokens) == ((3,), 2)
    ample = ranked(spec, 10.0, arrival_s=30.0, output_tokens=8)
    assert (ample.value, ample.until_s, ample.until_tokens) == ((6,), pytest.approx(17.0), inf), "no token raises it"
    lost = ranked(spec, 99.0)
    assert (lost.value, lost.until_s, lost.until_tokens) == ((inf,), inf, 192), "nor does time lower it"
    assert ranked("deadline:ttft=3,tpot=.5,late=100", 99.0).value == (-1,)


def test_who_is_ahead_of_its_reader_sits_out_while_another_is_late() -> None:
    order = load("deadline:ttft=1,tpot=.5,late=3,ahead=4")
    late, even, ahead = progress(0), progress(1, arrival_s=2.0), progress(2, arrival_s=2.0, output_tokens=9)
    running = [late, even, ahead]
    prefill = progress(3, arrival_s=2.0, ttft_s=60.0)
    assert order.hold([*running, prefill], view(2.0)) == [ahead], "nobody reads yet what a prefill brings"
    assert order.holds and order.hold(running, view(2.0)) == [ahead]
    assert order.hold(running, view(3.5)) == [], "4 s ahead is not more than 4 s"
    assert order.hold([even, ahead], view(2.0)) == (), "nobody is late"
    assert order.hold([progress(0, arrival_s=-90.0), ahead], view(2.0)) == (), "one that is lost makes nobody wait"
    lost = progress(0, arrival_s=-0.5, rank=(inf,))
    assert order.hold([lost, ahead], view(2.0)) == (), "nor does one that was lost, and is late still"
    assert not load("deadline:ttft=1,tpot=.5").holds and load("urgent/deadline:ahead=1").holds


@pytest.mark.parametrize("spec", ["deadline:ttft=0,tpot=.1", "urgent/deadline:ttft=0,tpot=.1"])
def test_a_request_that_was_lost_goes_last_until_it_is_late_no_more(spec: str) -> None:
    """Its slack is around the edge, at which it would go first and last in turn."""
    order, rank, found = load(spec), (), []
    for slack_s in (-0.15, -0.25, -0.15, -0.25, -0.01, 0.0, -0.15):
        now = view(10.0, order.initial_state())
        asked = order.rank(progress(arrival_s=10.0 + slack_s, rank=rank), now)
        rank = asked.value
        found.append(rank[-1])
    assert found == [-1, inf, inf, inf, inf, 0, -1]


def test_who_was_lost_is_looked_at_again_where_tokens_can_have_made_it_even() -> None:
    again = ranked("deadline:ttft=0,tpot=.125", 10.0, arrival_s=9.5, rank=(inf,))
    assert (again.value, again.until_s, again.until_tokens) == ((inf,), inf, 4)
    near = ranked("deadline:ttft=0,tpot=.125", 10.0, arrival_s=9.9, rank=(inf,))
    assert (near.value, near.until_s, near.until_tokens) == ((inf,), inf, 1)


@pytest.mark.parametrize(
    ("spec", "values"),
    [("deadline:tpot=1e-320", {}), ("deadline", {"tpot_s": 1e-310}), ("deadline:late=1e308", {"arrival_s": -1e3})],
)
def test_what_no_number_of_tokens_changes_is_not_looked_at_for_them(spec: str, values: dict[str, float]) -> None:
    for now_s in (0.0, 0.5, 2.0):
        assert ranked(spec, now_s, **values).until_tokens == inf


class HoldsTheLast(Deadline):
    """Who sits out is a subclass's own affair, whatever ``ahead_s``."""

    def hold(self, running: Sequence[Progress], view: View) -> Sequence[Progress]:
        return running[-1:]


def test_a_subclass_that_holds_is_asked() -> None:
    assert HoldsTheLast("mine").holds and not Deadline("mine").holds
