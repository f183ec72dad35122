"""Copies that wait for the link, and until when contents are saved for the cache."""

from __future__ import annotations

import pytest

from kvpolicy.host_store import CopyQueues, RecentRate
from kvpolicy.host_store.copy_queues import MAX_PIN_BACKLOG_S, MAX_SAVE_BACKLOG_S, RECENT_COPIES

BLOCK_BYTES = 1000


def test_bytes_of_both_directions() -> None:
    queues = CopyQueues(BLOCK_BYTES)
    queues.add("save", 3)
    queues.add("load", 2)
    queues.add("save", -1)  # one that was forgotten before it was sent
    assert (queues.bytes("save"), queues.bytes("load"), queues.blocks) == (2000, 2000, 4)
    queues.ended("save", 2, 0.1)
    queues.ended("load", 2)
    assert queues.blocks == 0


def test_saves_for_the_cache_wait_until_those_before_them_end_in_time() -> None:
    queues = CopyQueues(BLOCK_BYTES)
    assert queues.takes_saves
    queues.add("save", 10**6)
    assert not queues.takes_saves, "no save has been timed, and one waits"
    queues.ended("save", 10**6 - 8, (10**6 - 8) * MAX_SAVE_BACKLOG_S / 8)
    assert queues.takes_saves, "the eight that are left end exactly in time"
    queues.add("save", 1)
    assert not queues.takes_saves
    queues.ended("save", 1)  # a save that failed says nothing of the link
    assert queues.takes_saves


def test_pins_wait_where_far_too_much_waits() -> None:
    queues = CopyQueues(BLOCK_BYTES)
    queues.add("save", 10**6)
    assert queues.takes_pins, "no save has been timed"
    queues.ended("save", 10**6 - 8, (10**6 - 8) * MAX_PIN_BACKLOG_S / 8)
    assert queues.takes_pins and not queues.takes_saves, "the eight that are left end exactly in time"
    queues.add("save", 1)
    assert not queues.takes_pins


def test_loads_do_not_count() -> None:
    queues = CopyQueues(BLOCK_BYTES)
    queues.add("save", 1)
    queues.ended("save", 1, MAX_SAVE_BACKLOG_S)
    queues.add("load", 5)
    queues.ended("load", 1, 1e-9)
    queues.add("save", 2)
    assert not queues.takes_saves and queues.bytes("load") == 4000


def test_a_link_that_becomes_slow_is_noticed() -> None:
    rate = RecentRate()
    assert rate.seconds(1e9) == 0.0
    for _ in range(1000):
        rate.add(1.0, 1e9)
    assert rate.seconds(2e9) == pytest.approx(2.0)
    for _ in range(RECENT_COPIES):
        rate.add(10.0, 1e9)
    assert 6.0 < rate.seconds(1e9) < 7.0
    rate.forget()
    assert rate.seconds(1e9) == 0.0
