"""The crowd: running requests that decode one token in every step. Nobody of it is touched while it does.

What changes with every step follows from a clock. A request needs a new block whenever the clock has its phase, and
leaves when the clock says that its last token was scheduled, so a step costs the same however many decode.

Those who generate what others may look for enter each block of it into the cache as it is filled, by the same clock.

Clocks count scheduled steps. With asynchronous scheduling a member's last scheduled token is still on its way:
``ahead`` is 1 then, else 0.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from kvpolicy.simulator.builtin.blocks import Pool
from kvpolicy.simulator.builtin.live_request import Live


class Crowd:
    """``len()`` tells how many there are."""

    def __init__(self, block_size: int, ahead: int) -> None:
        self.clock = 0
        self.read_tokens = 0
        """Context that the members have computed, all together."""
        self.last_s = 0.0
        """When the last step ended: when every member had its last token."""
        self.latest_turn = -1
        self._size = block_size
        self._ahead = ahead
        self._members: dict[int, Live] = {}
        self._phases: list[dict[int, Live]] = [{} for _ in range(block_size)]
        self._keyed: list[dict[int, Live]] = [{} for _ in range(block_size)]
        """Of the members in each phase, those who have yet to generate something that others may look for."""
        self._ends: list[tuple[int, int, Live]] = []

    def __len__(self) -> int:
        return len(self._members)

    def join(self, live: Live) -> None:
        """``live`` needs exactly one token in the next step, and in every one after it."""
        live.joined = self.clock
        live.ends = self.clock + live.request.output_tokens - live.outputs - live.placeholders
        self._members[live.turn] = live
        phase = (self.clock - live.computed) % self._size
        self._phases[phase][live.turn] = live
        if live.cached < len(live.keys):
            self._keyed[phase][live.turn] = live
        self.read_tokens += live.computed
        self.latest_turn = max(self.latest_turn, live.turn)
        heapq.heappush(self._ends, (live.ends, live.turn, live))

    def missing_blocks(self) -> int:
        """That the next step needs."""
        return len(self._phases[self.clock % self._size])

    def steps_within(self, free_blocks: int, most: int) -> int:
        """How many steps, ``most`` at most, can be taken before blocks are missing."""
        count = len(self._members)
        whole = free_blocks // count * self._size
        if whole >= most:
            return most
        free_blocks -= whole // self._size * count
        for steps in range(whole, most):
            free_blocks -= len(self._phases[(self.clock + steps) % self._size])
            if free_blocks < 0:
                return steps
        return most

    def next_end(self) -> int:
        """Steps that can be scheduled until somebody has had its last one."""
        return self._ends[0][0] - self.clock

    def step(self, pool: Pool) -> None:
        """Schedule one token for every member; the blocks for it are free."""
        phase = self._phases[self.clock % self._size]
        for turn in sorted(phase):
            pool.grow(phase[turn], 1)
        self.clock += 1
        self.read_tokens += len(self._members)
        # A block is full when the last of its tokens is scheduled, and known one step later where that is ahead.
        keyed = self._keyed[(self.clock - self._ahead) % self._size]
        for turn in sorted(keyed):
            pool.cache(keyed[turn], self._computed(keyed[turn]) - self._ahead)
            if keyed[turn].cached >= len(keyed[turn].keys):
                del keyed[turn]

    def through(self, pool: Pool) -> list[Live]:
        """Take out those whose last token is scheduled, in the order of their turns."""
        found = []
        while self._ends and self._ends[0][0] == self.clock:
            live = heapq.heappop(self._ends)[2]
            del self._members[live.turn]
            computed = self._settle(live, pool)
            phase = (self.clock - computed) % self._size
            self._phases[phase].pop(live.turn)
            self._keyed[phase].pop(live.turn, None)
            self.read_tokens -= computed
            found.append(live)
        return found

    def dissolve(self, pool: Pool) -> Iterator[Live]:
        """Everybody leaves, in the order of their turns."""
        members = [self._members[turn] for turn in sorted(self._members)]
        self._members.clear()
        self._ends.clear()
        for phase in (*self._phases, *self._keyed):
            phase.clear()
        self.read_tokens, self.latest_turn = 0, -1
        for live in members:
            self._settle(live, pool)
            yield live

    def _computed(self, live: Live) -> int:
        """Its computed tokens by the clock."""
        if live.joined == self.clock:
            return live.computed
        return live.request.total_tokens - (live.ends - self.clock) - 1

    def _settle(self, live: Live, pool: Pool) -> int:
        """Write down what the clock knows of it; returns its computed tokens."""
        if live.joined == self.clock:
            return live.computed
        scheduled = live.request.output_tokens - (live.ends - self.clock)
        live.computed = self._computed(live)
        live.outputs = scheduled - self._ahead
        live.placeholders = live.in_flight = self._ahead
        live.last_s = self.last_s
        pool.cache(live, live.computed - live.placeholders)
        return live.computed
