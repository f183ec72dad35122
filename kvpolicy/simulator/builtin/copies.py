"""The host pool, and the link's two queues: which copies there are, and when their transfers begin and end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvpolicy.simulator.base import Direction, Server, Times
from kvpolicy.simulator.builtin.live import Account, Copy, Live


@dataclass(frozen=True, slots=True)
class Transfer:
    """One direction of one copy, as it goes over the link."""

    copy: Copy
    direction: Direction
    bytes: int
    segments: int
    queued_bytes: int
    """Of the transfers of its direction that were not through when it was submitted."""
    submit_s: float
    start_s: float
    end_s: float


class CopyBook:
    """Host slots and the copies in them: one per request at most."""

    def __init__(self, server: Server) -> None:
        self.total = server.host_blocks
        self.free = server.host_blocks
        self._block_bytes = server.block_bytes
        self._saves: list[Copy] = []
        self._loads: list[Copy] = []
        self._unsaved_blocks = 0
        self._loading_blocks = 0
        self._made = 0

    def queued_bytes(self, direction: Direction) -> int:
        """On their way, or told to nobody yet."""
        return (self._unsaved_blocks if direction == "save" else self._loading_blocks) * self._block_bytes

    def save(self, live: Live, account: Account, blocks: int) -> Copy:
        """Queue a save of the request's first ``blocks`` blocks. The caller has seen that as many slots are free."""
        self.forget(live)
        self._made += 1
        copy = live.copy = Copy(self._made, live, account, account.tokens, blocks)
        self.free -= blocks
        self._unsaved_blocks += blocks
        account.busy += 1
        self._saves.append(copy)
        return copy

    def loadable_tokens(self, live: Live, local: int) -> int:
        """Tokens a load would bring beyond the local hit. Changes nothing."""
        copy = live.copy
        if copy is None or copy.loading:
            return 0
        return max(0, min(copy.tokens, live.tokens - 1) - local)

    def begin_load(self, live: Live, tokens: int, block_size: int) -> None:
        """Queue the load of the last ``tokens`` of what can be loaded."""
        copy = live.copy
        assert copy is not None
        total = min(copy.tokens, live.tokens - 1)
        copy.loading, copy.load_tokens = True, tokens
        copy.load_blocks = -(-total // block_size) - (total - tokens) // block_size
        copy.account.busy += 1
        self._loading_blocks += copy.load_blocks
        self._loads.append(copy)

    def forget(self, live: Live) -> Copy | None:
        """The request needs its copy no more; its slots are free at once, as the next save comes after this one.

        Returns it where nobody had said yet that it is saved.
        """
        copy = live.copy
        if copy is None:
            return None
        assert not copy.loading, "a request that is being loaded can neither run nor end"
        live.copy = None
        copy.forgotten = True
        self.free += copy.blocks
        if copy.saved:
            return None
        self._unsaved_blocks -= copy.blocks
        if not copy.told:
            self._saves.remove(copy)
            copy.account.busy -= 1
        return copy

    def take(self) -> tuple[list[Copy], list[Copy]]:
        """Saves and loads that the step now scheduled brings to the worker."""
        saves, loads, self._saves, self._loads = self._saves, self._loads, [], []
        for copy in saves:
            copy.told = True
        return saves, loads

    def saved(self, copy: Copy) -> None:
        """The worker has made the copy."""
        copy.account.busy -= 1
        copy.saved = True
        if not copy.forgotten:
            self._unsaved_blocks -= copy.blocks

    def loaded(self, copy: Copy) -> None:
        """The worker has brought the copy back: its slots are free."""
        copy.account.busy -= 1
        copy.live.copy = None
        self._loading_blocks -= copy.load_blocks
        self.free += copy.blocks


class LinkQueues:
    """When transfers run: beside the steps, one at a time per direction, or within the step that brings them."""

    def __init__(self, server: Server, times: Times) -> None:
        self._times = times
        self._block_bytes = server.block_bytes
        self._segment_bytes = server.segment_bytes or server.block_bytes
        self._pieces = max(1, server.block_bytes // self._segment_bytes)
        self._link = server.link
        self._free_s: dict[Direction, float] = {"save": 0.0, "load": 0.0}
        self.running: list[Transfer] = []
        """Not yet reported; no more than a few."""

    def step(self, saves: Iterable[Copy], loads: Iterable[Copy], begins_s: float, computes_s: float) -> float:
        """When a step that begins now and brings those copies ends."""
        if self._link.overlapped:
            return self._beside(saves, loads, begins_s, computes_s)
        return self._within(saves, loads, begins_s, computes_s)

    def next_end_s(self) -> float | None:
        return min((transfer.end_s for transfer in self.running), default=None)

    def ended(self, now_s: float) -> list[Transfer]:
        """Transfers that have ended since the last call, in the order of their ends."""
        if not self.running:
            return []
        done = [transfer for transfer in self.running if transfer.end_s <= now_s]
        if done:
            self.running = [transfer for transfer in self.running if transfer.end_s > now_s]
            done.sort(key=lambda transfer: transfer.end_s)
        return done

    def _beside(self, saves: Iterable[Copy], loads: Iterable[Copy], begins_s: float, computes_s: float) -> float:
        """Copies run beside the steps; loads from the end of this one on."""
        for copy in saves:
            made = self._transfer(copy, "save", begins_s, max(begins_s, self._free_s["save"]))
            copy.save_ends_s = made.end_s
            if self._link.saves_wait:
                begins_s = made.end_s
        ends_s = begins_s + computes_s
        busy = any(transfer.start_s < ends_s and transfer.end_s > begins_s for transfer in self.running)
        ends_s = begins_s + computes_s * (1.0 + self._link.slowdown * busy)
        for copy in loads:
            self._transfer(copy, "load", ends_s, max(ends_s, self._free_s["load"], copy.save_ends_s))
        return ends_s

    def _within(self, saves: Iterable[Copy], loads: Iterable[Copy], begins_s: float, computes_s: float) -> float:
        """The step waits for its saves, computes, and waits for its loads."""
        for copy in saves:
            begins_s = self._transfer(copy, "save", begins_s, begins_s).end_s
        ends_s = begins_s + computes_s
        for copy in loads:
            ends_s = self._transfer(copy, "load", ends_s, ends_s).end_s
        return ends_s

    def _transfer(self, copy: Copy, direction: Direction, submit_s: float, start_s: float) -> Transfer:
        blocks = copy.blocks if direction == "save" else copy.load_blocks
        size, segments = blocks * self._block_bytes, blocks * self._pieces
        queued = sum(transfer.bytes for transfer in self.running if transfer.direction == direction)
        end_s = start_s + self._times.copy_s(direction, size, segments, self._segment_bytes)
        made = Transfer(copy, direction, size, segments, queued, submit_s, start_s, end_s)
        self._free_s[direction] = end_s
        self.running.append(made)
        return made
