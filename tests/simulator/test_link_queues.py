"""The link in virtual time, worked by hand: a block of 100 bytes takes 1 s, in two pieces."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from kvpolicy.simulator import Link, Server
from kvpolicy.simulator.hardware.law_times import ConstantTimes
from kvpolicy.simulator.link_queues import LinkQueues

SERVER = Server(block_size=16, block_bytes=100, device_blocks=10, host_blocks=10, segment_bytes=50)
TIMES = ConstantTimes(1.0, (0.0,) * 6, 0.0, 100.0, 0.0)


@dataclass(frozen=True)
class Copy:
    copy_id: int
    saved_by: int = 0


def queues(link: Link) -> LinkQueues[Copy]:
    return LinkQueues(replace(SERVER, link=link), TIMES)


def spans(some: LinkQueues[Copy]) -> list[tuple[str, float, float]]:
    return [(copy.transfer.direction, copy.transfer.start_s, copy.transfer.end_s) for copy in some.running]


def test_a_step_waits_for_its_saves_and_a_load_begins_when_it_has_computed() -> None:
    link = queues(Link(saves_wait=True))
    assert link.step([(Copy(1), 2)], [(Copy(2), 3)], 10.0, 4.0) == 16.0
    assert spans(link) == [("save", 10.0, 12.0), ("load", 16.0, 19.0)]


def test_where_saves_are_not_waited_for_they_run_beside_the_step_and_slow_it() -> None:
    link = queues(Link(saves_wait=False, slowdown=0.5))
    assert link.step([(Copy(1), 2)], [(Copy(2), 3)], 10.0, 4.0) == 15.0, "for two of its four seconds"
    assert spans(link) == [("save", 10.0, 12.0), ("load", 15.0, 18.0)]
    assert link.step([(Copy(3), 4)], [], 15.0, 2.0) == 18.0, "two copies at once slow it once"
    assert link.step([], [], 18.0, 2.0) == 18.0 + 2.0 + 0.5, "what is left of a copy"


def test_without_overlap_the_step_waits_for_all_of_them() -> None:
    link = queues(Link(overlapped=False))
    assert link.step([(Copy(1), 2), (Copy(3), 1)], [(Copy(2), 3)], 10.0, 4.0) == 20.0
    assert spans(link) == [("save", 10.0, 12.0), ("save", 12.0, 13.0), ("load", 17.0, 20.0)]


def test_one_at_a_time_per_direction_and_a_load_after_its_own_save() -> None:
    link = queues(Link(saves_wait=False))
    assert link.step([(Copy(1), 5), (Copy(2), 5)], [], 0.0, 1.0) == 1.0
    link.step([], [(Copy(3, 2), 1), (Copy(4, 1), 1)], 1.0, 1.0)
    assert spans(link)[:2] == [("save", 0.0, 5.0), ("save", 5.0, 10.0)]
    assert spans(link)[2:] == [("load", 10.0, 11.0), ("load", 11.0, 12.0)]
    queued = [(copy.transfer.submit_s, copy.transfer.queued_bytes) for copy in link.running]
    assert queued == [(0.0, 0), (0.0, 500), (2.0, 0), (2.0, 100)]


def test_finished_copies_are_returned_once_in_the_order_of_their_ends() -> None:
    link = queues(Link(saves_wait=False))
    link.step([(Copy(1), 5)], [(Copy(2), 1)], 0.0, 1.0)
    assert link.next_end_s() == 2.0 and link.ended(1.9) == []
    assert [one.copy for one in link.ended(5.0)] == [Copy(2), Copy(1)]
    assert link.next_end_s() is None and link.ended(9.0) == []


@pytest.mark.parametrize(("segment_bytes", "pieces", "piece_bytes"), [(50, 6, 50), (None, 3, 100), (400, 3, 400)])
def test_fields_of_a_transfer(segment_bytes: int | None, pieces: int, piece_bytes: int) -> None:
    link: LinkQueues[Copy] = LinkQueues(replace(SERVER, segment_bytes=segment_bytes), TIMES)
    link.step([(Copy(7), 3)], [], 0.0, 1.0)
    transfer = link.running[0].transfer
    assert (transfer.copy_id, transfer.direction, transfer.bytes) == (7, "save", 300)
    assert (transfer.segments, transfer.segment_bytes, transfer.ok) == (pieces, piece_bytes, True)
