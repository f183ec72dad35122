"""Arrivals of sessions: a turn comes a think time after its predecessor ended, and nothing is read ahead of time."""

from __future__ import annotations

import pytest

from kvpolicy.errors import InputError
from kvpolicy.simulator.builtin.arrival_queue import ArrivalQueue
from kvpolicy.workload import Request
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
