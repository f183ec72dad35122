"""The order by hints, alone and in layers."""

from __future__ import annotations

import pytest

from kvpolicy.fields import WrongValue
from kvpolicy.order import Order, load, load_order
from kvpolicy.order.kept_first import may_read_hints
from kvpolicy.request_marks import ALL_TOKENS, NO_HINTS, Hints
from tests.order.made import ByLevel, progress, view

CHAT, ONCE = Hints(keep_s=60.0, session="a"), Hints(once=True)


def rank_of(order: Order, hints: Hints, **values: int) -> tuple[float, ...]:
    return order.rank(progress(hints=hints, **values), view(state=order.initial_state())).value


@pytest.mark.parametrize(
    ("hints", "rank"),
    [
        (CHAT, 0),
        (NO_HINTS, 1),
        (ONCE, 2),
        (Hints(once=True, pin_tokens=ALL_TOKENS, keep_s=9.0), 2),
        (Hints(pin_tokens=5), 1),
        (Hints(session="a", ended=True), 1),
        (Hints(session="a", ended=True, pin_tokens=5, keep_s=9.0), 1),
        (Hints(session="a", pin_tokens=5, keep_s=9.0), 0),
        (Hints(keep_s=0.0), 1),
    ],
)
def test_what_is_kept_goes_first_and_what_comes_once_goes_last(hints: Hints, rank: int) -> None:
    assert rank_of(load("hints"), hints, output_tokens=50, prompt_tokens=9) == (rank,)


def test_it_says_who_makes_room_and_the_inner_order_decides_among_equals() -> None:
    order = load("hints:promote=30/mlfq:base=4")
    assert order.displaces_by_rank and (order.quantum_tokens, order.promote_s) == (4, 30.0)
    said = ((CHAT, 50), (NO_HINTS, 0), (NO_HINTS, 50), (ONCE, 0))
    requests = [progress(number, hints=hints, output_tokens=tokens) for number, (hints, tokens) in enumerate(said)]
    state = order.initial_state()
    ranks = [order.rank(one, view(state=state)).value for one in requests]
    assert ranks == sorted(ranks) and len(set(ranks)) == 4
    assert order.displaces(requests[0], requests[3], view(state=state))


def test_it_takes_no_value() -> None:
    with pytest.raises(WrongValue, match="has 'keep', which it does not take"):
        load("hints:keep")


def test_orders_that_may_read_hints_are_told_from_others() -> None:
    assert may_read_hints(load("urgent/hints:victims=least-computed")) and may_read_hints(ByLevel())
    assert may_read_hints(load_order("urgent/srpt:python:tests.order.own_predictor:by_class"))
    assert not any(map(may_read_hints, map(load, ("urgent/classes:a+b/mlfq", "srpt:limit", "las/srpt:lengths"))))
