"""The blocks that an earlier process left in a folder, taken up when a tier is opened."""

from __future__ import annotations

import stat
from collections import Counter

from kvpolicy.caching import CachingPolicy
from kvpolicy.tiers.block_files import OUTDATED_NS, BlockFiles
from kvpolicy.tiers.block_format import BlockName

NS = 1_000_000_000
"""Nanoseconds in a second. Uses less than that apart count as one."""


class FoundBlocks:
    """Those of a folder that there is room for. ``file_bytes``: size of a file. ``counts``: blocks by what happened to
    them."""

    def __init__(self, files: BlockFiles, file_bytes: int, counts: Counter[str]) -> None:
        self._files, self._file_bytes, self._counts = files, file_bytes, counts
        self.there: dict[bytes, BlockName] = {}
        """By digest of the key."""
        self.outdated: list[bytes] = []
        """Those that nobody will ask for again, since only the process that has stored them could."""

    def take_up(self, policy: CachingPolicy) -> None:
        """Those used last before others, as far as there is room; tell the policy of them. Others, and what is no
        whole file, are removed. Raises OSError where they cannot be."""
        found = self._whole()
        newest = sorted(found.values(), key=lambda entry: entry[1], reverse=True)
        for name, _ in newest[policy.capacity :]:
            self._files.remove(name)
        newest = newest[: policy.capacity]
        self.there = {name.key: name for name, _ in newest}
        self.outdated = [name.key for name, used_ns in newest if used_ns == OUTDATED_NS]
        self._counts["found"] = len(self.there)
        asked_ns: dict[bytes, int] = {}
        for name, used_ns in reversed(newest):
            if name.key not in asked_ns or used_ns >= asked_ns[name.key] + NS:
                asked_ns.update(dict.fromkeys(self._use(name, policy), used_ns))

    def _whole(self) -> dict[bytes, tuple[BlockName, int]]:
        """By digest of the key, blocks with the time of their last use."""
        found: dict[bytes, tuple[BlockName, int]] = {}
        for name, status in self._files.blocks():
            whole = stat.S_ISREG(status.st_mode) and status.st_size == self._file_bytes
            if whole and name.key not in found:
                found[name.key] = name, status.st_mtime_ns
            else:
                self._counts["found_damaged"] += 1
                self._files.remove(name)
        return found

    def _use(self, name: BlockName, policy: CachingPolicy) -> list[bytes]:
        """Tell the policy of a use of a block and of those before it; return their digests."""
        chain = {name.key: name}
        while (parent := self.there.get(name.parent)) is not None and parent.key not in chain:
            chain[parent.key] = name = parent
        digests = [*reversed(chain)]
        policy.asked(digests, policy.hits(digests))
        policy.stored(digests, [index for index, digest in enumerate(digests) if digest not in policy])
        return digests
