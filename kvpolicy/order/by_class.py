"""An order by the classes of requests, most often the outer one of two: ``classes:interactive+batch/mlfq``."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from math import inf

from kvpolicy.order.base import Order, Progress, Rank, View
from kvpolicy.order.order_parts import parts
from kvpolicy.request_marks import DEFAULT_CLASS


@dataclass(frozen=True, repr=False)
class ByClass(Order):
    """By class, in the order listed, and a request of an earlier class displaces those of later ones.

    rank = position of the request's class in the list; classes that are not listed come last, all alike. As ``urgent``
    does by priority, it gives up the time of those displaced.
    """

    name: str
    classes: tuple[str, ...]
    quantum_tokens: int = 0
    promote_s: float = inf
    cool_down_s: float = 0.0
    displaces_by_rank = True

    def rank(self, request: Progress, view: View) -> Rank:
        listed = request.class_name in self.classes
        return Rank((self.classes.index(request.class_name) if listed else len(self.classes),))

    def rank_group(self, request: Progress) -> Hashable:
        return request.class_name


def unlisted_classes(order: Order, classes: Iterable[str]) -> list[str]:
    """Words for a warning about each class by which the order ranks and that is not among ``classes``, those that a
    server grants: no request is of it. The default class is granted everywhere."""
    granted = {*classes, DEFAULT_CLASS}
    return [
        f"order {order.name} ranks by the class {name}, which --classes does not list: no request is of it"
        for name in ranked_classes(order)
        if name not in granted
    ]


def ranked_classes(order: Order) -> Iterator[str]:
    """The classes by which the order, or a part of it, ranks."""
    for part in parts(order):
        if isinstance(part, ByClass):
            yield from part.classes
