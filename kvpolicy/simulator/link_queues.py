"""The link between device and host in virtual time: when copies run, and how long steps wait for them.

Both simulators use it, so that the effect of a copy on a step is defined once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, NamedTuple, Protocol, TypeVar

from kvpolicy.events import Direction, Transfer, copy_pieces
from kvpolicy.simulator.base import Server, Times


class Numbered(Protocol):
    """A copy in one direction, as the link sees it."""

    @property
    def copy_id(self) -> int: ...

    @property
    def saved_by(self) -> int:
        """For a load: number of the last save that it needs; saves run in the order of their numbers."""
        ...


Copied = TypeVar("Copied", bound=Numbered)
Brought = Iterable[tuple[Copied, int]]
"""Copies that a step brings to the link, each with its number of blocks."""


class RunningCopy(NamedTuple, Generic[Copied]):
    """A save or load under way."""

    copy: Copied
    transfer: Transfer


class LinkQueues(Generic[Copied]):
    """Runs overlapped copies one at a time per direction, and others within the step that brings them."""

    def __init__(self, server: Server, times: Times) -> None:
        self._times = times
        self._link = server.link
        self._block_bytes = server.block_bytes
        self._segment_bytes = server.segment_bytes or server.block_bytes
        self._pieces = copy_pieces(server.block_bytes, self._segment_bytes)
        self._free_s: dict[Direction, float] = {"save": 0.0, "load": 0.0}
        self.running: list[RunningCopy[Copied]] = []
        """Transfers not yet reported by :meth:`ended`; a few at most."""

    def step(self, saves: Brought[Copied], loads: Brought[Copied], begins_s: float, computes_s: float) -> float:
        """End of a step that begins at ``begins_s``, computes for ``computes_s`` and brings these copies."""
        if self._link.overlapped:
            return self._overlapped_step(saves, loads, begins_s, computes_s)
        return self._blocking_step(saves, loads, begins_s, computes_s)

    def next_end_s(self) -> float | None:
        return min((running_copy.transfer.end_s for running_copy in self.running), default=None)

    def ended(self, now_s: float) -> list[RunningCopy[Copied]]:
        """Remove and return transfers that have ended by ``now_s``, in the order of their ends."""
        if not self.running:
            return []
        ended = [running_copy for running_copy in self.running if running_copy.transfer.end_s <= now_s]
        if ended:
            self.running = [running_copy for running_copy in self.running if running_copy.transfer.end_s > now_s]
            ended.sort(key=lambda running_copy: running_copy.transfer.end_s)
        return ended

    def _overlapped_step(
        self, saves: Brought[Copied], loads: Brought[Copied], begins_s: float, computes_s: float
    ) -> float:
        """End of a step beside which copies run and slow it down. Its loads begin at its end."""
        for copy, blocks in saves:
            saved_s = self._send(copy, "save", blocks, begins_s, max(begins_s, self._free_s["save"]))
            if self._link.saves_wait:
                begins_s = saved_s
        ends_s = begins_s + computes_s
        if self._link.slowdown and self.running:
            ends_s += self._link.slowdown * self._busy_s(begins_s, ends_s)
        for copy, blocks in loads:
            self._send(copy, "load", blocks, ends_s, max(ends_s, self._free_s["load"], self._saved_s(copy)))
        return ends_s

    def _busy_s(self, begins_s: float, ends_s: float) -> float:
        """Seconds between two times in which a copy runs, in one direction or both."""
        busy_s, until_s = 0.0, begins_s
        for start_s, end_s in sorted((copy.transfer.start_s, copy.transfer.end_s) for copy in self.running):
            start_s, end_s = max(start_s, until_s), min(end_s, ends_s)
            if end_s > start_s:
                busy_s, until_s = busy_s + end_s - start_s, end_s
        return busy_s

    def _blocking_step(
        self, saves: Brought[Copied], loads: Brought[Copied], begins_s: float, computes_s: float
    ) -> float:
        """End of a step that waits for its saves, computes, and waits for its loads."""
        for copy, blocks in saves:
            begins_s = self._send(copy, "save", blocks, begins_s, begins_s)
        ends_s = begins_s + computes_s
        for copy, blocks in loads:
            ends_s = self._send(copy, "load", blocks, ends_s, ends_s)
        return ends_s

    def _saved_s(self, copy: Copied) -> float:
        """When the last save that the load needs ends; 0 where it is no longer under way."""
        saving = (
            running_copy.transfer.end_s for running_copy in self.running if running_copy.copy.copy_id == copy.saved_by
        )
        return max(saving, default=0.0)

    def _send(self, copy: Copied, direction: Direction, blocks: int, submit_s: float, start_s: float) -> float:
        size, segments = blocks * self._block_bytes, blocks * self._pieces
        queued = sum(
            running_copy.transfer.bytes for running_copy in self.running if running_copy.transfer.direction == direction
        )
        end_s = start_s + self._times.copy_s(direction, size, segments, self._segment_bytes)
        self._free_s[direction] = end_s
        transfer = Transfer(
            copy.copy_id, direction, True, size, segments, self._segment_bytes, True, queued, submit_s, start_s, end_s
        )
        self.running.append(RunningCopy(copy, transfer))
        return end_s
