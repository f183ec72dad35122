"""An order within another one: what a rule leaves alone is the other's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from inspect import isfunction

import pytest

from kvpolicy.order import Guarded, Order, Progress, View, load
from kvpolicy.order.base import MAX_SHOWN
from kvpolicy.order.rules import Srpt
from kvpolicy.order.wrapper import TAKEN_OVER, Wrapper
from tests.holds import Holds
from tests.order.made import ByLevel, progress, view


@dataclass(frozen=True, repr=False)
class Picky(ByLevel):
    """Answers nothing as an order does that was not asked."""

    rank_ratio: float = 1.5
    max_held_steps: int = 3

    def displaces(self, waiting: Progress, running: Progress, view: View) -> bool:
        return False

    def worth(self, waiting: Progress, victims: Sequence[Progress], view: View) -> bool:
        return False

    def admits(self, waiting: Progress, free_after_blocks: int, view: View) -> bool:
        return False

    def hold(self, running: Sequence[Progress], view: View) -> Sequence[Progress]:
        return running[:1]

    def victims(self, waiting: Progress, running: Sequence[Progress], view: View) -> Sequence[Progress]:
        return running

    def probability(
        self, waiting: Progress, victims: Sequence[Progress], running: Sequence[Progress], view: View
    ) -> float:
        return 0.25


def test_every_value_and_answer_is_the_others() -> None:
    base = Picky(quantum_tokens=7, promote_s=3.0, max_victims=2, cool_down_s=0.5)
    order, some, seen = Wrapper("outer", base), [progress(1), progress(2)], view()
    assert {name: getattr(order, name) for name in TAKEN_OVER} == {name: getattr(base, name) for name in TAKEN_OVER}
    assert (order.name, order.holds, order.max_candidates) == ("outer", True, MAX_SHOWN)
    assert order.rank(some[0], seen) == base.rank(some[0], seen)
    assert (
        not order.displaces(*some, seen) and not order.worth(some[0], some, seen) and not order.admits(some[0], 9, seen)
    )
    assert (order.hold(some, seen), order.victims(some[0], some, seen)) == (some[:1], some)
    assert order.probability(some[0], some, some, seen) == 0.25
    assert order.initial_state() is None and order.finished(None, progress(output_tokens=5)) == 5


def test_no_value_of_an_order_is_forgotten() -> None:
    values = {name for name, value in vars(Order).items() if isinstance(value, bool | int | float)}
    assert values == set(TAKEN_OVER)


@pytest.mark.parametrize("option", ["victims=cheapest", "worth=price", "explore=0.5"])
def test_options_keep_quantum_promotion_and_cool_down(option: str) -> None:
    order = load(f"mlfq:base=8,promote=5,cool=2,{option}")
    assert (order.quantum_tokens, order.promote_s, order.cool_down_s) == (8, 5.0, 2.0)
    assert isinstance(order, Wrapper) and {field.name for field in fields(Wrapper)} == {"name", "base"}


@dataclass(frozen=True, repr=False)
class Boxed(Wrapper):
    """Its state is the other order's, in a tuple."""

    def of_base(self, view: View) -> View:
        return replace(view, state=view.state[0])


def test_everything_an_order_is_asked_is_passed_on() -> None:
    asked = {name for name, value in vars(Order).items() if isfunction(value) and not name.startswith("_")}
    assert asked <= vars(Wrapper).keys()


def test_the_other_order_answers_from_its_own_state() -> None:
    base = Srpt("srpt", bound=0.5, quantum_tokens=7, promote_s=3.0)
    order, state = Boxed("boxed", base), base.finished(base.initial_state(), progress(output_tokens=900))
    seen, own = view(state=(state,)), view(state=state)
    one, other = (progress(number, output_tokens=40, max_output_tokens=5000) for number in (1, 2))
    assert order.rank(one, seen) == base.rank(one, own) != base.rank(one, view(state=base.initial_state()))
    assert order.displaces(one, other, seen) == base.displaces(one, other, own)
    assert order.victims(one, [one, other], seen) == [other, one] and order.worth(one, [other], seen)
    assert order.probability(one, [other], [one, other], seen) == 1.0 and order.admits(one, 0, seen)
    assert (order.quantum_tokens, order.promote_s, order.displaces_by_rank, order.max_victims) == (7, 3.0, True, 8)
    assert order.name == "boxed" and order.digest != base.digest


@dataclass(frozen=True, repr=False)
class Strict(Wrapper):
    """Refuses and holds by rules of its own."""

    def admits(self, waiting: Progress, free_after_blocks: int, view: View) -> bool:
        return False

    def hold(self, running: Sequence[Progress], view: View) -> Sequence[Progress]:
        return running


@pytest.mark.parametrize("option", ["victims=cheapest", "worth=price", "explore=0.5"])
def test_whether_an_order_may_refuse_or_hold_is_what_its_parts_may(option: str) -> None:
    for plain in (load(f"mlfq:base=8,{option}"), load(f"urgent/mlfq:{option}"), Boxed("boxed", load("mlfq"))):
        assert (plain.gates, plain.holds) == (Guarded(plain, pytest.fail).gates, plain.holds) == (False, False)
    for gating in (load("reserve:.2"), load("reserve:.2/mlfq"), Boxed("boxed", load("reserve:.2/mlfq"))):
        assert gating.gates and Guarded(gating, pytest.fail).gates and not gating.holds
    strict = Strict("strict", load("mlfq"))
    assert strict.gates and strict.holds
    assert Boxed("boxed", Holds()).holds and not Boxed("boxed", Holds()).gates
