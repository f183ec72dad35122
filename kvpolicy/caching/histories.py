"""What is known of blocks, together for those in a row that were asked for alike, as those of a shared prefix are.

A prompt of many blocks consists of few such stretches, so that a policy that goes by them takes no time for each block.
"""

from __future__ import annotations

from kvpolicy.caching.returns import Class, Visit

BROKEN = -1


class History:
    """How often, when and in what class the last prompt asked for the blocks that have it.

    Unless it is broken, they are ``blocks`` blocks of one chain in a row, from position ``first`` on. As a key stands
    for all blocks before it, too, whoever has the last of them behind the first one has all of them.
    """

    __slots__ = ("blocks", "first", "name", "uses", "visit")

    def __init__(self, first: int, blocks: int = 0, uses: int = 0) -> None:
        self.first, self.blocks, self.uses = first, blocks, uses
        self.name: Class = None
        self.visit: Visit

    def continues_as(self, behind: History) -> bool:
        """Whether the blocks of that one are behind these, and what is learned of both, and their new class, is the
        same."""
        if self.uses != behind.uses or behind.first != self.first + self.blocks:
            return False
        return not self.uses or (self.visit is behind.visit and self.name == behind.name)


class Record:
    """What is known of a block."""

    __slots__ = ("history", "position", "turn")

    def __init__(self, position: int, history: History) -> None:
        self.position, self.history, self.turn = position, history, 0

    def forget(self) -> None:
        """Nothing is known of the block any more."""
        self.history.first = BROKEN


def taken(records: list[Record]) -> History:
    """A history of their own for blocks in a row, like the one that they shared with others."""
    former, first = records[0].history, records[0].position
    end, former_end = first + len(records), former.first + former.blocks
    history = History(first, len(records), former.uses)
    if former.uses:
        history.name, history.visit = former.name, former.visit
    former.blocks -= len(records)
    if first == former.first:
        former.first = end
    elif end != former_end:
        former.first = BROKEN
    for record in records:
        record.history = history
    return history
