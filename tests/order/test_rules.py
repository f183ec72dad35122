"""The orders that ship, by their formulas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from kvpolicy.order import Fcfs, Order, Priority, Progress, Rank, View, is_stock, load
from kvpolicy.order.draws import WithDraws
from kvpolicy.order.grouped_lengths import GroupedLengths
from kvpolicy.order.ranks import FIRST
from kvpolicy.order.rules import Layered, WithVictims, least_computed
from kvpolicy.order.seen_lengths import Lengths, level_of
from tests.order.made import ByLevel, progress, view


def ranked(spec: str, now_s: float = 0.0, **values: Any) -> Any:
    order = load(spec)
    return order.rank(progress(**values), view(now_s, order.initial_state()))


@pytest.mark.parametrize(
    ("spec", "values", "rank", "until_tokens"),
    [
        ("fcfs", {"priority": 3}, (), inf),
        ("priority", {"priority": 3}, (3,), inf),
        ("urgent", {"priority": -1}, (-1,), inf),
        ("reserve:.1", {"priority": 2}, (2,), inf),
        ("mlfq:base=4", {"output_tokens": 3}, (0,), 4),
        ("mlfq:base=4", {"output_tokens": 4}, (1,), 8),
        ("mlfq:base=4", {"output_tokens": 8}, (2,), 16),
        ("mlfq:base=4", {"output_tokens": 15}, (2,), 16),
        ("las:quantum=10", {"output_tokens": 9}, (0,), 10),
        ("las:quantum=10", {"output_tokens": 25}, (2,), 30),
        ("srpt:limit", {"output_tokens": 20, "max_output_tokens": 120}, (level_of(100),), 23),
        ("gittins:quantum=8", {"output_tokens": 7}, (0,), 8),
        ("urgent/mlfq:base=4", {"priority": 2, "output_tokens": 5}, (2, -inf, 1), 8),
        ("mlfq:base=4,victims=cheapest", {"output_tokens": 5}, (1,), 8),
    ],
)
def test_ranks(spec: str, values: Any, rank: Any, until_tokens: float) -> None:
    found = ranked(spec, **values)
    assert (found.value, found.until_tokens) == (rank, until_tokens)


@pytest.mark.parametrize("spec", ["mlfq:base=4", "mlfq:base=3", "las:quantum=7", "srpt:limit", "urgent/mlfq:base=5"])
def test_a_rank_holds_until_it_says(spec: str) -> None:
    """Counted by single tokens, also where the level is a power of two. That of a prediction may change before."""
    last: tuple[float, ...] = ()
    until = 0.0
    for tokens in range(200):
        found = ranked(spec, output_tokens=tokens, max_output_tokens=10**6)
        assert found.until_tokens > tokens
        if tokens < until:
            assert found.value == last
        last, until = found.value, found.until_tokens


def test_gittins_after_the_first_quantum() -> None:
    short, long = (ranked("gittins:quantum=8", output_tokens=8, prompt_tokens=tokens) for tokens in (10, 1000))
    assert (0,) < short.value < long.value, "who holds little memory goes first"


def test_what_ends_is_learned() -> None:
    for spec in ("srpt:lengths", "gittins", "urgent/srpt:lengths"):
        order = load(spec)
        state = order.initial_state()
        learned = order.finished(state, progress(output_tokens=50, prompt_tokens=7, class_name="chat"))
        assert learned != state
        known = Lengths().seen(50) if spec == "gittins" else GroupedLengths().seen("chat", 7, 50)
        assert known in (learned, *(learned if isinstance(learned, tuple) else ()))
    assert load("urgent").finished(None, progress()) is None


def test_srpt_tells_classes_and_prompts_apart() -> None:
    order = load("srpt:lengths")
    state = order.initial_state()
    for _ in range(100):
        for name, prompt_tokens, tokens in (("chat", 10, 8), ("chat", 900, 80), ("batch", 10, 3000)):
            seen = progress(class_name=name, prompt_tokens=prompt_tokens, output_tokens=tokens)
            state = order.finished(state, seen)
    kinds = (("chat", 10), ("chat", 900), ("batch", 10))
    ranks = [
        order.rank(
            progress(class_name=name, prompt_tokens=tokens, max_output_tokens=10**5), view(state=state)
        ).value
        for name, tokens in kinds
    ]  # fmt: skip
    assert ranks == sorted(set(ranks))


def test_srpt_displaces_only_below_a_share_of_the_length() -> None:
    order = load("srpt:limit,bound=0.5")
    waiting, running = progress(), progress(1, max_output_tokens=100)
    assert order.displaces(waiting, replace(running, output_tokens=49), view())
    assert not order.displaces(waiting, replace(running, output_tokens=50), view())


def test_a_reserve_is_for_the_urgent() -> None:
    order = load("reserve:.1,above=1")
    assert not order.displaces_by_rank
    assert order.admits(progress(priority=1), 0, view())
    assert order.admits(progress(priority=2), 10, view())
    assert not order.admits(progress(priority=2), 9, view())


def test_layers_decide_in_turn() -> None:
    order = load("urgent/mlfq:base=4")
    state = order.initial_state()
    low, high = progress(priority=0, output_tokens=50), progress(1, priority=1)
    assert order.rank(low, view(state=state)).value < order.rank(high, view(state=state)).value
    assert order.displaces(low, high, view(state=state))
    assert order.quantum_tokens == 4 and order.displaces_by_rank
    unequal = load("priority/mlfq:base=4")
    assert not unequal.displaces(low, high, view(state=state)), "between classes the outer one decides"
    assert unequal.displaces(progress(), progress(1, output_tokens=9), view(state=state))


@pytest.mark.parametrize(
    ("rule", "taken"),
    [("last", [3, 2, 1, 0]), ("least-computed", [3, 1, 0, 2]), ("cheapest", [3, 0, 2, 1])],
)
def test_who_is_displaced_among_equals(rule: str, taken: list[int]) -> None:
    """The highest rank first, whatever the rule."""
    order = load(f"mlfq:base=4,victims={rule}")
    rows = [((1,), 64), ((1,), 32), ((1,), 96), ((2,), 500)]
    running = [progress(number, rank=rank, computed_tokens=tokens) for number, (rank, tokens) in enumerate(rows)]
    price_s = {0: 0.1, 1: 0.4, 2: 0.3, 3: 9.0}
    found = order.victims(progress(9, rank=(0,)), running, view(price=lambda request: price_s[request.number]))
    assert [victim.number for victim in found] == taken


def test_without_prices_the_cheapest_is_the_least_computed() -> None:
    order = load("mlfq:base=4,victims=cheapest")
    running = [progress(number, rank=(1,), computed_tokens=tokens) for number, tokens in enumerate((64, 32, 96))]
    for price in (None, lambda request: None):
        found = order.victims(progress(9, rank=(0,)), running, view(price=price))
        assert [victim.number for victim in found] == [1, 0, 2]


def test_what_vllm_does_by_itself() -> None:
    assert is_stock(Fcfs(), "fcfs") and is_stock(Fcfs(), "priority") and is_stock(Priority(), "priority")
    assert not is_stock(Priority(), "fcfs") and not is_stock(load("urgent"), "priority")


@pytest.mark.parametrize("stock", [Fcfs, Priority])
def test_an_order_derived_from_vllms_is_one_of_its_own(stock: type[Order]) -> None:
    class Small(stock):  # type: ignore[misc, valid-type]
        def admits(self, waiting: Progress, free_after_blocks: int, view: View) -> bool:
            return free_after_blocks > 5

    assert not is_stock(Small("small"), "fcfs") and not is_stock(Small("small"), "priority")


class Plain(Order):
    name = "plain"

    def rank(self, request: Any, view: Any) -> Any:
        raise NotImplementedError


def test_an_order_of_ones_own_says_no_more_than_its_rank() -> None:
    order, running = Plain(), [progress(0), progress(1)]
    assert order.victims(progress(2), running, view()) == running[::-1]
    assert order.worth(progress(), running, view()) and order.admits(progress(), 0, view())
    assert order.initial_state() is None and not order.displaces_by_rank


class Rough(Plain):
    """By prompt length, in levels that double; displaces nobody."""

    rank_ratio = 2.0

    def rank(self, request: Any, view: Any) -> Any:
        return Rank((request.prompt_tokens,))


def test_whoever_is_in_the_same_level_of_the_outer_order_is_its_equal() -> None:
    class Reluctant(ByLevel):
        def worth(self, waiting: Progress, victims: Sequence[Progress], view: View) -> bool:
            return False

    order, seen = Layered("rough/reluctant", Rough(), Reluctant()), view(state=(None, None))
    new, old, longer = progress(0, prompt_tokens=5), progress(1, prompt_tokens=7, output_tokens=90), progress(2)
    assert order.rank(new, seen).value < order.rank(old, seen).value < order.rank(longer, seen).value
    assert order.displaces(new, old, seen) and not order.displaces(new, longer, seen)
    assert not order.worth(new, [old], seen) and order.worth(new, [longer], seen)


def test_the_inner_order_is_asked_about_those_alone_that_are_equal() -> None:
    asked: list[list[int]] = []

    class Asked(ByLevel):
        def worth(self, waiting: Progress, victims: Sequence[Progress], view: View) -> bool:
            asked.append([victim.number for victim in victims])
            return True

    order, seen = Layered("rough/asked", Rough(), Asked()), view(state=(None, None))
    equal, longer = progress(1, prompt_tokens=7), progress(2, prompt_tokens=70)
    assert order.worth(progress(prompt_tokens=5), [equal, longer], seen)
    assert order.worth(progress(prompt_tokens=5), [longer], seen)
    assert asked == [[1]]


def test_both_orders_rank_by_levels() -> None:
    """Values of the inner one within a level are equal too: whoever is ahead by little displaces nobody."""
    order, seen = Layered("plain/rough", ByLevel(), Rough()), view(state=(None, None))
    values = [order.rank(progress(prompt_tokens=tokens), seen).value for tokens in (4, 7, 8)]
    assert values[0] == values[1] < values[2]


def test_a_rule_draws_nothing_whatever_the_order_within_it_draws() -> None:
    drawing = WithDraws("drawn", ByLevel(), 0.5)
    order = WithVictims("drawn,victims=least-computed", drawing, least_computed)
    running = [progress(number, rank=(1,), computed_tokens=number) for number in range(3)]
    victims = order.victims(progress(9), running, view())[:1]
    assert drawing.probability(progress(9), victims, running, view()) < 0.5
    assert order.probability(progress(9), victims, running, view()) == 1.0


@pytest.mark.parametrize("spec", ["urgent:promote=9/fcfs", "fcfs/urgent:promote=9", "urgent/mlfq:promote=9"])
def test_whoever_has_waited_for_too_long_displaces_under_either_layer(spec: str) -> None:
    """Those that the outer order holds equal, too, where the inner one displaces nobody; and those that it ranks
    before."""
    order = load(spec)
    assert order.displaces_by_rank and order.promote_s == 9.0
    seen = view(state=order.initial_state())
    promoted = progress(0, rank=FIRST, priority=1, output_tokens=500)
    assert all(order.displaces(promoted, progress(1, priority=priority), seen) for priority in (0, 1, 2))


def test_a_bound_that_both_have_is_the_stricter_one() -> None:
    one = ByLevel(quantum_tokens=3, promote_s=9.0, max_victims=2, cool_down_s=1.0)
    other = ByLevel(quantum_tokens=5, promote_s=7.0, max_victims=4, cool_down_s=2.0)
    for order in (Layered("a/b", one, other), Layered("b/a", other, one)):
        assert (order.quantum_tokens, order.promote_s, order.max_victims, order.cool_down_s) == (5, 7.0, 2, 2.0)


def test_layers_of_a_class_of_ones_own_hold_and_admit_by_its_rules() -> None:
    class Own(Layered):
        def hold(self, running: Sequence[Progress], view: View) -> Sequence[Progress]:
            return ()

        def admits(self, waiting: Progress, free_after_blocks: int, view: View) -> bool:
            return False

    parts = load("urgent"), load("mlfq")
    assert not Layered("a/b", *parts).holds and not Layered("a/b", *parts).gates
    assert Own("a/b", *parts).holds and Own("a/b", *parts).gates
