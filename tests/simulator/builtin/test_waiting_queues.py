"""Queues of waiting requests: the order in which requests leave them, whatever was put back or removed."""

from __future__ import annotations

import pytest

from kvpolicy.simulator.base import Scheduling
from kvpolicy.simulator.builtin.live_request import LiveRequest
from kvpolicy.simulator.builtin.waiting_queues import queue_for
from kvpolicy.workload import Request

ARRIVALS = (("a", 1, 0.0), ("b", 0, 2.0), ("c", 0, 1.0), ("d", 0, 1.0))
"""Name, priority and arrival, in seconds; numbers rise in this sequence."""


@pytest.mark.parametrize(
    ("scheduling", "leave", "after"), [("fcfs", "abcd", "cbd"), ("priority", "cdba", "cdb")], ids=["fcfs", "priority"]
)
def test_requests_leave_in_their_order(scheduling: Scheduling, leave: str, after: str) -> None:
    lives = {
        name: LiveRequest(number, Request(at_s, 8, 8, priority=priority), at_s)
        for number, (name, priority, at_s) in enumerate(ARRIVALS)
    }
    names = {live: name for name, live in lives.items()}
    queue = queue_for(scheduling)
    for live in lives.values():
        queue.append(live)
    assert (len(queue), names[queue.first()]) == (4, leave[0])
    assert "".join(names[queue.pop()] for _ in leave) == leave and not len(queue)
    queue.append(lives["d"])
    queue.append(lives["a"])
    queue.put_back([lives["c"], lives["b"]])
    queue.remove(lives["a"])
    assert "".join(names[queue.pop()] for _ in after) == after and not len(queue)
