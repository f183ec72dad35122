"""The service that live requests got, by hand; no engine runs here."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kvpolicy.latency import Slo
from kvpolicy.workload import Request
from kvpolicy_vllm.bench.overload import Run
from kvpolicy_vllm.bench.service import service, service_by_class

REQUESTS = (Request(0.0, 5, 3, class_name="batch"), Request(0.5, 5, 1, class_name="urgent", priority=-1, ttft_s=1.0))
ANSWER: dict[str, Any] = {
    "makespan_s": 2.5,
    "arrival_s": [0.0, 0.5],
    "times_s": [[0.25, 0.5, 1.0], [2.0]],
    "tokens": [[7, 8, 9], [5]],
    "gaps": [[], []],
    "preemptions": 0,
    "recomputed_tokens": 0,
    "stats": {},
}
RUN = Run.of("a", 0, ANSWER, REQUESTS)


def test_each_class_by_hand() -> None:
    told = service_by_class([RUN], Slo(tpot_s=0.4))
    assert list(told) == ["batch", "urgent"]
    batch, urgent = told.values()
    assert (batch.requests, batch.output_tokens, batch.makespan_s, batch.throughput_tok_s) == (1, 3, 1.0, 3.0)
    assert (batch.e2e_s.mean, batch.ttft_s.mean, batch.itl_s.mean) == pytest.approx((1.0, 0.25, 0.375))
    assert (batch.longest_gap_s.mean, batch.e2e_per_token_s.mean) == pytest.approx((0.5, 1 / 3))
    assert (batch.slo_share, batch.goodput_req_s) == (1.0, 1.0), "0.375 s a token, and it may take 0.4"
    assert (urgent.ttft_s.mean, urgent.makespan_s, urgent.slo_share) == (1.5, 1.5, 0.0)
    assert math.isnan(urgent.itl_s.mean) and math.isnan(urgent.longest_gap_s.p99)


def test_all_requests_together() -> None:
    told = service([RUN])
    assert (told.requests, told.makespan_s, told.deadline_requests, told.slo_share) == (2, 2.0, 1, 0.0)
    rates = 3 / 1.0, 1 / 1.5
    assert told.fairness == pytest.approx(sum(rates) ** 2 / (2 * sum(rate**2 for rate in rates)))


def test_runs_are_pooled_and_their_makespans_added() -> None:
    """Every run begins at 0: what lies between two of them is no time of the class."""
    told = service_by_class([RUN, RUN, RUN])["batch"]
    assert (told.requests, told.makespan_s, told.throughput_tok_s) == (3, 3.0, 3.0)
    assert told.e2e_s == service_by_class([RUN])["batch"].e2e_s


def test_a_run_that_does_not_say_what_was_asked_for_counts_for_nothing() -> None:
    unknown = Run.of("a", 0, ANSWER)
    assert service_by_class([unknown]) == {} and service([unknown]).requests == 0
    assert service([unknown, RUN]).requests == 2
