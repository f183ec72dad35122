"""A queue whose keys change while requests wait."""

from __future__ import annotations

import random

import pytest

from kvpolicy.order import OrderedQueue
from kvpolicy.order.queue import MAX_VOID


def queue(keys: dict[str, int]) -> OrderedQueue[str]:
    made: OrderedQueue[str] = OrderedQueue(lambda name: (keys[name], name))
    for name in keys:
        made.append(name)
    return made


def test_first_is_the_lowest_key() -> None:
    found = queue({"a": 3, "b": 1, "c": 2})
    assert (len(found), found.first(), list(found)) == (3, "b", ["b", "c", "a"])
    assert [found.pop() for _ in range(3)] == ["b", "c", "a"] and not len(found)


def test_a_new_key_counts_once_it_is_appended() -> None:
    keys = {"a": 1, "b": 2, "c": 3}
    found = queue(keys)
    keys["a"] = 9
    assert found.first() == "a"
    found.append("a")
    assert list(found) == ["b", "c", "a"] and len(found) == 3
    keys["a"] = 0
    found.append("a")
    assert found.pop() == "a" and list(found) == ["b", "c"], "the void entry does not come up again"


def test_those_that_are_queued_are_renewed_and_no_others() -> None:
    keys = {"a": 1, "b": 2}
    found = queue(keys)
    keys |= {"a": 9, "c": 0}
    found.renew(["c", "a"])
    assert list(found) == ["b", "a"]


def test_removed_and_queued_again() -> None:
    """The same key twice in the heap is one request."""
    found = queue({"a": 1, "b": 2})
    found.remove("a")
    assert "a" not in found and found.first() == "b"
    found.append("a")
    found.append("a")
    assert list(found) == ["a", "b"] and [found.pop(), found.pop()] == ["a", "b"]
    with pytest.raises(KeyError):
        found.remove("a")


def test_reading_is_not_disturbed_by_what_happens_meanwhile() -> None:
    found = queue({"a": 1, "b": 2, "c": 3, "d": 4})
    read = []
    for name in found:
        read.append(name)
        if name == "b":
            found.remove("c")
            found.pop()
    assert read == ["a", "b", "d"] and list(found) == ["b", "d"]


@pytest.mark.parametrize("seed", range(5))
def test_it_does_as_a_sorted_list_and_does_not_grow(seed: int) -> None:
    """Also where the first one stays and hides all void entries behind it."""
    rng, keys = random.Random(seed), {"first": -1}
    found = queue(keys)
    waiting = {"first"}
    for _ in range(2000):
        name, draw = f"r{rng.randrange(12)}", rng.random()
        if draw < 0.8:
            keys[name] = rng.randrange(20)
            found.append(name)
            waiting.add(name)
        elif name in waiting:
            found.remove(name)
            waiting.remove(name)
        if draw > 0.97:
            assert found.pop() == "first"
            found.append("first")
        assert list(found) == sorted(waiting, key=lambda other: (keys[other], other))
        assert len(found._heap) <= 2 * len(found) + MAX_VOID + 1
