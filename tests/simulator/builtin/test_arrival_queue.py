"""Arrivals of sessions: a turn comes a think time after its predecessor ended, and nothing is read ahead of time."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.errors import InputError
from kvpolicy.simulator.builtin.arrival_queue import ArrivalQueue
from kvpolicy.workload import ClosedLoop, Request
from tests.examples import examples
from tests.simulator.worlds import workload

FIRST = Request(0.0, 10, 5, session="a")
SECOND = Request(1.0, 12, 5, session="a", think_s=3.0)
OTHER = Request(2.0, 9, 5)


def arrivals(*requests: Request) -> ArrivalQueue:
    return ArrivalQueue(workload(*requests), lambda number, request: None)


def test_a_turn_waits_for_the_end_of_its_predecessor_and_thinks() -> None:
    queue = arrivals(FIRST, SECOND, OTHER)
    assert queue.until(2.0) == [(0.0, 0, FIRST), (2.0, 2, OTHER)]
    assert queue.next_s is None
    queue.finished(0, FIRST, 4.0)
    assert queue.next_s == 7.0
    assert queue.until(6.9) == []
    assert queue.until(7.0) == [(7.0, 1, SECOND)]


def test_a_turn_that_comes_after_its_predecessor_has_ended_keeps_its_own_time() -> None:
    late = Request(20.0, 12, 5, session="a", think_s=3.0)
    queue = arrivals(FIRST, OTHER, late)
    queue.until(0.0)
    queue.finished(0, FIRST, 1.0)
    assert queue.until(30.0) == [(2.0, 1, OTHER), (20.0, 2, late)]


def test_requests_that_come_together_keep_their_order() -> None:
    queue = arrivals(OTHER, OTHER, OTHER)
    assert [number for _, number, _ in queue.until(2.0)] == [0, 1, 2]


def test_a_source_out_of_order_is_refused() -> None:
    class Backward:
        name, source, seed = "backward", "", 0

        def __iter__(self):  # type: ignore[no-untyped-def]
            return iter((OTHER, FIRST))

    with pytest.raises(InputError, match=r"request 1 arrives at 0\.0 s, the one before it at 2\.0 s"):
        ArrivalQueue(Backward(), lambda number, request: None).until(9.0)


def test_a_request_that_cannot_be_served_is_refused_when_it_is_read() -> None:
    refused: list[int] = []
    ArrivalQueue(workload(FIRST, OTHER), lambda number, request: refused.append(number)).until(9.0)
    assert refused == [0, 1]


TWO = ClosedLoop(2)


def test_the_next_request_of_a_closed_loop_goes_to_whoever_is_free() -> None:
    """Two places; the second request ends first, so that the third takes its place, the fourth that of the third."""
    one, two, three, four = (Request(0.0, 10, length, loop=TWO) for length in (9, 1, 2, 3))
    queue = arrivals(one, two, three, four)
    assert queue.until(0.0) == [(0.0, 0, one), (0.0, 1, two)]
    assert queue.next_s is None
    queue.finished(1, two, 3.0)
    assert queue.until(3.0) == [(3.0, 2, three)]
    assert queue.until(100.0) == []
    queue.finished(2, three, 5.0)
    assert queue.until(7.0) == [(5.0, 3, four)]
    queue.finished(0, one, 9.0)
    queue.finished(3, four, 9.0)
    assert queue.next_s is None


def test_a_request_of_a_closed_loop_waits_from_its_own_time_on() -> None:
    """The third comes once a place is free, although that is noticed late; the fourth after the place was free."""
    one, two = (Request(0.0, 10, 5, loop=TWO) for _ in range(2))
    three, four = Request(1.0, 10, 5, loop=TWO), Request(8.0, 10, 5, loop=TWO)
    queue = arrivals(one, two, three, OTHER, four)
    assert [number for _, number, _ in queue.until(0.0)] == [0, 1]
    assert queue.next_s == 2.0
    queue.finished(0, one, 1.5)
    queue.finished(1, two, 1.75)
    assert queue.until(9.0) == [(1.5, 2, three), (2.0, 3, OTHER), (8.0, 4, four)]


def test_turns_and_newcomers_of_a_closed_loop_come_by_the_time_from_which_they_wait() -> None:
    """A turn that is due at 3.5 s goes before a request that is due at 4 s, whoever was read first."""
    single = ClosedLoop(1)
    first, turn = replace(FIRST, loop=single), replace(SECOND, arrival_s=0.5, think_s=0.5, loop=single)
    late = Request(4.0, 9, 5, loop=single)
    queue = arrivals(first, turn, late)
    queue.until(0.0)
    queue.finished(0, first, 3.0)
    assert queue.until(9.0) == [(3.5, 1, turn)]
    queue.finished(1, turn, 9.0)
    assert queue.until(9.0) == [(9.0, 2, late)]


def test_loops_do_not_share_places() -> None:
    one, other = ClosedLoop(1, "a"), ClosedLoop(1, "b")
    queue = arrivals(*(Request(0.0, 9, 5, loop=loop) for loop in (one, one, other, None)))
    assert [number for _, number, _ in queue.until(0.0)] == [0, 2, 3]


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 30))
@examples(60)
def test_a_closed_loop_is_full_whenever_one_waits(seed: int, concurrency: int, count: int) -> None:
    """No more requests are served than it has places, as many as it has while others wait, each once and in order."""
    rng = random.Random(seed)
    loop = ClosedLoop(concurrency)
    at_s, requests = 0.0, []
    for _ in range(count):
        at_s += rng.choice((0.0, rng.random()))
        requests.append(Request(at_s, 9, 5, loop=loop))
    queue, now_s = arrivals(*requests), 0.0
    served: dict[int, float] = {}
    order: list[int] = []
    while len(order) < count or served:
        for arrived_s, number, request in queue.until(now_s):
            assert arrived_s >= request.arrival_s
            order.append(number)
            served[number] = max(now_s, arrived_s) + rng.random()
        assert len(served) <= concurrency
        if len(served) < concurrency:
            assert all(request.arrival_s > now_s for request in requests[len(order) :])
        ends = min(served, key=served.__getitem__, default=None)
        if ends is None or (queue.next_s is not None and queue.next_s < served[ends]):
            assert queue.next_s is not None
            now_s = queue.next_s
        else:
            now_s = served.pop(ends)
            queue.finished(ends, requests[ends], now_s)
    assert order == list(range(count))
