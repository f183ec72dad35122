"""That servers stand still before a run begins, and that nobody waits for them for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from kvpolicy_vllm.bench.idle_servers import MAX_WAIT_S, is_still, settled


def waited(*cpu_s_at: Callable[[float], float]) -> tuple[float, float]:
    """Cores in the last interval, and how long it took; ``cpu_s_at``: seconds on processors by the time, by server."""
    now_s = [100.0]

    async def sleep(seconds: float) -> None:
        now_s[0] += seconds

    cores = asyncio.run(settled(lambda: [one(now_s[0] - 100.0) for one in cpu_s_at], lambda: now_s[0], sleep))
    return cores, now_s[0] - 100.0


def test_servers_that_stand_still_are_waited_for_over_one_interval() -> None:
    cores, took_s = waited(lambda at_s: 7.0 + 0.02 * at_s)
    assert cores == pytest.approx(0.02) and took_s == 1.0 and is_still(cores)


def test_each_of_several_servers_stands_still_by_itself() -> None:
    """Four that take 0.02 cores each with nothing to do; beside which another one works for 2 s."""
    idle = [lambda at_s: 0.02 * at_s] * 4
    assert waited(*idle) == (pytest.approx(0.02), 1.0)
    assert waited(*idle, lambda at_s: min(at_s, 2.0)) == (pytest.approx(0.02), 3.0)


def test_what_a_run_left_to_do_is_waited_for() -> None:
    """Half a core for 3.5 s: the interval in which it ends counts as well."""
    cores, took_s = waited(lambda at_s: 0.5 * min(at_s, 3.5))
    assert cores == 0.0 and took_s == 5.0


def test_servers_that_never_stand_still_are_not_waited_for_longer_than_that() -> None:
    cores, took_s = waited(lambda at_s: 0.06 * at_s)
    assert cores == pytest.approx(0.06) and took_s == MAX_WAIT_S and not is_still(cores)


def test_a_process_that_ends_says_nothing_of_the_others() -> None:
    """Its 40 s are missing from 2 s on, while another process computes until 6 s."""
    cores, took_s = waited(lambda at_s: min(at_s, 6.0) + (40.0 if at_s < 2.0 else 0.0))
    assert cores == 0.0 and took_s == 7.0
