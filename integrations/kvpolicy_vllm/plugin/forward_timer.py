"""Times each step's forward pass on the device, in a worker. The connector drives it and sends what it has found with
the step's other reports; :mod:`kvpolicy_vllm.plugin.forward_times` takes them on the scheduler's side.
"""

from __future__ import annotations

import time
from collections import deque
from itertools import starmap
from typing import Any, Protocol

import torch

from kvpolicy_vllm.plugin.messages import Forward

MAX_PENDING = 64
"""Forward passes of which a rank awaits the end; beyond it the oldest are given up."""
MAX_FAILURES = 5
"""After so many failures a rank times no more."""


class Watch(Protocol):
    """Marks points of a device's work."""

    def mark(self) -> Any:
        """After all that was launched so far."""

    def passed(self, mark: Any) -> bool:
        """Whether the device has come to it. Does not wait."""

    def seconds(self, first: Any, last: Any) -> float:
        """Between two marks that it has passed."""


class HostWatch:
    """Where the host itself computes, what was called has ended when the call returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def passed(self, mark: float) -> bool:
        return True

    def seconds(self, first: float, last: float) -> float:
        return last - first


class CudaWatch:
    """Events on the stream that computes."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def passed(self, mark: torch.cuda.Event) -> bool:
        return bool(mark.query())

    def seconds(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        return float(first.elapsed_time(last)) / 1e3


WATCHES: dict[str, type[Watch]] = {"cpu": HostWatch, "cuda": CudaWatch}


class ForwardTimer:
    """Times the forward passes of one rank, of the steps that it is told to time. Never waits for the device.

    A failure is reported with its step and touches nothing else. ``kind``: torch's name of the device's kind; on one
    that :data:`WATCHES` lacks, and with None, nothing is timed.
    """

    def __init__(self, kind: str | None = None) -> None:
        self._watch = WATCHES[kind]() if kind in WATCHES else None
        self._step: int | None = None
        self._marks: list[Any] = []
        """Begin and end of each part of the pass that is being launched, the last end missing."""
        self._pending: deque[tuple[int, list[Any]]] = deque()
        self._untimed: list[Forward] = []
        self._failures = 0

    def begin(self, step: int | None) -> None:
        """The step's forward pass is launched next. None: it is not to be timed."""
        self._marks = []
        self._step = None if self._watch is None or self._failures >= MAX_FAILURES else step
        self._mark()

    def interrupt(self) -> None:
        """What is launched from now on does not belong to the pass, until :meth:`go_on`."""
        self._mark()

    def go_on(self) -> None:
        self._mark()

    def end(self) -> None:
        """The pass is launched. Further calls in the same step do nothing."""
        self._mark()
        if self._step is not None:
            self._pending.append((self._step, self._marks))
            if len(self._pending) > MAX_PENDING:
                self._untimed.append(Forward(self._pending.popleft()[0], None))
        self._step = None

    def take(self) -> list[Forward]:
        """Passes that have ended since the last call, or of which timing failed."""
        done, self._untimed = self._untimed, []
        watch = self._watch
        while watch is not None and self._pending:
            step, marks = self._pending[0]
            try:
                if not watch.passed(marks[-1]):
                    break
                seconds: float | None = sum(starmap(watch.seconds, zip(marks[::2], marks[1::2], strict=True)))
            # A server must not stop because a time is not known.
            except Exception:  # noqa: BLE001
                self._failures += 1
                seconds = None
            self._pending.popleft()
            done.append(Forward(step, seconds))
        return done

    def _mark(self) -> None:
        if self._step is None or self._watch is None:
            return
        try:
            self._marks.append(self._watch.mark())
        # As above.
        except Exception:  # noqa: BLE001
            self._failures += 1
            self._untimed.append(Forward(self._step, None))
            self._step = None
