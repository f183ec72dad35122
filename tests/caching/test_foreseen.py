"""Belady's rule over trees of blocks."""

from __future__ import annotations

import random

import pytest

from kvpolicy.caching.by_use import Lru
from kvpolicy.caching.foreseen import Foreseen
from kvpolicy.caching.prompt_replay import hindsight, replay


def chains(seed: int, count: int = 300) -> list[list[str]]:
    """Paths in a binary tree, the same ones again and again."""
    rng = random.Random(seed)
    paths = ["".join(rng.choice("ab") for _ in range(rng.randint(1, 6))) for _ in range(40)]
    return [[path[:length] for length in range(1, len(path) + 1)] for path in rng.choices(paths, k=count)]


@pytest.mark.parametrize("capacity", [3, 10, 25, 60])
def test_it_saves_what_hindsight_saves_and_more_than_lru(capacity: int) -> None:
    prompts = chains(capacity)
    saved, best, last_use = (
        replay(prompts, Foreseen(capacity, prompts), lambda position: 1.0).saved_s,
        hindsight(prompts, capacity, lambda position: 1.0).saved_s,
        replay(prompts, Lru(capacity), lambda position: 1.0).saved_s,
    )
    assert 0.97 * best <= saved <= 1.03 * best and saved >= last_use


def test_what_is_never_asked_for_again_is_not_stored() -> None:
    policy = Foreseen(2, ["ab", "c", "ab"])
    policy.asked("ab", 0)
    policy.stored("ab", (0, 1))
    policy.asked("c", 0)
    assert policy.make_room(1, frozenset("c"), "c") == []
    assert policy.evict(2, ()) == ["b", "a"], "where it has to, the last block of a prompt goes first"


def test_a_lost_block_leaves_the_one_before_it_to_go() -> None:
    policy = Foreseen(3, ["abc", "abc"])
    policy.asked("abc", 0)
    policy.stored("abc", (0, 1, 2))
    policy.lost("c")
    assert len(policy) == 2 and policy.evict(1, "a") == ["b"]
