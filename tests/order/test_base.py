"""What an order is that says nothing but ranks."""

from __future__ import annotations

import pytest

from kvpolicy.order import Order, load
from kvpolicy.order.base import MAX_CANDIDATES, levels
from tests.order.made import ByLevel, progress, view


def test_by_default_the_last_goes_first_everything_is_worth_it_and_nobody_is_held() -> None:
    order, some = ByLevel(max_victims=3), [progress(1), progress(2), progress(3)]
    assert order.victims(progress(9), some, view()) == some[::-1]
    assert order.displaces(progress(9), some[0], view()) and order.worth(progress(9), some, view())
    assert order.admits(progress(9), 0, view()) and not order.hold(some, view()) and not order.holds
    assert order.probability(progress(9), some, some, view()) == 1.0


def test_an_order_that_takes_the_last_is_shown_no_more_than_it_may_take() -> None:
    assert ByLevel(max_victims=3).max_candidates == 3
    assert load("mlfq:victims=cheapest").max_candidates == MAX_CANDIDATES


@pytest.mark.parametrize("ratio", [1.25, 2.0])
def test_values_within_a_level_are_equal_and_levels_keep_the_order(ratio: float) -> None:
    values = [-100.0, -3.0, 0.0, 3.0, 100.0]
    found = [levels((value,), ratio) for value in values]
    assert found == sorted(found) and len(set(found)) == len(values)
    assert levels((0.3,), ratio) == levels((0.0,), ratio)
    assert levels((100.0,), ratio) == levels((100.0 * (1 + (ratio - 1) / 50),), ratio)
    assert levels((3.7,), 1.0) == (3.7,)


def test_it_is_shown_by_its_label() -> None:
    assert repr(load("mlfq:base=8")) == load("mlfq:base=8").label and isinstance(load("mlfq"), Order)
