"""Whoever decodes has a step's tokens before prompts, where nobody loses blocks for that."""

from __future__ import annotations

from collections.abc import Sequence

from kvpolicy.order import decodes_first


def test_each_group_stays_in_the_order_of_service() -> None:
    assert decodes_first([*"aBcDe"], {"B", "D"}, lambda running: True) == [*"aceBD"]


def test_where_the_growth_does_not_fit_the_order_of_service_stays() -> None:
    """The last of the list loses its blocks; asked is about the new list, in which others find the budget used up."""
    asked: list[Sequence[str]] = []
    assert decodes_first([*"Ab"], {"A"}, lambda running: bool(asked.append(running))) is None
    assert asked == [["b", "A"]]


def test_nothing_is_asked_where_prompts_are_the_last_already_or_not_there() -> None:
    for running in map(list, ("", "ab", "abC", "CD")):
        assert decodes_first(running, {"C", "D", "waits"}, lambda running: bool([][0])) is None
