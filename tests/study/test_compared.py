"""Paired ratios worked by hand, and parts of a workload."""

from __future__ import annotations

from dataclasses import replace
from math import exp, log, sqrt

import pytest

from kvpolicy import policy
from kvpolicy.hardware.link import SimulatedLink
from kvpolicy.simulator import Link, Server, Times
from kvpolicy.simulator.hardware.law_times import ConstantTimes
from kvpolicy.simulator.sinks import Identity
from kvpolicy.stats import student_ratio
from kvpolicy.study.machine import Behind
from kvpolicy.study.workload_parts import Part, parts_of_units
from kvpolicy.workload import Request, Workload


def test_ratio_and_interval_by_hand() -> None:
    """Log ratios log 2 and log 8: mean log 4, standard error log(2); t of 1 degree at 97.5% is 12.706."""
    found = student_ratio([2.0, 8.0], [1.0, 1.0])
    assert found.value == pytest.approx(4.0)
    spread = 12.7062 * (log(8) - log(2)) / sqrt(2) / sqrt(2)
    assert (found.low, found.high) == (pytest.approx(4 * exp(-spread), 1e-4), pytest.approx(4 * exp(spread), 1e-4))
    assert not found.significant


def test_pairing_takes_out_what_pairs_share() -> None:
    """Runs differ tenfold, the policies by 5% in each of them: told, though the ranges overlap."""
    base = [1.0, 10.0, 3.0, 0.5]
    found = student_ratio([1.05 * one * (1 + 1e-3 * k) for k, one in enumerate(base)], base)
    assert found.significant and found.value == pytest.approx(1.05, rel=5e-3)
    assert student_ratio(base, base).significant is False


def test_more_comparisons_widen() -> None:
    ours, theirs = [1.1, 1.2, 1.15, 1.3], [1.0] * 4
    one, many = student_ratio(ours, theirs), student_ratio(ours, theirs, comparisons=6)
    assert many.low is not None and one.low is not None and many.low < one.low


def test_a_single_pair_tells_nothing() -> None:
    found = student_ratio([2.0], [1.0])
    assert (found.value, found.low, found.high, found.significant) == (2.0, None, None, False)


@pytest.mark.parametrize(("ours", "theirs"), [([], []), ([0.0], [1.0]), ([1.0], [float("nan")])])
def test_what_has_no_ratio_is_refused(ours: list[float], theirs: list[float]) -> None:
    with pytest.raises(ValueError, match="numbers above 0"):
        student_ratio(ours, theirs)


def test_parts_hold_every_request_once_and_sessions_whole() -> None:
    requests = tuple(Request(float(i), 10 + i, 5, session="a" if i in (2, 7) else "") for i in range(9))
    whole = Workload("w", requests, seed=0)
    parts = [list(Part(whole, index, 3)) for index in range(3)]
    assert sorted(one.prompt_tokens for part in parts for one in part) == [one.prompt_tokens for one in requests]
    homes = [{one.session for one in part} for part in parts]
    assert sum("a" in found for found in homes) == 1, "a session stays whole"
    assert [len(part) for part in parts] == [4, 2, 3]
    assert [part[0].arrival_s for part in parts] == [0.0, 0.0, 0.0]
    assert [one.arrival_s for one in parts[1]] == [0.0, 1.0]
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


def test_a_given_link_takes_the_place_of_the_hardwares() -> None:
    behind = Behind(ConstantTimes(), SimulatedLink.parse("2e9,0.001"))
    assert behind.copy_s("save", 4_000_000_000, 7, 1) == pytest.approx(2.001)
    assert "2e+09 bytes/s" in behind.source and behind.source.startswith(ConstantTimes().source)


def test_runs_that_differ_in_times_or_link_alone_have_cores_of_their_own() -> None:
    """Their traces are read together by the names of their cores."""
    server, rule = Server(16, 1, 10, 10), policy.load("always-swap")
    source = Workload("w", (Request(0.0, 10, 5),), seed=0)
    several = [ConstantTimes(), ConstantTimes(source="others"), *(behind(link) for link in ("1e9", "2e9", "1e9,0.1"))]

    def core(server: Server, times: Times) -> str:
        return Identity(source, rule, server, times, 0).core("sim")

    assert len({core(server, times) for times in several}) == len(several)
    assert len({core(one, several[0]) for one in (server, replace(server, link=Link(slowdown=0.1)))}) == 2
    assert core(server, behind("1e9")) == core(server, behind("1e9"))


def behind(link: str) -> Behind:
    return Behind(ConstantTimes(), SimulatedLink.parse(link))


@pytest.mark.parametrize("text", ["", "fast", "0", "-1", "1e9,-1", "1e9,0,0", "inf", "nan"])
def test_a_link_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="should be BYTES_PER_S"):
        SimulatedLink.parse(text)
