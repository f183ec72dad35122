"""Waits until servers stand still: what a run has left them to do, as to write files, would take cores from the next.

Called by :mod:`kvpolicy_vllm.bench.run_bench`. Loads no engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

INTERVAL_S = 1.0
"""Over which growth is taken."""
MAX_WAIT_S = 30.0
STILL_CORES = 0.05
"""A server that takes less than so much of one core stands still: with nothing to do, vLLM 0.32 takes 0.02 on a CPU."""


async def settled(
    cpu_s: Callable[[], Sequence[float]],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> float:
    """Wait until each server stands still over an interval, for :data:`MAX_WAIT_S` at most. Returns how many cores the
    busiest one took in the last interval, by which :func:`is_still` says whether they do.

    ``cpu_s``: seconds on processors that each of them took so far. They fall where a process ends, whose seconds are
    missing then: that server is taken to be busy in that interval.
    """
    begin_s = at_s = clock()
    used_s = cpu_s()
    while True:
        await sleep(INTERVAL_S)
        before_s, at_s = at_s, clock()
        before_used_s, used_s = used_s, cpu_s()
        grown_s = [after - before for before, after in zip(before_used_s, used_s, strict=True)]
        cores = max(grown_s, key=abs) / (at_s - before_s)
        if is_still(cores) or at_s - begin_s >= MAX_WAIT_S:
            return cores


def is_still(cores: float) -> bool:
    """Whether a server that took so many cores in an interval stands still."""
    return 0.0 <= cores < STILL_CORES
