"""Arrivals and pauses of requests, for comparison by hand."""

from __future__ import annotations

from kvpolicy.workload import (
    Request,
)


def times(requests: list[Request]) -> list[tuple[str, float, float | None]]:
    return [(request.session, request.arrival_s, request.think_s) for request in requests]
