"""What an order is made of."""

from __future__ import annotations

from kvpolicy.order import load
from kvpolicy.order.order_parts import parts
from kvpolicy.order.rules import VICTIM_RULES, WithVictims
from kvpolicy.order.wrapper import Wrapper


def test_the_parts_of_layers_and_wrappers_are_found() -> None:
    order = load("urgent/classes:a+b/mlfq:victims=least-computed,worth=price")
    assert [type(part).__name__ for part in parts(order)] == ["Urgent", "ByClass", "Mlfq"]
    assert [*parts(alone := load("las"))] == [alone]


def test_an_order_of_ones_own_is_a_part_whatever_it_wraps() -> None:
    own = Longer("own", load("urgent/las"))
    assert [*parts(own)] == [own] == [*parts(WithVictims("own", own, VICTIM_RULES["least-computed"]))]


class Longer(Wrapper):
    """Ranks by something else."""
