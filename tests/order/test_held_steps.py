"""Who sits a step out: as the order says, never all, and never for too long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvpolicy.order import Guarded, Holding, OrderError, Progress, View, load
from kvpolicy.order.rules import Layered, WithVictims, least_computed
from tests.order.made import ByLevel, progress, view

THREE = [progress(1), progress(2), progress(3)]


class Holds(ByLevel):
    """Whoever has one of these numbers sits out."""

    whom = (2, 3)
    max_held_steps = 2

    def hold(self, running: Sequence[Progress], view: View) -> Sequence[Progress]:
        return [one for one in running if one.number in self.whom]


def test_nobody_by_default() -> None:
    assert not ByLevel().holds and Holding(ByLevel()).held(THREE, view()) == set()
    assert not load("urgent/mlfq").holds and not load("mlfq:victims=cheapest").holds


def test_whoever_was_held_long_enough_runs_in_the_next_step() -> None:
    holding = Holding(Holds())
    assert [holding.held(THREE, view()) for _ in range(5)] == [{2, 3}, {2, 3}, set(), {2, 3}, {2, 3}]


def test_whoever_has_to_run_is_neither_held_nor_counted() -> None:
    """It is held for as long as any other once it may be; and where it runs, all others may sit out."""
    holding = Holding(Holds())
    assert [holding.held(THREE, view(), {2, 99}) for _ in range(2)] == [{3}, {3}]
    assert [holding.held(THREE, view()) for _ in range(3)] == [{2}, {2, 3}, {3}]

    class All(Holds):
        whom = (1, 2, 3)

    assert Holding(All()).held(THREE, view(), {3}) == {1, 2}
    assert Holding(All()).held(THREE, view(), {1, 2, 3}) == set()


def test_a_step_in_between_counts_anew() -> None:
    holding = Holding(Holds())
    holding.held(THREE, view())
    holding.held(THREE[:1], view())
    assert [holding.held(THREE, view()) for _ in range(3)] == [{2, 3}, {2, 3}, set()]


def test_somebody_runs() -> None:
    class All(Holds):
        whom = (1, 2, 3)

    holding = Holding(All())
    assert [holding.held(THREE, view()) for _ in range(3)] == [{2, 3}, {2, 3}, {1}]
    assert holding.held(THREE[:1], view()) == set() and holding.held([], view()) == set()


def test_an_order_is_asked_only_where_somebody_could_sit_out() -> None:
    """A server also takes steps in which nobody runs, as while sessions wait for their next turn."""

    class AllButTheOldest(Holds):
        def hold(self, running: Sequence[Progress], view: View) -> Sequence[Progress]:
            oldest = min(one.number for one in running)
            return [one for one in running if one.number != oldest]

    holding = Holding(Guarded(AllButTheOldest(), pytest.fail))
    assert holding.held(THREE, view()) == {2, 3}
    assert holding.held([], view()) == holding.held(THREE[:1], view()) == set()
    assert [holding.held(THREE, view()) for _ in range(3)] == [{2, 3}, {2, 3}, set()]


def test_whoever_does_not_run_is_not_held() -> None:
    class Strange(Holds):
        def hold(self, running: Sequence[Progress], view: View) -> Sequence[Progress]:
            return [progress(77), THREE[2], THREE[2]]

    assert Holding(Strange()).held(THREE, view()) == {3}


def test_orders_of_orders_hold_as_their_parts_do() -> None:
    for order in (
        Layered("a/b", load("urgent"), Holds()),
        WithVictims("victims", Holds(), least_computed),
        Guarded(Holds(), pytest.fail),
    ):
        assert order.holds and order.max_held_steps == 2
        asked = view(state=(None, None))
        assert [one.number for one in order.hold(THREE, asked)] == [2, 3]


def test_a_hold_that_fails_holds_nobody() -> None:
    class Failing(Holds):
        def hold(self, running: Sequence[Progress], view: View) -> Sequence[Progress]:
            return [progress(77)]

    complaints: list[str] = []
    assert Holding(Guarded(Failing(), complaints.append)).held(THREE, view()) == set()
    assert complaints == ["hold"]


@pytest.mark.parametrize("answer", [None, [3]])
def test_what_names_no_requests_is_refused_by_name(answer: Any) -> None:
    class Careless(ByLevel):
        def hold(self, running: Sequence[Progress], view: View) -> Any:
            return answer

    with pytest.raises(OrderError, match=r"^order by-level@.*: hold gave .*, should be a list of running requests"):
        Holding(Careless()).held(THREE, view())
