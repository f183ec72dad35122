"""An order around another one asks that one everything, with the view that is meant for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from inspect import isfunction

from kvpolicy.order import Order, View
from kvpolicy.order.rules import Srpt
from kvpolicy.order.wrapper import Wrapper
from tests.order.made import progress, view


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
