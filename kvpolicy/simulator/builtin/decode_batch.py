"""The decode batch: running requests that decode one token in every step, advanced in bulk.

What changes in a step follows from a clock that counts scheduled steps. A request needs a new block whenever the clock
reaches its phase, and leaves when the clock reaches its end, the step in which its last token was scheduled. The cost
of a step therefore does not grow with the number of requests, whose records are brought up to date when they leave.

Requests whose output other requests may share enter each block into the prefix cache as it fills, by the same clock.

With asynchronous scheduling a member's last scheduled token is still in flight: ``ahead`` is 1 then, else 0.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Any

from kvpolicy.latency import ClassTally
from kvpolicy.simulator.builtin.blocks import Pool
from kvpolicy.simulator.builtin.live_request import LiveRequest


class LongestGaps:
    """The longest of the steps that ended after some time: only those that no later step exceeds are kept."""

    def __init__(self) -> None:
        self._ends_s: list[float] = []
        self._gaps_s: list[float] = []

    def add(self, end_s: float, gap_s: float) -> None:
        """Count a step that ended ``gap_s`` after the one before it. Steps come in the order of their ends."""
        while self._gaps_s and self._gaps_s[-1] <= gap_s:
            self._gaps_s.pop()
            self._ends_s.pop()
        self._ends_s.append(end_s)
        self._gaps_s.append(gap_s)

    def after(self, began_s: float) -> float:
        """The longest among the steps that ended after ``began_s``; 0 where none did."""
        at = bisect_right(self._ends_s, began_s)
        return self._gaps_s[at] if at < len(self._gaps_s) else 0.0


class DecodeBatch:
    """``len()`` is the number of requests in the batch."""

    def __init__(self, block_size: int, ahead: int) -> None:
        self.clock = 0
        self.read_tokens = 0
        """Computed tokens of all members together."""
        self.last_s = 0.0
        """When the last step ended, in which every member got its latest token."""
        self.latest_turn: Any = None
        """Highest turn of the members; None without members."""
        self.gaps = LongestGaps()
        self.tally = ClassTally()
        """Of the class of the first request that ever joined."""
        self.others: dict[ClassTally, int] = {}
        """Members by class, where there are any, without those of :attr:`tally`."""
        self._size = block_size
        self._ahead = ahead
        self._first_joined = False
        self._members: dict[Any, LiveRequest] = {}
        self._phases: list[dict[Any, LiveRequest]] = [{} for _ in range(block_size)]
        self._unfilled: list[dict[Any, LiveRequest]] = [{} for _ in range(block_size)]
        """By phase, members that still have keyed blocks to fill, which other requests may share."""
        self._ends: list[tuple[int, Any, LiveRequest]] = []

    def __len__(self) -> int:
        return len(self._members)

    def join(self, live: LiveRequest) -> None:
        """Add a request that needs exactly one token in the next step and in every step after it."""
        live.joined = self.clock
        live.ends = self.clock + live.request.output_tokens - live.outputs - live.placeholders
        if live.tally is not self.tally:
            self._count_joined(live.tally)
        self._members[live.turn] = live
        phase = (self.clock - live.computed) % self._size
        self._phases[phase][live.turn] = live
        if live.cached < len(live.keys):
            self._unfilled[phase][live.turn] = live
        self.read_tokens += live.computed
        self.latest_turn = live.turn if self.latest_turn is None else max(self.latest_turn, live.turn)
        heapq.heappush(self._ends, (live.ends, live.turn, live))

    def missing_blocks(self) -> int:
        """Blocks that the next step needs."""
        return len(self._phases[self.clock % self._size])

    def steps_within(self, free_blocks: int, max_steps: int) -> int:
        """Number of steps, up to ``max_steps``, that the free blocks suffice for."""
        count = len(self._members)
        safe_steps = free_blocks // count * self._size
        if safe_steps >= max_steps:
            return max_steps
        free_blocks -= safe_steps // self._size * count
        for steps in range(safe_steps, max_steps):
            free_blocks -= len(self._phases[(self.clock + steps) % self._size])
            if free_blocks < 0:
                return steps
        return max_steps

    def next_end(self) -> int:
        """Steps until the first member has its last token scheduled."""
        return self._ends[0][0] - self.clock

    def step(self, pool: Pool) -> None:
        """Schedule one token for every member. The caller has checked that the blocks are free."""
        phase = self._phases[self.clock % self._size]
        for turn in sorted(phase):
            pool.grow(phase[turn], 1)
        self.clock += 1
        self.read_tokens += len(self._members)
        # A block is full once its last token is scheduled; scheduling ahead, its tokens are known one step later.
        unfilled = self._unfilled[(self.clock - self._ahead) % self._size]
        for turn in sorted(unfilled):
            pool.cache(unfilled[turn], self._computed(unfilled[turn]) - self._ahead)
            if unfilled[turn].cached >= len(unfilled[turn].keys):
                del unfilled[turn]

    def pop_finished(self, pool: Pool) -> list[LiveRequest]:
        """Remove and return the members whose last token is scheduled, in the order of their turns."""
        leaving = []
        while self._ends and self._ends[0][0] == self.clock:
            live = heapq.heappop(self._ends)[2]
            del self._members[live.turn]
            computed = self._settle(live, pool)
            phase = (self.clock - computed) % self._size
            self._phases[phase].pop(live.turn)
            self._unfilled[phase].pop(live.turn, None)
            self.read_tokens -= computed
            if live.tally is not self.tally:
                self._count_left(live.tally)
            leaving.append(live)
        return leaving

    def dissolve(self, pool: Pool) -> Iterator[LiveRequest]:
        """Remove all members, in the order of their turns."""
        members = [self._members[turn] for turn in sorted(self._members)]
        self._members.clear()
        self._ends.clear()
        self.others.clear()
        for phase in (*self._phases, *self._unfilled):
            phase.clear()
        self.read_tokens, self.latest_turn = 0, None
        for live in members:
            self._settle(live, pool)
            yield live

    def count_gaps(self, gaps_s: list[float], members: int, others: Iterable[tuple[ClassTally, int]]) -> None:
        """Count inter-token times that ``members`` requests had, ``others`` of them by class as in :attr:`others`."""
        for tally, count in others:
            tally.itl.extend(gaps_s, count)
            tally.tokens += count * len(gaps_s)
            members -= count
        if members:
            self.tally.itl.extend(gaps_s, members)
            self.tally.tokens += members * len(gaps_s)

    def note_outputs(self, ends_s: list[float], members: int) -> None:
        """Note the output of steps that ended then, in which ``members`` requests got a token each, by class."""
        for tally, count in self.others.items():
            tally.curve.extend(ends_s, count)
            members -= count
        if members:
            self.tally.curve.extend(ends_s, members)

    def _count_joined(self, tally: ClassTally) -> None:
        if self._first_joined:
            self.others[tally] = self.others.get(tally, 0) + 1
        else:
            self.tally, self._first_joined = tally, True

    def _count_left(self, tally: ClassTally) -> None:
        self.others[tally] -= 1
        if not self.others[tally]:
            del self.others[tally]

    def _computed(self, live: LiveRequest) -> int:
        """Computed tokens of a member, by the clock."""
        if live.joined == self.clock:
            return live.computed
        return live.request.total_tokens - (live.ends - self.clock) - 1

    def _settle(self, live: LiveRequest, pool: Pool) -> int:
        """Bring a member's own counts up to date with the clock; returns its computed tokens."""
        if live.joined == self.clock:
            return live.computed
        scheduled = live.request.output_tokens - (live.ends - self.clock)
        live.computed = self._computed(live)
        live.outputs = scheduled - self._ahead
        live.placeholders = live.in_flight = self._ahead
        live.longest_gap_s = max(live.longest_gap_s, self.gaps.after(live.last_s))
        live.last_s = self.last_s
        pool.cache(live, live.computed - live.placeholders)
        return live.computed
