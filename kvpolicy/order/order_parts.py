"""The orders that an order is made of."""

from __future__ import annotations

from collections.abc import Iterator

from kvpolicy.code_digest import is_from_library
from kvpolicy.order.base import Order
from kvpolicy.order.rules import Layered
from kvpolicy.order.wrapper import Wrapper


def parts(order: Order) -> Iterator[Order]:
    """The orders by which it ranks, without what wraps them, the outer ones first. A user's own is a part, whatever it
    wraps: it may rank by more."""
    if not is_from_library(type(order)):
        yield order
    elif isinstance(order, Layered):
        yield from parts(order.outer)
        yield from parts(order.inner)
    elif isinstance(order, Wrapper):
        yield from parts(order.base)
    else:
        yield order
