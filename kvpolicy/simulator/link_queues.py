"""The link between device and host in virtual time: when copies run, and how long steps wait for them.

Both simulators hand their copies to it, so that what a copy does to a step is written down once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, NamedTuple, Protocol, TypeVar

from kvpolicy.events import Direction, Transfer, copy_pieces
from kvpolicy.simulator.base import Server, Times


class Numbered(Protocol):
    """A copy, as the link knows it: a save and the load of the same content have the same number."""

    @property
    def copy_id(self) -> int: ...


Copied = TypeVar("Copied", bound=Numbered)
Brought = Iterable[tuple[Copied, int]]
"""What a step brings to the link: copies, each with its blocks."""


class Sent(NamedTuple, Generic[Copied]):
    """One direction of a copy on its way."""

    copy: Copied
    transfer: Transfer


class LinkQueues(Generic[Copied]):
    """Beside the steps copies run one at a time per direction; else within the step that brings them."""

    def __init__(self, server: Server, times: Times) -> None:
        self._times = times
        self._link = server.link
        self._block_bytes = server.block_bytes
        self._segment_bytes = server.segment_bytes or server.block_bytes
        self._pieces = copy_pieces(server.block_bytes, self._segment_bytes)
        self._free_s: dict[Direction, float] = {"save": 0.0, "load": 0.0}
        self.running: list[Sent[Copied]] = []
        """Not yet reported; no more than a few."""

    def step(self, saves: Brought[Copied], loads: Brought[Copied], begins_s: float, computes_s: float) -> float:
        """When a step that begins now, computes that long and brings those copies ends."""
        if self._link.overlapped:
            return self._beside(saves, loads, begins_s, computes_s)
        return self._within(saves, loads, begins_s, computes_s)

    def next_end_s(self) -> float | None:
        return min((sent.transfer.end_s for sent in self.running), default=None)

    def ended(self, now_s: float) -> list[Sent[Copied]]:
        """Transfers that have ended since the last call, in the order of their ends."""
        if not self.running:
            return []
        done = [sent for sent in self.running if sent.transfer.end_s <= now_s]
        if done:
            self.running = [sent for sent in self.running if sent.transfer.end_s > now_s]
            done.sort(key=lambda sent: sent.transfer.end_s)
        return done

    def _beside(self, saves: Brought[Copied], loads: Brought[Copied], begins_s: float, computes_s: float) -> float:
        """Copies run beside the steps, which they slow down; loads from the end of this one on."""
        for copy, blocks in saves:
            saved_s = self._send(copy, "save", blocks, begins_s, max(begins_s, self._free_s["save"]))
            if self._link.saves_wait:
                begins_s = saved_s
        ends_s = begins_s + computes_s
        busy = any(sent.transfer.start_s < ends_s and sent.transfer.end_s > begins_s for sent in self.running)
        ends_s = begins_s + computes_s * (1.0 + self._link.slowdown * busy)
        for copy, blocks in loads:
            self._send(copy, "load", blocks, ends_s, max(ends_s, self._free_s["load"], self._saved_s(copy)))
        return ends_s

    def _within(self, saves: Brought[Copied], loads: Brought[Copied], begins_s: float, computes_s: float) -> float:
        """The step waits for its saves, computes, and waits for its loads."""
        for copy, blocks in saves:
            begins_s = self._send(copy, "save", blocks, begins_s, begins_s)
        ends_s = begins_s + computes_s
        for copy, blocks in loads:
            ends_s = self._send(copy, "load", blocks, ends_s, ends_s)
        return ends_s

    def _saved_s(self, copy: Copied) -> float:
        """When the save of the copy to be loaded ends, where that is still to come."""
        saving = (sent.transfer.end_s for sent in self.running if sent.copy.copy_id == copy.copy_id)
        return max(saving, default=0.0)

    def _send(self, copy: Copied, direction: Direction, blocks: int, submit_s: float, start_s: float) -> float:
        size, segments = blocks * self._block_bytes, blocks * self._pieces
        queued = sum(sent.transfer.bytes for sent in self.running if sent.transfer.direction == direction)
        end_s = start_s + self._times.copy_s(direction, size, segments, self._segment_bytes)
        self._free_s[direction] = end_s
        transfer = Transfer(
            copy.copy_id, direction, True, size, segments, self._segment_bytes, True, queued, submit_s, start_s, end_s
        )
        self.running.append(Sent(copy, transfer))
        return end_s
