"""Joins the times of forward passes, which the workers' ranks report, to the steps' rows of a trace. Called by the
trace's recorder.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from kvpolicy.trace import Row
from kvpolicy_vllm.plugin.messages import Forward

MAX_LATE_STEPS = 16
"""A row waits for its time while at most so many rows come after it."""
MAX_EARLY = 8192
"""Times that await their row: rows of a sample are held back for seconds."""


class ForwardTimes:
    """Gives rows of ``steps`` their ``device_s``, that of the slowest rank, and passes them on in order.

    A device reports a pass while later steps go on, so a row waits for its time, but only where times have come at all
    and for no more than :data:`MAX_LATE_STEPS` rows. ``ranks``: how many have to report; ``emit`` takes the rows.
    """

    def __init__(self, ranks: int, emit: Callable[[Row], None]) -> None:
        self._ranks = ranks
        self._emit = emit
        self._reports: dict[int, list[float | None]] = {}
        """By step, what ranks have said."""
        self._rows: deque[Row] = deque()
        self._coming = False

    def add(self, row: Row) -> None:
        self._rows.append(row)
        self._pass_on(MAX_LATE_STEPS if self._coming else 0)

    def reported(self, forwards: Iterable[Forward]) -> int:
        """Take what ranks have found; return how many could not tell."""
        failed = 0
        for forward in forwards:
            self._reports.setdefault(forward.step, []).append(forward.seconds)
            failed += forward.seconds is None
            self._coming = True
        while len(self._reports) > MAX_EARLY:
            del self._reports[next(iter(self._reports))]
        self._pass_on(MAX_LATE_STEPS)
        return failed

    def release(self) -> None:
        """Pass all rows on, as when the engine idles or ends: those without a time stay without."""
        self._pass_on(0)

    def _pass_on(self, waiting: int) -> None:
        while self._rows and (self._is_known(self._rows[0]) or len(self._rows) > waiting):
            row = self._rows.popleft()
            reports = self._reports.pop(row["step"], [])
            known = [seconds for seconds in reports if seconds is not None]
            self._emit(row | {"device_s": max(known) if len(known) == self._ranks else None})

    def _is_known(self, row: Row) -> bool:
        return len(self._reports.get(row["step"], ())) >= self._ranks
