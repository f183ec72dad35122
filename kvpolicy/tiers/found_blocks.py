"""The blocks that an earlier process left in a folder, taken up when a tier is opened."""

from __future__ import annotations

import stat
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate, chain
from typing import NamedTuple

from kvpolicy.caching import CachingPolicy, Part
from kvpolicy.tiers.block_files import OUTDATED_NS, BlockFiles
from kvpolicy.tiers.block_format import BlockName
from kvpolicy.tiers.faults import Faults

Times = Mapping[bytes, tuple[BlockName, int]]
"""By digest of the key, blocks with the time of their last use; nanoseconds."""
SAME_USE_NS = 5_000_000_000
"""Two blocks in a row that were used less than that apart were used by one prompt. They are written one right after the
other, but those of a long prompt step by step, and a step may take seconds."""
REPLAYED = 8
"""Blocks of prompts that the policy is told of when a tier is opened, at most, by block found."""


class Use(NamedTuple):
    """A prompt of an earlier process, as far as its blocks are there."""

    last: bytes
    """Its last block."""
    blocks: int
    """Number of its blocks."""
    own: Sequence[bytes]
    """Those of them that no later prompt has, in their order."""


def uses_of(found: Times) -> list[Use]:
    """The prompts that the times of these blocks tell of, the latest one first. Takes a time that grows with the number
    of blocks, whatever the prompts share.

    A prompt ends with a block that no other one continues, and with one that was not used together with any that
    continues it: it was used again later, or continued only later, as by the next turn of a conversation.
    """
    goes_on = {
        name.parent
        for name, used_ns in found.values()
        if name.parent in found and abs(found[name.parent][1] - used_ns) < SAME_USE_NS
    }
    latest_first = sorted(found, key=lambda key: found[key][1], reverse=True)
    place: dict[bytes, int] = {}
    """Number of blocks before each one that belongs to a prompt; -1 for those of the prompt that is looked at."""
    uses = []
    of_rings = (key for key in latest_first if key not in place)  # which no server writes; found once others are placed
    for last in chain((key for key in latest_first if key not in goes_on), of_rings):
        own, at = [], last
        while at in found and at not in place:
            place[at] = -1
            own.append(at)
            at = found[at][0].parent
        own.reverse()
        place.update((key, number) for number, key in enumerate(own, place.get(at, -1) + 1))
        uses.append(Use(last, place[last] + 1, own))
    return uses


class FoundBlocks:
    """Those of a folder that there is room for. ``file_bytes``: size of a file. ``counts``: blocks by what happened to
    them. ``faults``: told of those that cannot be removed."""

    def __init__(self, files: BlockFiles, file_bytes: int, counts: Counter[str], faults: Faults) -> None:
        self._files, self._file_bytes, self._counts, self._faults = files, file_bytes, counts, faults
        self.there: dict[bytes, BlockName] = {}
        """By digest of the key."""
        self.outdated: list[bytes] = []
        """Those that nobody will ask for again, since only the process that has stored them could."""
        self.stuck = 0
        """Room that files take which could not be removed, in files of a block."""

    def take_up(self, policy: CachingPolicy) -> None:
        """Those of the prompts used last before others, as far as there is room; tell the policy of them. Others, and
        what is no whole file, are removed. Raises OSError where the folders cannot be read."""
        found = self._whole()
        uses = uses_of(found)
        kept = [key for use in uses for key in use.own]
        if len(kept) > policy.capacity:
            for key in kept[policy.capacity :]:
                self._remove(found[key][0], self._file_bytes)
            kept = kept[: policy.capacity]
            found = {key: found[key] for key in kept}
            uses = uses_of(found)
        self.there = {key: found[key][0] for key in kept}
        self.outdated = [key for key in reversed(kept) if found[key][1] == OUTDATED_NS]
        self._counts["found"] = len(self.there)
        self._replay(uses, policy)

    def _whole(self) -> dict[bytes, tuple[BlockName, int]]:
        """By digest of the key, blocks with the time of their last use."""
        found: dict[bytes, tuple[BlockName, int]] = {}
        for name, status in self._files.blocks():
            whole = stat.S_ISREG(status.st_mode) and status.st_size == self._file_bytes
            if whole and name.key not in found:
                found[name.key] = name, status.st_mtime_ns
            else:
                self._counts["found_damaged"] += 1
                self._remove(name, status.st_size)
        return found

    def _remove(self, name: BlockName, size: int) -> None:
        if self._faults.reason("a file was not removed", partial(self._files.remove, name)):
            self.stuck += max(1, -(-size // self._file_bytes))

    def _replay(self, uses: Sequence[Use], policy: CachingPolicy) -> None:
        """Tell the policy of the prompts in the order in which they came. Where they share so much that this would take
        long, it hears of the first ones only that there was a prompt, and of the blocks that are theirs alone."""
        told = accumulate(use.blocks for use in uses)
        whole = sum(blocks <= REPLAYED * len(self.there) for blocks in told)
        for use in reversed(uses[whole:]):
            policy.asked((), 0)
            before = use.blocks - len(use.own)
            joint = [self.there[use.own[0]].parent] if before and use.own else []
            part = Part([*joint, *use.own], before - len(joint))
            policy.stored(part, range(len(joint), len(part)))
        for use in reversed(uses[:whole]):
            digests = self._chain(use)
            policy.asked(digests, policy.hits(digests))
            policy.stored(digests, [place for place, digest in enumerate(digests) if digest not in policy])

    def _chain(self, use: Use) -> list[bytes]:
        digests = [use.last]
        while len(digests) < use.blocks:
            digests.append(self.there[digests[-1]].parent)
        digests.reverse()
        return digests
