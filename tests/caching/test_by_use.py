"""What every shipped caching policy promises, save the one by cost, which is in test_by_cost.py: it needs trees of
blocks. The choices of lru and lfu, worked by hand."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvpolicy.caching.adaptive import Arc, S3Fifo
from kvpolicy.caching.base import CachingPolicy, Part
from kvpolicy.caching.by_use import REMEMBERED, Lfu, Lru

POLICIES: Sequence[Callable[[int], CachingPolicy]] = (Lru, Lfu, Arc, S3Fifo)


def serve(policy: CachingPolicy, chain: Sequence[Any], protected: str = "") -> str:
    """What a prompt has to give up: each letter is a block, and as many as fit are stored."""
    policy.asked(chain, policy.hits(chain))
    missing = [position for position, key in enumerate(chain) if key not in policy][: policy.capacity]
    evicted = policy.evict(max(0, len(policy) + len(missing) - policy.capacity), {*chain, *protected})
    policy.stored(chain, missing[: policy.capacity - len(policy)])
    return "".join(map(str, evicted))


@pytest.mark.parametrize("make", POLICIES)
def test_never_more_than_the_capacity_and_nobody_protected_goes(make: Callable[[int], CachingPolicy]) -> None:
    rng = random.Random(7)
    policy = make(8)
    there: set[str] = set()
    for _ in range(2000):
        chain = "".join(rng.sample("abcdefghijklmnopqrst", rng.randint(1, 6)))
        protected = "".join(rng.sample("abcdefghijklmnopqrst", 2))
        before = {key for key in there if key in policy}
        assert before == there
        gone = set(serve(policy, chain, protected))
        assert gone <= there and not gone & {*chain, *protected}
        there = {key for key in there | {*chain} if key in policy}
        assert len(there) == len(policy) <= 8
        if there and rng.random() < 0.1:
            lost = rng.choice(sorted(there))
            policy.lost(lost)
            there.remove(lost)
            assert lost not in policy


@pytest.mark.parametrize("make", POLICIES)
def test_fewer_go_where_the_others_are_protected(make: Callable[[int], CachingPolicy]) -> None:
    policy = make(3)
    serve(policy, "abc")
    assert policy.evict(3, {"a", "c"}) == ["b"] and policy.evict(1, {"a", "c"}) == []
    assert len(policy) == 2


@pytest.mark.parametrize("make", POLICIES)
def test_of_one_prompt_the_last_block_goes_first(make: Callable[[int], CachingPolicy]) -> None:
    policy = make(4)
    serve(policy, "abcd")
    assert policy.evict(2, ()) == ["d", "c"] and policy.hits("abcd") == 2


def test_the_least_recently_used_goes() -> None:
    policy = Lru(4)
    assert [serve(policy, chain) for chain in ("ab", "cd", "a", "e", "f")] == ["", "", "", "b", "d"]


def test_the_least_frequently_used_goes_and_is_counted_anew_when_it_returns() -> None:
    policy = Lfu(3)
    assert [serve(policy, chain) for chain in ("a", "a", "b", "b", "c", "d")] == ["", "", "", "", "", "c"]
    assert serve(policy, "c") == "d" and serve(policy, "e") == "c"


@pytest.mark.parametrize("kind", [Lru, Lfu])
def test_what_is_stored_long_after_it_was_asked_for_is_as_old_as_that(kind: type[Lru | Lfu]) -> None:
    """As in host memory, which has blocks when the device loses them: others were asked for and stored meanwhile."""
    policy = kind(4)
    policy.asked("ab", 0)
    for chain in ("cd", "e"):
        policy.asked(chain, 0)
    policy.stored("cd", [0, 1])
    policy.stored("ab", [0, 1])
    assert policy.evict(4, ()) == ["b", "a", "d", "c"]


@pytest.mark.parametrize("kind", [Lru, Lfu])
@pytest.mark.parametrize("order", [(2, 3, 4), (4, 3, 2)], ids=["first ones first", "last ones first"])
def test_what_a_later_turn_adds_goes_before_the_prefix_that_it_continues(
    kind: type[Lru | Lfu], order: tuple[int, ...]
) -> None:
    """Two blocks of the first turn are there; an answer and a question come after another prompt, a block at a time."""
    policy = kind(8)
    policy.asked("ab", 0)
    policy.stored("ab", [0, 1])
    policy.extended("abcd", 2)
    policy.asked("abcde", 2)
    for other in "xyz":
        policy.asked(other, 0)
    for position in order:
        policy.stored("abcde", [position])
    policy.stored("z", [0])
    assert policy.evict(5, "z") == ["e", "d", "c", "b", "a"]


@pytest.mark.parametrize("kind", [Lru, Lfu])
def test_what_was_generated_is_as_old_as_its_prompt_and_no_younger_than_what_it_continues(
    kind: type[Lru | Lfu],
) -> None:
    """Also where nobody has said that it was generated, as in files."""
    for says in (True, False):
        policy = kind(8)
        policy.asked("ab", 0)
        policy.stored("ab", [0, 1])
        if says:
            policy.extended("abcd", 2)
        policy.asked("xy", 0)
        policy.stored("xy", [0, 1])
        policy.stored("abcd", [2, 3])
        assert policy.evict(6, ()) == ["d", "c", "b", "a", "y", "x"], says


@pytest.mark.parametrize("kind", [Lru, Lfu])
def test_the_last_use_is_remembered_of_a_block_that_is_given_up_or_lost(kind: type[Lru | Lfu]) -> None:
    policy = kind(3)
    for chain in "abc":
        serve(policy, chain)
    policy.lost("a")
    assert policy.evict(1, ()) == ["b"]
    policy.stored("b", [0])
    policy.stored("a", [0])
    assert policy.evict(3, ()) == ["a", "b", "c"]


@pytest.mark.parametrize("kind", [Lru, Lfu])
def test_the_uses_that_are_remembered_are_bounded_and_those_of_the_last_prompt_are_among_them(
    kind: type[Lru | Lfu],
) -> None:
    policy, long = kind(3), [f"long {block}" for block in range(40)]
    for number in range(1000):
        policy.asked([f"{number} {block}" for block in range(3)], 0)
    assert len(policy._absent) <= REMEMBERED * 3 + 3
    policy.asked(long, 0)
    policy.extended([*long, "answer"], len(long))
    assert all(policy._last_use(key) == 1001 for key in [*long, "answer"])
    policy.lost("nobody")
    assert len(policy._absent) <= REMEMBERED * 3


@pytest.mark.parametrize("kind", [Lru, Lfu])
@pytest.mark.parametrize("keys", [("b", "a"), ("a", "b")])
def test_among_equals_the_one_that_was_stored_first_goes_whatever_its_key(
    kind: type[Lru | Lfu], keys: tuple[str, str]
) -> None:
    policy = kind(2)
    policy.stored((keys[0],), [0])
    policy.stored((keys[1],), [0])
    assert policy.evict(1, ()) == [keys[0]]


@pytest.mark.parametrize("kind", [Lru, Lfu])
def test_of_a_prompt_that_is_stored_in_parts_the_last_block_goes_first(kind: type[Lru | Lfu]) -> None:
    """As it comes to files: its end first, and each part by itself."""
    policy = kind(4)
    policy.stored(Part("cd", 2), [0, 1])
    policy.stored(Part("ab", 0), [0, 1])
    assert policy.evict(4, ()) == ["d", "c", "b", "a"]
