"""Writing a trace beside a running scheduler, at no cost it can feel.

The scheduler appends plain rows to bounded queues; a thread turns them into Parquet parts. Whatever the disk does,
rows that do not fit are dropped and counted, and the scheduler never waits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from kvpolicy.trace import SCHEMAS, Header, from_rows, write_part

logger = logging.getLogger(__name__)

Row = dict[str, Any]


class RowWriter(Protocol):
    """What takes a trace's rows."""

    dropped: int
    """Rows that could not be kept."""

    def add(self, table: str, row: Row) -> None: ...

    def close(self) -> None: ...


class TraceWriter:
    """Rows in, part files out. One per engine core.

    A part is written every ``part_rows`` rows or ``part_s`` seconds, so that a killed server loses at most that.
    """

    def __init__(
        self,
        core: Path,
        header: Header,
        part_rows: int = 5000,
        part_s: float = 2.0,
        most_waiting: int = 100_000,
        close_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.core = core
        self.dropped = 0
        self._header = header
        self._part_rows = part_rows
        self._part_s = part_s
        self._most_waiting = most_waiting
        self._close_s = close_s
        self._clock = clock
        self._waiting: dict[str, deque[Row]] = {name: deque() for name in SCHEMAS}
        self._parts = dict.fromkeys(SCHEMAS, 0)
        self._has_header = False
        self._complained = False
        self._writing = threading.Lock()
        self._writing_rows = 0
        """Taken off the queue, but not yet on the disk."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvpolicy-trace", daemon=True)
        self._thread.start()

    def add(self, table: str, row: Row) -> None:
        """Queue one row; drops and counts it where too many wait."""
        waiting = self._waiting[table]
        if len(waiting) >= self._most_waiting:
            self.dropped += 1
        else:
            waiting.append(row)

    def flush(self) -> None:
        """Write all rows added so far. For tests and tools: waits for the disk."""
        with self._writing:
            for name in SCHEMAS:
                while self._waiting[name]:
                    self._write(name)

    def close(self) -> None:
        """Once. Waits ``close_s`` for the disk; what is not written by then is dropped and counted."""
        self._stop.set()
        self._thread.join(timeout=self._close_s)
        if self._thread.is_alive():
            unwritten = self._writing_rows + sum(map(len, self._waiting.values()))
            self.dropped += unwritten
            logger.warning(
                "kvpolicy: trace %s was not written within %g s at the end, dropping %d records",
                self.core, self._close_s, unwritten,
            )  # fmt: skip

    def _run(self) -> None:
        last = self._clock()
        while not self._stop.wait(0.1):
            due = self._clock() - last >= self._part_s
            if due or any(len(rows) >= self._part_rows for rows in self._waiting.values()):
                last = self._clock()
                self.flush()
        self.flush()  # here, not where it is closed: a disk that is gone must not keep anybody else

    def _write(self, name: str) -> None:
        waiting = self._waiting[name]
        rows = [waiting.popleft() for _ in range(min(len(waiting), self._part_rows))]
        self._writing_rows = len(rows)
        try:
            if not self._has_header:
                self._header.write(self.core)
                self._has_header = True
            elif not (self.core / "header.json").exists():
                raise FileNotFoundError(f"{self.core} was removed while it was recorded into")
            write_part(self.core, name, self._parts[name], from_rows(name, rows))
            self._parts[name] += 1
        # Whatever it is, the thread must live: a full disk may have room again later. Until then rows are counted.
        except Exception as error:  # noqa: BLE001
            self.dropped += len(rows)
            if not self._complained:
                self._complained = True
                logger.warning("kvpolicy: cannot write trace %s, dropping records: %s", self.core, error)
        self._writing_rows = 0
