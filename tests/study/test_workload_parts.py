"""Parts of a workload: every request once, sessions whole."""

from __future__ import annotations

import pytest

from kvpolicy.study.workload_parts import Part, parts_of_units
from kvpolicy.workload import Request, Workload


def test_parts_hold_every_request_once_and_sessions_whole() -> None:
    requests = tuple(Request(float(i), 10 + i, 5, session="a" if i in (2, 7) else "") for i in range(9))
    whole = Workload("w", requests, seed=0)
    parts = [list(Part(whole, index, 3)) for index in range(3)]
    assert sorted(request.prompt_tokens for part in parts for request in part) == [
        request.prompt_tokens for request in requests
    ]
    homes = [{request.session for request in part} for part in parts]
    assert sum("a" in result for result in homes) == 1, "a session stays whole"
    assert [len(part) for part in parts] == [4, 2, 3]
    assert [part[0].arrival_s for part in parts] == [0.0, 0.0, 0.0]
    assert [request.arrival_s for request in parts[1]] == [0.0, 1.0]
    with pytest.raises(ValueError, match="8 sessions, which stay whole, cannot be cut into 10 parts: part 9 would be"):
        list(Part(whole, 0, 10))
    with pytest.raises(ValueError, match="1 requests cannot be cut into 2 parts"):
        list(Part(Workload("one", requests[:1], seed=0), 0, 2))


def test_users_of_a_closed_loop_are_dealt_to_all_parts() -> None:
    """Their first requests all come at once, at the front."""
    turns = range(3)
    requests = [Request(float(turn), 10, 5, session=f"user-{user}", think_s=1.0) for turn in turns for user in range(8)]
    whole = Workload("closed", tuple(requests), seed=0)
    parts = [list(Part(whole, index, 4)) for index in range(4)]
    assert [len(part) for part in parts] == [6] * 4
    assert [sorted({one.session for one in part}) for part in parts[:2]] == [["user-0", "user-1"], ["user-2", "user-3"]]


@pytest.mark.parametrize(
    ("sizes", "parts", "expected"),
    [
        ([1] * 6, 3, [0, 0, 1, 1, 2, 2]),
        ([3, 9], 2, [0, 1]),
        ([9, 3], 2, [0, 1]),
        ([10, 1, 1], 3, [0, 1, 2]),
        ([1, 1, 10], 3, [0, 1, 2]),
        ([1, 1, 1, 9], 2, [0, 0, 0, 1]),
    ],
)
def test_no_part_is_empty(sizes: list[int], parts: int, expected: list[int]) -> None:
    assert parts_of_units(sizes, parts) == expected
