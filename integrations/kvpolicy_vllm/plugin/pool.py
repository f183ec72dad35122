"""Host slots, one KV block each: the scheduler's free list. The memory itself is in the workers."""

from __future__ import annotations

from collections import deque


class SlotPool:
    """The free list. Freed slots are used again last, so that a fault shows as stale data as late as possible."""

    def __init__(self, slots: int) -> None:
        self.total = slots
        self._free = deque(range(slots))

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.total - len(self._free)

    def take(self, count: int) -> tuple[int, ...]:
        """Raises ValueError where fewer are free; ask :attr:`free` first."""
        if count > len(self._free):
            raise ValueError(f"{count} host slots asked for, {len(self._free)} free")
        return tuple(self._free.popleft() for _ in range(count))

    def give_back(self, slots: tuple[int, ...]) -> None:
        self._free.extend(slots)
