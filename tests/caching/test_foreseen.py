"""Belady's rule over trees of blocks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from kvpolicy.caching.by_use import Lru
from kvpolicy.caching.foreseen import Foreseen
from kvpolicy.caching.prompt_replay import hindsight, replay


def chains(seed: int, count: int = 300) -> list[list[str]]:
    """Paths in a binary tree, the same ones again and again."""
    rng = random.Random(seed)
    paths = ["".join(rng.choice("ab") for _ in range(rng.randint(1, 6))) for _ in range(40)]
    return [[path[:length] for length in range(1, len(path) + 1)] for path in rng.choices(paths, k=count)]


class AtOnce(Foreseen):
    """Where no prompt waits."""

    def asked(self, chain: Sequence[Any], hits: int) -> None:
        self.served(chain)


def dearer(position: int) -> float:
    return 1.0 + position


@pytest.mark.parametrize("by_price", [False, True], ids=["by time", "by price"])
@pytest.mark.parametrize("capacity", [3, 10, 25, 60])
def test_it_saves_what_hindsight_saves_and_more_than_lru(capacity: int, by_price: bool) -> None:
    prompts = chains(capacity)
    saved, best, last_use = (
        replay(prompts, AtOnce(capacity, prompts, dearer if by_price else None), dearer).saved_s,
        hindsight(prompts, capacity, dearer, by_price).saved_s,
        replay(prompts, Lru(capacity), dearer).saved_s,
    )
    assert 0.97 * best <= saved <= 1.03 * best and saved >= last_use


def test_by_price_what_saves_more_stays_though_it_is_asked_for_later() -> None:
    """The last blocks of two prompts, of which the second is three times as dear."""
    for price, gone in ((None, "c"), (dearer, "x")):
        policy = Foreseen(4, ["x", "abc"], price)
        policy.stored("x", [0])
        policy.stored("abc", [0, 1, 2])
        assert policy.evict(1, ()) == [gone]


def test_by_price_what_is_needed_soon_has_risen() -> None:
    """Of two blocks the dear one is worth more at first: six prompts over 2 are less than four over 1. Three prompts
    later three over 2 are more than one."""
    policy = Foreseen(4, ["p", "q", "r", "s", "x", "t", "ab"], lambda position: 2.0 if position else 1.0)
    policy.stored("ab", [0, 1])
    policy.stored("x", [0])
    policy.lost("a")
    assert policy.in_order("xb") == ["b", "x"]
    for prompt in "pqr":
        policy.served(prompt)
    assert policy.evict(2, ()) == ["b", "x"]


def test_what_a_waiting_prompt_asks_for_is_needed_until_it_is_served() -> None:
    policy = Foreseen(2, ["a", "b"])
    policy.stored("a", [0])
    policy.stored("b", [0])
    policy.asked("a", 1)
    assert policy.evict(1, ()) == ["b"]
    policy.stored("b", [0])
    policy.served("a")
    assert policy.evict(1, ()) == ["a"]


def test_newcomers_of_several_prompts_are_judged_each_by_itself() -> None:
    """By their positions those that are never asked for come between the others."""
    policy = Foreseen(3, ["abc", "xy", "abc"])
    policy.served("abc")
    policy.served("xy")
    policy.stored("mno", [0, 1, 2])
    newcomers = policy.in_order("axbyc")
    assert newcomers == ["a", "b", "c", "x", "y"]
    assert policy.make_room(3, (), newcomers) == ["o", "n", "m"], "though there is no room for all of them"
    policy.stored("abc", [0, 1, 2])
    assert policy.make_room(2, (), newcomers[3:]) == []


def test_nothing_comes_before_what_it_continues() -> None:
    """By price the later blocks of a prompt may be needed more than its first."""
    policy = Foreseen(3, ["x", "p", "abc"], lambda position: 10.0**position if position else 0.5)
    assert policy.in_order("axbc") == ["x", "a", "b", "c"]


def test_what_is_never_asked_for_again_is_not_stored() -> None:
    policy = Foreseen(2, ["ab", "c", "ab"])
    policy.served("ab")
    policy.stored("ab", (0, 1))
    policy.served("c")
    assert policy.make_room(1, frozenset("c"), "c") == []
    assert policy.evict(2, ()) == ["b", "a"], "where it has to, the last block of a prompt goes first"


def test_a_lost_block_leaves_the_one_before_it_to_go() -> None:
    policy = Foreseen(3, ["abc", "abc"])
    policy.served("abc")
    policy.stored("abc", (0, 1, 2))
    policy.lost("c")
    assert len(policy) == 2 and policy.evict(1, "a") == ["b"]
