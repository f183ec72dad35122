"""Whether copies can be relied on: failures in a row suspend swapping for a while, and the log is not flooded."""

from __future__ import annotations

import logging

from kvpolicy.events import Direction

logger = logging.getLogger(__name__)

MAX_FAILURES_IN_A_ROW = 5
FIRST_SUSPENSION_S = 10.0
MAX_SUSPENSION_S = 600.0
"""Each suspension that follows another without a good copy between is twice as long, up to this."""
WARNING_EVERY_S = 60.0


class CopyHealth:
    """One per engine core. Times are of the controller's clock, seconds."""

    def __init__(self) -> None:
        self._in_a_row: dict[Direction, int] = {"save": 0, "load": 0}
        """By direction: every load that fails has a save before it that was made."""
        self._suspension_s = FIRST_SUSPENSION_S
        self._suspended_until_s: float | None = None
        self._warned_s: float | None = None
        self._unreported = 0

    def suspended(self, now: float) -> bool:
        """Whether nothing should be swapped now. Once a suspension is over, one failure brings the next."""
        if self._suspended_until_s is None:
            return False
        if now < self._suspended_until_s:
            return True
        self._suspended_until_s = None
        logger.warning("kvpolicy: swapping is tried again")
        return False

    def succeeded(self, direction: Direction) -> None:
        """A copy was made in full. Only one that was loaded again says that swapping works."""
        self._in_a_row[direction] = 0
        if direction == "load":
            self._suspension_s = FIRST_SUSPENSION_S

    def failed(self, direction: Direction, what: str, now: float) -> None:
        """``what``: which copy failed and why."""
        self._in_a_row[direction] += 1
        self._unreported += 1
        if self._warned_s is None or now - self._warned_s >= WARNING_EVERY_S:
            others = f" (and {self._unreported - 1} more since the last warning)" if self._unreported > 1 else ""
            logger.warning("kvpolicy: %s%s; the request is recomputed", what, others)
            self._warned_s, self._unreported = now, 0
        if self._in_a_row[direction] >= MAX_FAILURES_IN_A_ROW and self._suspended_until_s is None:
            self._suspend(direction, now)

    def _suspend(self, direction: Direction, now: float) -> None:
        self._suspended_until_s = now + self._suspension_s
        logger.warning(
            "kvpolicy: %d %ss in a row failed; nothing is swapped for %g s (counted as fallback 'copies_failing')",
            self._in_a_row[direction],
            direction,
            self._suspension_s,
        )
        self._suspension_s = min(2 * self._suspension_s, MAX_SUSPENSION_S)
