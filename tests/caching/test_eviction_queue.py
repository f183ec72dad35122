"""Queues of blocks against a sorted list, with blocks that are held back."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvpolicy.caching.eviction_queue import STALE, Queue

KEYS = st.sampled_from("abcdef")
STEPS = st.lists(
    st.tuples(st.sampled_from(("put", "remove", "hold", "free")), KEYS, st.integers(0, 2), st.sets(KEYS, max_size=2)),
    max_size=80,
)


@settings(max_examples=100, deadline=None)
@given(steps=STEPS)
def test_the_first_block_is_that_of_a_sorted_list(steps: list[tuple[str, str, int, set[str]]]) -> None:
    """Whatever was held before, and whoever was passed over."""
    held: set[object] = set()
    queue, place = Queue(held), dict[str, tuple[int, int]]()
    for number, (step, key, rank, protected) in enumerate(steps):
        if step == "put":
            queue.put(key, (rank,))
            place[key] = rank, number
        elif step == "remove":
            queue.remove(key)
            place.pop(key, None)
        elif step == "hold":
            held.add(key)
        else:
            held.discard(key)
            queue.freed(key)
        order = sorted({*place} - held, key=lambda one: place[one])
        free = [one for one in order if one not in protected]
        assert queue.first(protected) == (free[0] if free else None)
        queue.take_back()
        assert queue.first(()) == (order[0] if order else None)
        assert len(queue) == len(place) and all((one in queue) == (one in place) for one in "abcdef")
        assert queue.rank(key) == (place[key][:1] if key in place else None)


def test_memory_is_bounded_whatever_is_removed_or_held_without_a_look_at_the_first() -> None:
    held: set[object] = set()
    queue = Queue(held)
    for number in range(1000):
        queue.put("a")
        queue.put(number)
        queue.remove(number)
        held.add("a")
        held.discard("a")
        queue.freed("a")
        assert len(queue._heap) <= STALE * 16
    assert queue.first(()) == "a"


def test_a_hold_changes_the_heap_only_where_its_block_came_to_the_top() -> None:
    """As loads of prompts that were used a moment ago hold what is far from it."""
    held: set[object] = set()
    queue = Queue(held)
    for key in "abc":
        queue.put(key)
    for key in "abc" * 5:
        held.add(key)
        assert len(queue._heap) == 3
        assert queue.first(()) == ("b" if key == "a" else "a")
        held.discard(key)
        queue.freed(key)
    assert len(queue._heap) == 3 and queue.first(()) == "a"
