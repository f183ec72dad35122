"""How long the loads of a tier take, by the tier's own clock."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from kvpolicy.tiers.base import Took


class LoadTimes:
    """Of loads that are read block by block, in the order in which they begin. ``clock``: seconds. All methods are
    called from one thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._times: dict[int, tuple[float, float]] = {}
        """By job, when the load began, and when the last one of its blocks that have ended did."""
        self._last_s = -inf
        """When the last load ended."""

    def begins(self, job: int) -> None:
        now = self._clock()
        self._times[job] = now, now

    def block_ended(self, job: int, ended_s: float) -> None:
        began_s, last_s = self._times[job]
        self._times[job] = began_s, max(last_s, ended_s)

    def ended(self, job: int) -> Took:
        """All blocks of a load have ended. What threads read at once ends in any order."""
        began_s, ended_s = self._times.pop(job)
        alone_s = max(0.0, ended_s - max(began_s, self._last_s))
        self._last_s = max(self._last_s, ended_s)
        return Took(ended_s - began_s, alone_s)
