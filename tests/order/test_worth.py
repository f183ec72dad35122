"""Displacing only where it is worth its price: by hand, and in the built-in simulator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvpolicy.order import Order, Progress, View, load
from kvpolicy.order.ranks import FIRST
from kvpolicy.order.worth import Seen, WithWorth
from kvpolicy.simulator import Server
from kvpolicy.trace import Trace
from tests.order.made import ByLevel, progress
from tests.simulator.worlds import LINEAR, random_workload, run

ORDER = WithWorth("worth", ByLevel())
NEW = progress(9, rank=(0,), output_tokens=0, max_output_tokens=1)
"""It gets one token: whoever makes room waits for that alone."""
SERVER = Server(16, 1 << 16, 60, 300, token_budget=256, max_running=24)


def runs(number: int, left: int, price_s: float | None = 0.1, **values: Any) -> Progress:
    """Exactly so many tokens are left, as its limit is near and it has got further than any length seen."""
    given = {"output_tokens": 10**6, "max_output_tokens": 10**6 + left, "served_tokens": 100, "rank": (5,)}
    return progress(number, arrival_s=-1.0 if price_s is None else price_s, **(given | values))


def view(unfinished: int = 10, order: Order = ORDER, served_s: float = 2.0) -> View:
    def price(one: Progress) -> float | None:
        return None if one.arrival_s < 0 else one.arrival_s

    return View(0.0, 16, 100, order.initial_state(), price, unfinished, lambda one: served_s)


@pytest.mark.parametrize(
    ("left", "unfinished", "served_s", "worth"),
    [
        (60, 10, 2.0, True),  # 59 tokens of 20 ms saved, against 10 x 100 ms
        (40, 10, 2.0, False),
        (40, 5, 2.0, True),
        (40, 10, 4.0, True),
    ],
)
def test_the_wait_that_is_saved_is_compared_with_what_it_costs_everybody(
    left: int, unfinished: int, served_s: float, worth: bool
) -> None:
    assert ORDER.worth(NEW, [runs(1, left)], view(unfinished, served_s=served_s)) == worth


def test_every_victim_waits_and_has_its_price() -> None:
    """100 tokens saved; with one victim 1 s and a token's time are lost, with three 3 s and three tokens' time."""
    assert ORDER.worth(NEW, [runs(1, 100)], view())
    assert not ORDER.worth(NEW, [runs(number, 100) for number in range(3)], view())
    assert ORDER.worth(NEW, [runs(number, 100, price_s=0.0) for number in range(3)], view())


def test_a_victim_waits_until_the_newcomer_has_got_as_far() -> None:
    """90 tokens are left to both either way: behind by 500, it takes the victim's place until it ends; by 10, for these
    10."""
    far, near = (replace(NEW, output_tokens=10**6 - by, max_output_tokens=10**6 - by + 90) for by in (500, 10))
    assert not ORDER.worth(far, [runs(1, 90, price_s=0.0)], view())
    assert ORDER.worth(near, [runs(1, 90, price_s=0.0)], view())


def test_the_newcomer_would_wait_for_the_longest_victim() -> None:
    """59 tokens saved by the long one, as above, though another victim is about to end."""
    both = [runs(1, 200, price_s=0.05), runs(2, 1, price_s=0.05)]
    assert ORDER.worth(NEW, both, view()) and ORDER.worth(NEW, both[::-1], view())
    assert not ORDER.worth(NEW, [runs(1, 40, price_s=0.05), both[1]], view())


def test_a_victim_waits_for_a_quantum_at_least() -> None:
    """90 tokens are left to both, and the newcomer is 10 behind: it keeps the place for its quantum."""
    newcomer = replace(NEW, output_tokens=10**6 - 10, max_output_tokens=10**6 + 80)
    short, long = (WithWorth("worth", ByLevel(quantum_tokens=tokens)) for tokens in (10, 50))
    victim = runs(1, 90, price_s=0.1)
    assert short.worth(newcomer, [victim], view()) and not long.worth(newcomer, [victim], view())


def test_nobody_is_displaced_who_would_end_at_once() -> None:
    assert not ORDER.worth(NEW, [runs(1, 1, price_s=0.0)], view())


def test_where_nothing_is_predicted_the_other_order_decides() -> None:
    dear = runs(1, 1, price_s=9.0)
    assert not ORDER.worth(NEW, [dear], view())
    assert ORDER.worth(NEW, [dear, runs(2, 1, price_s=None)], view())
    assert ORDER.worth(NEW, [dear], replace(view(), price=None))
    assert ORDER.worth(NEW, [dear], replace(view(), served_s=None))
    assert ORDER.worth(NEW, [replace(dear, served_tokens=0)], view())
    assert ORDER.worth(replace(NEW, rank=FIRST), [dear], view()), "who has waited for too long comes in"


def test_what_the_other_order_finds_not_worth_it_is_not() -> None:
    class Never(ByLevel):
        def worth(self, waiting: Progress, victims: Any, view: View) -> bool:
            return False

    assert not WithWorth("never", Never()).worth(NEW, [runs(1, 10**4, price_s=0.0)], view())


def test_all_else_is_the_other_orders() -> None:
    """And its state beside the lengths."""
    order = load("gittins:quantum=3,promote=7,cool=2,victims=cheapest,worth=price")
    assert isinstance(order, WithWorth) and order.name.endswith("worth=price")
    assert (order.quantum_tokens, order.promote_s, order.cool_down_s, order.displaces_by_rank) == (3, 7.0, 2.0, True)
    state = order.initial_state()
    assert isinstance(state, Seen)
    learned = order.finished(state, progress(output_tokens=50))
    assert learned.base != state.base and learned.lengths == learned.base
    seen = View(0.0, 16, 100, learned)
    one = progress(output_tokens=20)
    assert order.rank(one, seen) == order.base.rank(one, replace(seen, state=learned.base))
    assert order.digest != load("srpt:lengths,quantum=3,promote=7,victims=cheapest").digest


def test_within_a_class_only() -> None:
    """The rule of the inner order is not asked about requests of another class."""
    order = load("urgent/mlfq:base=8,worth=price")
    seen = replace(view(order=order), unfinished=1000)
    low, high = (runs(number, 1, price_s=9.0, priority=number) for number in (1, 0))
    urgent, equal = (replace(NEW, priority=number) for number in (0, 1))
    assert order.worth(urgent, [low], seen) and not order.worth(equal, [low], seen)
    assert not order.worth(urgent, [low, high], seen)


def served(spec: str, policy: str) -> Trace:
    return run(random_workload(1, 60, 200.0), replace(SERVER, order=load(spec)), policy, LINEAR)[1]


def displaced(trace: Trace) -> int:
    return sum(row["cause"] == "displaced" for row in trace.rows("decisions"))


def test_dear_victims_are_left_alone_and_free_ones_are_not() -> None:
    everybody = displaced(served("mlfq:base=8", "python:tests.priced:Priced"))
    dear = "python:tests.priced:dear"
    assert displaced(served("mlfq:base=8,worth=price", dear)) == 0 < displaced(served("mlfq:base=8", dear))
    assert displaced(served("mlfq:base=8,worth=price", "python:tests.priced:Priced")) <= everybody


def test_without_predictions_nothing_changes() -> None:
    plain, judged = (served(spec, "always-swap") for spec in ("mlfq:base=8", "mlfq:base=8,worth=price"))
    assert displaced(plain) > 10
    for table in ("steps", "requests", "outcomes"):
        assert [_without_core(row) for row in plain.rows(table)] == [_without_core(row) for row in judged.rows(table)]


def _without_core(row: dict[str, Any]) -> dict[str, Any]:
    """And without ids, which begin with the core's name."""
    return {name: value for name, value in row.items() if name not in ("core", "preemption_id", "repeated")}
