"""What an order is made of."""

from __future__ import annotations

from kvpolicy.order import load
from kvpolicy.order.parts import parts


def test_the_parts_of_layers_and_wrappers_are_found() -> None:
    order = load("urgent/classes:a+b/mlfq:victims=least-computed,worth=price")
    assert [type(part).__name__ for part in parts(order)] == ["Urgent", "ByClass", "Mlfq"]
    assert [*parts(alone := load("las"))] == [alone]
