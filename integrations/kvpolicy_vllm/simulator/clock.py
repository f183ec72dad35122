"""A virtual clock, which advances only when it is told to."""

from __future__ import annotations


class VirtualClock:
    """Seconds since the workload's start. Called like ``time.monotonic``."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, to_s: float) -> None:
        """Advance to ``to_s``; does nothing where that is in the past."""
        self.now_s = max(self.now_s, to_s)
