"""Loads relative to capacity: its rate, Poisson arrivals at a share of it, urgent requests beside a batch."""

from __future__ import annotations

from statistics import fmean

import pytest

from kvpolicy.workload import DEEPSEEK_R1, WorkloadError, all_at_once
from kvpolicy.workload.near_capacity import (
    BATCH,
    BURST,
    URGENT,
    arriving,
    arriving_within,
    middle_rate,
    shuffled,
    with_bursts,
    with_urgent,
)

REQUESTS = all_at_once(DEEPSEEK_R1, 400, 0, 384, 0.12)


def test_capacity_is_the_rate_of_finishes_in_the_middle_half() -> None:
    """One a second, but four a second from the third to the seventh of eight."""
    assert middle_rate([10.0, 4.0, 3.75, 3.5, 3.25, 3.0, 2.0, 1.0]) == 4.0


@pytest.mark.parametrize("ends_s", [[], [1.0, 2.0, 3.0], [1.0] * 8])
def test_too_few_finishes_have_no_rate(ends_s: list[float]) -> None:
    with pytest.raises(WorkloadError, match="should be 4 or more, in time"):
        middle_rate(ends_s)


def test_arrivals_come_at_the_rate_and_are_the_same_for_everybody() -> None:
    one = arriving(REQUESTS, 5.0, 3)
    assert one == arriving(REQUESTS, 5.0, 3) != arriving(REQUESTS, 5.0, 4)
    assert one.requests[-1].arrival_s == pytest.approx(80.0, rel=0.15)
    assert [request.total_tokens for request in one.requests] == [r.total_tokens for r in REQUESTS.requests]


def test_every_draw_within_a_time_has_the_same_load_and_a_longer_time_stretches_it() -> None:
    one, other, longer = (arriving_within(REQUESTS, seconds, seed) for seconds, seed in ((80, 3), (80, 4), (160, 3)))
    times, others, stretched = ([request.arrival_s for request in work.requests] for work in (one, other, longer))
    assert times == sorted(times) and times != others and times[0] > 0 and times[-1] < 80
    assert stretched == pytest.approx([2 * at_s for at_s in times])
    assert fmean(times) == pytest.approx(40, rel=0.1)
    assert [request.total_tokens for request in one.requests] == [r.total_tokens for r in REQUESTS.requests]


def test_every_draw_of_bursts_has_as_many_urgent_requests() -> None:
    works = [with_bursts(REQUESTS, capacity, 3, seed) for capacity, seed in ((4.0, 0), (4.0, 1), (2.0, 0))]
    urgent = [[request.arrival_s for request in work.requests if request.class_name == URGENT] for work in works]
    assert [len(times) for times in urgent] == [3 * BURST] * 3 and len(set(urgent[0])) == 3
    assert urgent[0] != urgent[1] and urgent[2] == pytest.approx([2 * at_s for at_s in urgent[0]])
    assert max(urgent[0]) < 75.0, "three quarters of 100 s"


def test_a_shuffle_keeps_the_lengths_and_changes_order_and_seed() -> None:
    one, other = shuffled(REQUESTS, 1), shuffled(REQUESTS, 2)
    lengths = [sorted((r.prompt_tokens, r.output_tokens) for r in work.requests) for work in (REQUESTS, one, other)]
    assert lengths[0] == lengths[1] == lengths[2]
    assert (one.seed, other.seed) == (1, 2) and one.requests != other.requests
    assert one == shuffled(REQUESTS, 1)


def test_urgent_requests_come_in_bursts_while_the_batch_is_served() -> None:
    work = with_urgent(REQUESTS, 4.0, 3.0, 0)
    batch = [request for request in work.requests if request.class_name == BATCH]
    urgent = [request for request in work.requests if request.class_name == URGENT]
    assert len(batch) == 400 and {request.arrival_s for request in batch} == {0.0}
    times = [request.arrival_s for request in urgent]
    assert all(times.count(at_s) == BURST for at_s in times) and {request.priority for request in urgent} == {-1}
    assert times[-BURST - 1] < 75.0 <= times[-1], "three quarters of 100 s"
    assert len(urgent) / times[-1] == pytest.approx(3.0, rel=0.4) and fmean(times) == pytest.approx(37.5, rel=0.25)
