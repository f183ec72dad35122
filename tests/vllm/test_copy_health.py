"""Failures in a row suspend swapping for a while; the log gets one warning a minute."""

from __future__ import annotations

import logging

import pytest

from kvpolicy.events import DIRECTIONS
from kvpolicy_vllm.plugin.copy_health import (
    FIRST_SUSPENSION_S,
    MAX_FAILURES_IN_A_ROW,
    MAX_SUSPENSION_S,
    WARNING_EVERY_S,
    CopyHealth,
)


def failing(health: CopyHealth, count: int, now: float) -> None:
    for number in range(count):
        health.failed("save", f"save of copy {number} failed: disk on fire", now)


def test_swapping_is_suspended_after_failures_in_a_row_and_tried_again() -> None:
    health = CopyHealth()
    failing(health, MAX_FAILURES_IN_A_ROW - 1, 0.0)
    assert not health.suspended(0.0)
    failing(health, 1, 1.0)
    assert health.suspended(1.0) and health.suspended(1.0 + 0.99 * FIRST_SUSPENSION_S)
    assert not health.suspended(1.0 + FIRST_SUSPENSION_S)


def test_a_good_copy_ends_the_row() -> None:
    health = CopyHealth()
    for _ in range(3):
        failing(health, MAX_FAILURES_IN_A_ROW - 1, 0.0)
        health.succeeded("save")
    assert not health.suspended(0.0)


def test_one_failure_after_a_suspension_brings_the_next_twice_as_long() -> None:
    health = CopyHealth()
    failing(health, MAX_FAILURES_IN_A_ROW, 0.0)
    now, length = FIRST_SUSPENSION_S, FIRST_SUSPENSION_S
    for _ in range(10):
        assert not health.suspended(now)
        failing(health, 1, now)
        length = min(2 * length, MAX_SUSPENSION_S)
        assert health.suspended(now + 0.99 * length)
        now += length
    assert length == MAX_SUSPENSION_S
    for direction in DIRECTIONS:
        health.succeeded(direction)
    failing(health, MAX_FAILURES_IN_A_ROW, now)
    assert not health.suspended(now + FIRST_SUSPENSION_S)


def test_loads_that_fail_count_although_their_saves_are_made() -> None:
    health = CopyHealth()
    for number in range(MAX_FAILURES_IN_A_ROW):
        assert not health.suspended(0.0)
        health.succeeded("save")
        health.failed("load", f"load of copy {number} failed: gone", 0.0)
    assert health.suspended(0.0)
    health.succeeded("save")
    assert not health.suspended(FIRST_SUSPENSION_S)
    health.failed("load", "load of copy 9 failed: gone", FIRST_SUSPENSION_S)
    assert health.suspended(2.9 * FIRST_SUSPENSION_S), "no load has worked since, so this one is twice as long"


def test_copies_that_were_under_way_do_not_lengthen_a_suspension() -> None:
    health = CopyHealth()
    failing(health, 10 * MAX_FAILURES_IN_A_ROW, 0.0)
    assert not health.suspended(FIRST_SUSPENSION_S)


def test_one_warning_a_minute_says_how_many_failed(caplog: pytest.LogCaptureFixture) -> None:
    health = CopyHealth()
    with caplog.at_level(logging.WARNING):
        for second in range(int(WARNING_EVERY_S) + 1):
            health.failed("load", f"load of copy {second} failed: gone", float(second))
            health.succeeded("load")
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert "load of copy 0 failed: gone" in told[0]
    assert "load of copy 60 failed: gone (and 59 more since the last warning)" in told[1]
