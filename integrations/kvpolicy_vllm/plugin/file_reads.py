"""How long loads from files take, by those that have ended, and whether requests wait for them: part of the index of
files, and of the tier of files below vLLM's own OffloadingConnector."""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import inf

from kvpolicy.host_store import RecentRate
from kvpolicy.tiers import Took
from kvpolicy_vllm.plugin.host_copies import MAX_FAILURES_IN_A_ROW

logger = logging.getLogger(f"vllm.{__name__}")

MAX_WAIT_S = 10.0
"""A request waits so long for its blocks to come from files, and is computed then. What not all ranks have reported for
so long is late."""
RENEWED_S = 600.0
"""How long files took counts for so long after the last load, and that they could not be written: a disk that was too
slow, or full, is tried again then."""


class FileReads:
    """One per engine core. ``clock``: the controller's. ``counted``: where it is counted that nobody waits, for the
    log."""

    def __init__(
        self,
        block_bytes: int,
        clock: Callable[[], float],
        counted: str = " (counted as cache_blocks, event 'suspended')",
    ) -> None:
        self._block_bytes, self._clock, self._counted = block_bytes, clock, counted
        self._rate, self._counts_until_s = RecentRate(), 0.0
        """How long loads took, and when that stops counting."""
        self._last_s = -inf
        """When the last load ended. The time of one that was behind it counts from then."""
        self._heard_after_s = 0.0
        """Seconds that the last load took by this clock and not by the workers': steps of the engine, until they began
        it and until they could say that it had ended."""
        self._failures = 0
        """Loads in a row that brought nothing; a late one counts as many."""

    @property
    def suspended(self) -> bool:
        """Whether no request waits for files, as a load was late, or several in a row brought nothing. One that comes
        in time ends it."""
        return self._failures >= MAX_FAILURES_IN_A_ROW

    def expected_s(self, blocks: int) -> float:
        """Seconds until so many blocks are in host memory, if nothing else is on its way; 0 where none was loaded for
        long."""
        return 0.0 if self._clock() >= self._counts_until_s else self._rate.seconds(blocks * self._block_bytes)

    def in_time(self, blocks: int, backlog_s: float) -> int:
        """How many of these blocks are expected in half of the time that a request waits, behind what takes
        ``backlog_s``: a load that is late is one that requests have waited for in vain."""
        room_s, expected_s = MAX_WAIT_S / 2 - backlog_s, self.expected_s(blocks)
        if room_s <= 0:
            return 0
        return blocks if expected_s <= room_s else int(blocks * room_s / expected_s)

    def left_s(self, began_s: float, blocks: int) -> float:
        """Expected seconds until a load of so many blocks, which is the first one under way, has ended. One that has
        taken longer than expected is expected to take as long again as it is overdue, which none is as long as its
        end may not have been heard of."""
        return abs(self.expected_s(blocks) - max(0.0, self._under_way_s(began_s) - self._heard_after_s))

    def late(self) -> None:
        """A load has not ended in time."""
        self._failed(MAX_FAILURES_IN_A_ROW, f"are not there after {MAX_WAIT_S:g} s")

    def ended(self, began_s: float, blocks: int, took: Took | None = None) -> None:
        """A load has ended that brought so many blocks. What brought none took its time, and moved no bytes. ``took``:
        as the slowest rank has it; where that is not known, all the time until the load was heard of counts."""
        now = self._clock()
        if now >= self._counts_until_s:
            self._rate.forget()
        if took is None:
            took = Took(now - began_s, self._under_way_s(began_s))
        self._rate.add(took.alone_s, blocks * self._block_bytes)
        self._heard_after_s = max(0.0, now - began_s - took.seconds)
        self._last_s = now
        if not blocks:
            self._failed(1, f"brought nothing {MAX_FAILURES_IN_A_ROW} times in a row")
            return
        self._counts_until_s = now + RENEWED_S
        if took.seconds >= MAX_WAIT_S:  # the disk goes on, or is slow
            return
        if self.suspended:
            logger.warning("kvpolicy: requests wait for blocks from files again")
        self._failures = 0

    def _under_way_s(self, began_s: float) -> float:
        return self._clock() - max(began_s, self._last_s)

    def _failed(self, failures: int, what: str) -> None:
        """A load was late or brought nothing, which counts as so many failures in a row."""
        was_suspended = self.suspended
        self._failures += failures
        if self.suspended and not was_suspended:
            logger.warning(
                "kvpolicy: loads from files %s; no request waits for files until one comes in time%s", what,
                self._counted,
            )  # fmt: skip
