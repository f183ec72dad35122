"""The record of a choice of victims: whom it names, in which order, and at what price."""

from __future__ import annotations

from dataclasses import replace

from kvpolicy.order import Choice, Order, Progress, Space, View, make_room
from kvpolicy.order.candidates import MAX_RECORDED
from tests.order.made import ByLevel
from tests.order.test_room import Engine, runs, waits

ENGINE = Engine({waits(8, 0): 5}, {runs(1, 5): 4, runs(2, 6): 4, runs(3, 7): 4})


def choices(engine: Engine, order: Order, free: int = 0, places: int = 9) -> tuple[Choice, ...]:
    view = View(0.0, 16, 100, price=lambda one: None if one.number == 1 else one.number / 10)
    return make_room(order, replace(engine, left=Space(free, places, 1000)), view, records=True).choices


def test_the_taken_come_first_and_everybody_has_a_price_that_is_known() -> None:
    (choice,) = choices(ENGINE, ByLevel())
    assert [one.request.number for one in choice.candidates] == [3, 2, 1] and (choice.taken, choice.left_out) == (2, 0)
    assert [(one.freed_blocks, one.price_s) for one in choice.candidates] == [(4, 0.3), (4, 0.2), (4, None)]
    assert (choice.waiting.number, choice.need_blocks, choice.free_blocks) == (8, 5, 0)
    assert (choice.need_places, choice.free_places, choice.probability) == (1, 9, 1.0)


def test_what_was_free_is_told_after_those_before() -> None:
    two = Engine({waits(8, 0): 5, waits(9, 0): 3}, ENGINE.runs)
    first, second = choices(two, ByLevel(), free=2, places=1)
    assert (first.free_blocks, first.taken, second.free_blocks) == (2, 1, 1)
    assert [one.request.number for one in second.candidates] == [2, 1] and second.free_places == 1


def test_no_more_are_recorded_than_fit_but_all_that_were_taken() -> None:
    many = {runs(number, 5): 1 for number in range(MAX_RECORDED + 4)}
    (choice,) = choices(Engine({waits(99, 0): 1}, many), ByLevel(max_victims=99))
    assert (len(choice.candidates), choice.left_out) == (MAX_RECORDED, 4)
    (choice,) = choices(Engine({waits(99, 0): MAX_RECORDED + 2}, many), ByLevel(max_victims=99))
    assert (len(choice.candidates), choice.taken, choice.left_out) == (MAX_RECORDED + 2, MAX_RECORDED + 2, 2)


def test_nothing_is_asked_where_nothing_is_recorded() -> None:
    def price(one: Progress) -> float | None:
        raise AssertionError

    taken = make_room(ByLevel(), ENGINE, View(0.0, 16, 100, price=price))
    assert taken.victims and taken.choices == ()


def test_nothing_is_recorded_where_nobody_is_displaced() -> None:
    assert choices(ENGINE, ByLevel(), free=9) == ()
