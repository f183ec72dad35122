"""Whatever an order does, the guard around it answers as stock vLLM would, and counts."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, nan
from typing import Any

import pytest

from kvpolicy.order import Guarded, Order, Progress, Rank, Ranks, View, load
from kvpolicy.order.ranks import FIRST
from tests.order.made import progress, view
from tests.unruly import RUBBISH, Raising, Rubbish


@dataclass(frozen=True, repr=False)
class Answers(Order):
    """Answers everything with one value, or raises it."""

    answer: Any = None
    name: str = "answers"

    def _answer(self, *arguments: Any) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    rank = displaces = victims = worth = admits = initial_state = finished = _answer  # type: ignore[assignment]


def guarded(answer: Any) -> tuple[Guarded, list[str]]:
    told: list[str] = []
    return Guarded(Answers(answer), told.append), told


def test_an_order_that_raises_displaces_nobody_and_stops_nobody() -> None:
    order, told = guarded(KeyError("x"))
    waiting, running = progress(rank=(3.0,)), [progress(1)]
    assert order.rank(waiting, view()) == Rank((3.0,)), "it keeps its rank"
    assert order.rank(progress(), view()) == Rank((inf,)), "without one it goes last"
    assert order.displaces(waiting, running[0], view()) is False
    assert order.victims(waiting, running, view()) == ()
    assert order.worth(waiting, running, view()) is False
    assert order.admits(waiting, 0, view()) is True
    assert order.initial_state() is None and order.finished("state", waiting) == "state"
    assert told == ["rank", "rank", "displaces", "victims", "worth", "admits", "initial_state", "finished"]


@pytest.mark.parametrize("answer", RUBBISH)
def test_a_rank_is_comparable_or_refused(answer: Any) -> None:
    order, told = guarded(answer)
    found = order.rank(progress(rank=(3.0,)), view())
    assert isinstance(found.value, tuple) and all(value == value for value in found.value)
    assert found.until_tokens == found.until_tokens and found.until_s == found.until_s
    assert (found == Rank((3.0,))) == bool(told)


@pytest.mark.parametrize("answer", [None, 7, Rank((nan,)), Rank(("x",)), Rank((1.0,), nan), Rank((1.0,), inf, nan)])  # type: ignore[arg-type]
def test_rubbish_is_counted(answer: Any) -> None:
    order, told = guarded(answer)
    order.rank(progress(), view())
    assert told == ["rank"]


def test_only_running_requests_are_displaced_and_each_once() -> None:
    running = [progress(1), progress(2)]
    for answer, expected, failed in (
        ([running[1], running[1]], [running[1]], []),
        ([progress(9)], [], ["victims"]),
        (None, [], ["victims"]),
        ([progress(1, rank=(5,))], [running[0]], []),
    ):
        order, told = guarded(answer)
        assert list(order.victims(progress(), running, view())) == expected and told == failed


def test_an_order_that_is_right_is_left_alone() -> None:
    told: list[str] = []
    base = load("mlfq:base=4,promote=30")
    order = Guarded(base, told.append)
    assert (order.name, order.label) == (base.name, base.label)
    assert order.displaces_by_rank and (order.quantum_tokens, order.promote_s, order.max_victims) == (4, 30.0, 8)
    request = progress(output_tokens=5)
    assert order.rank(request, view()) == base.rank(request, view()) == Rank((1,), 8)
    assert not told


class Breaks(Order):
    """By a measure, rounded to levels, until its code begins to fail."""

    name = "breaks"
    rank_ratio = 2.0
    quantum_tokens = 4
    promote_s = 10.0
    broken = False

    def rank(self, request: Progress, view: View) -> Rank:
        if self.broken:
            raise ValueError("broken")
        return Rank((1000.0,), request.output_tokens + 1)


def ranked(base: Breaks, outputs: list[int]) -> Ranks[str]:
    """Of one request that runs; the last of ``outputs`` is how many tokens it has."""
    ranks: Ranks[str] = Ranks(
        Guarded(base, lambda method: None),
        lambda request, rank, admitted: progress(
            output_tokens=outputs[-1], served_tokens=outputs[-1] - admitted, rank=rank
        ),
    )
    ranks.arrived("one", 0, view(now_s=0.0))
    ranks.admitted("one", 0, view(now_s=0.0))
    return ranks


def test_a_rank_that_is_kept_is_not_rounded_again() -> None:
    base, outputs = Breaks(), [0]
    ranks = ranked(base, outputs)
    assert ranks.key("one")[0] == (9.0,)
    base.broken = True
    for step in range(1, 4):
        outputs.append(step)
        ranks.preempted("one", step, view(now_s=1.0))
        ranks.admitted("one", step, view(now_s=1.0))
        assert ranks.key("one")[0] == (9.0,)


def test_the_first_place_is_not_kept_beyond_its_quantum() -> None:
    base, outputs = Breaks(), [1]
    ranks = ranked(base, outputs)
    base.broken = True
    ranks.preempted("one", 1, view(now_s=1.0))
    assert ranks.due(2, view(now_s=11.0)) == ["one"] and ranks.key("one")[0] == FIRST
    ranks.admitted("one", 3, view(now_s=12.0))
    assert ranks.key("one")[0] == FIRST
    outputs.append(5)
    assert ranks.due(7, view(now_s=13.0)) == ["one"] and ranks.key("one")[0] == (inf,)


@pytest.mark.parametrize("base", [Raising(), Rubbish()])
def test_the_unruly_orders_of_the_soak_fail(base: Order) -> None:
    told: list[str] = []
    order = Guarded(base, told.append)
    for number in range(20):
        order.rank(progress(number), view())
    assert told
