"""Requests and workloads as records."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from kvpolicy.workload import (
    AZURE_CONVERSATION,
    Request,
    Workload,
    WorkloadError,
    all_at_once,
)


def test_arriving_keeps_everything_else() -> None:
    workload = all_at_once(AZURE_CONVERSATION, 3, 0, 1024)
    moved = workload.arriving((0.0, 1.5, 2.0))
    assert [request.arrival_s for request in moved.requests] == [0.0, 1.5, 2.0]
    assert [one.total_tokens for one in moved.requests] == [one.total_tokens for one in workload.requests]
    with pytest.raises(WorkloadError, match="1 arrivals for 3 requests, should be one each"):
        workload.arriving((0.0,))


def test_sums_and_first() -> None:
    workload = Workload("by hand", (Request(0.0, 3, 4), Request(1.0, 5, 6)), 0)
    assert (workload.prompt_tokens, workload.output_tokens, workload.longest_tokens) == (8, 10, 11)
    assert workload.first(1).requests == (Request(0.0, 3, 4),)


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ((Request(1.0, 1, 1), Request(0.0, 1, 1)), "should rise"),
        ((Request(-1.0, 1, 1),), "not be negative"),
        ((Request(0.0, 0, 1),), "request 0"),
        ((Request(0.0, 1, 1), Request(0.0, 1, 0)), "request 1"),
        ((Request(float("nan"), 1, 1),), "request 0: .* arrival_s should be a number"),
        ((Request(float("inf"), 1, 1),), "request 0: .* arrival_s should be a number"),
        ((Request("now", 1, 1),), "request 0: .* arrival_s should be a number"),  # type: ignore[arg-type]
        ((Request(0.0, "long", 1),), "request 0: .* should be whole numbers"),  # type: ignore[arg-type]
        ((Request(0.0, 1, 1.5),), "request 0: .* should be whole numbers"),  # type: ignore[arg-type]
        ((Request(0.0, 1, 1, class_name=""),), "request 0: class_name is '', should be a name"),
        ((Request(0.0, 1, 1, priority=0.5),), "request 0: priority is 0.5, should be a whole"),  # type: ignore[arg-type]
        ((Request(0.0, 1, 1, ttft_s=0.0),), "request 0: ttft_s is 0.0, should be a number above 0, or None"),
        ((Request(0.0, 1, 1, tpot_s=float("inf")),), "request 0: tpot_s is inf, should be a number above 0"),
        ((Request(0.0, 1, 1, loop=3),), "request 0: loop is 3, should be a ClosedLoop"),  # type: ignore[arg-type]
        ((3,), "request 0: is 3, should be a Request"),
        (None, "requests are None, should be a tuple of Request"),
    ],
)
def test_impossible_workloads_are_refused(requests: tuple[Request, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Workload("wrong", requests, 0)


def test_records_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        Request(0.0, 1, 1).prompt_tokens = 2  # type: ignore[misc]
