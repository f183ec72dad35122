"""Whoever decodes has a step's tokens before prompts, where nobody loses blocks for that."""

from __future__ import annotations

from collections.abc import Sequence

from kvpolicy.order import decodes_first


def test_each_group_stays_in_the_order_of_service() -> None:
    assert decodes_first([*"aBcDe"], {"B", "D"}, lambda running: True, 100) == [*"aceBD"]


def test_where_the_growth_does_not_fit_the_order_of_service_stays() -> None:
    """The last of the list loses its blocks; asked is about the new list, in which others find the budget used up."""
    asked: list[Sequence[str]] = []
    assert decodes_first([*"Ab"], {"A"}, lambda running: bool(asked.append(running)), 100) is None
    assert asked == [["b", "A"]]


def test_nothing_is_asked_where_prompts_are_the_last_already_or_not_there() -> None:
    for running in map(list, ("", "ab", "abC", "CD")):
        assert decodes_first(running, {"C", "D", "waits"}, lambda running: bool([][0]), 100) is None


def test_prompts_have_the_tokens_by_rank_where_those_that_decode_would_leave_them_little() -> None:
    """Of 12 tokens nine who decode leave three, a quarter; ten leave two. A chunk may need to be longer still."""
    running = [*"Pabcdefghi"]
    assert decodes_first(running, {"P"}, lambda running: True, 12) == [*"abcdefghiP"]
    assert decodes_first([*running, "j"], {"P"}, lambda running: True, 12) is None
    assert decodes_first(running, {"P"}, lambda running: True, 12, min_chunk_tokens=3) == [*"abcdefghiP"]
    assert decodes_first(running, {"P"}, lambda running: True, 12, min_chunk_tokens=4) is None
