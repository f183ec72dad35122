"""Requests, views and orders for the tests of orders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from kvpolicy.order import Order, Progress, Rank, View


def progress(number: int = 0, **values: Any) -> Progress:
    given = {"arrival_s": 0.0, "priority": 0, "prompt_tokens": 10, "output_tokens": 0, "max_output_tokens": 100}
    return Progress(**({"number": number, "computed_tokens": 0} | given | values))


def view(now_s: float = 0.0, state: Any = None, price: Callable[[Progress], float | None] | None = None) -> View:
    return View(now_s, 16, 100, state, price)


@dataclass(frozen=True, repr=False)
class ByLevel(Order):
    """By output tokens in steps of ten; counts nothing and learns the last length."""

    name: str = "by-level"
    quantum_tokens: int = 0
    promote_s: float = inf
    max_victims: int = 8
    cool_down_s: float = 0.0
    displaces_by_rank = True

    def rank(self, request: Progress, view: View) -> Rank:
        level = request.output_tokens // 10
        return Rank((level,), 10 * (level + 1))

    def finished(self, state: Any, request: Progress) -> Any:
        return request.output_tokens


class Requests:
    """Requests by name, whose output tokens a test sets."""

    def __init__(self) -> None:
        self.tokens: dict[str, int] = {}
        self._known: dict[str, Progress] = {}

    def add(self, name: str, **values: Any) -> str:
        self._known[name] = progress(len(self._known), **values)
        self.tokens[name] = 0
        return name

    def set(self, name: str, **values: Any) -> None:
        self._known[name] = replace(self._known[name], **values)

    def look(self, name: str, rank: tuple[float, ...], admitted_at_tokens: int) -> Progress:
        tokens = self.tokens[name]
        return replace(self._known[name], output_tokens=tokens, served_tokens=tokens - admitted_at_tokens, rank=rank)
