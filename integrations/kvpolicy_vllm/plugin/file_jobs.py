"""Stores and loads of files that some rank has not reported, as the scheduler knows them; for its index of files."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvpolicy.host_store import HostBlock, HostCopy
from kvpolicy.tiers import Took
from kvpolicy_vllm.plugin.messages import FileReport


@dataclass(slots=True, eq=False)
class Under:
    """A store or a load that some rank has not reported. Its copy keeps the slots. ``began_s``: on the clock of the
    index."""

    copy: HostCopy
    keys: tuple[bytes, ...]
    """As the workers know them."""
    blocks: list[HostBlock]
    began_s: float
    chain: tuple[bytes, ...] = ()
    """Of a load: keys in host memory of all blocks up to its last one."""
    reports: int = 0
    failed: set[bytes] = field(default_factory=set)
    refused: set[bytes] = field(default_factory=set)
    gone: set[bytes] = field(default_factory=set)
    """Digests of its blocks that some rank, as it has said since this began, has no more."""
    stale: bool = False
    """Whether there was a reset since it began."""
    number: int = 0
    """As the workers know it."""
    began_step: int = 0
    took: list[Took | None] = field(default_factory=list)
    """What each rank has said."""
    behind: tuple[Sequence[bytes], int] = ((), 0)
    """Of a load: keys that somebody needs behind its last block, and how many of them files were found to have."""

    def reported(self, report: FileReport) -> None:
        """What one rank says of it."""
        self.failed.update(report.failed)
        self.refused.update(report.refused)
        self.took.append(report.took)
        self.reports += 1

    def slowest(self) -> Took | None:
        """What the slowest rank took; None where some rank has not said it."""
        known = [took for took in self.took if took is not None]
        return Took(*map(max, zip(*known, strict=True))) if known and len(known) == len(self.took) else None

    def ahead(self, keys: Sequence[bytes], lookup: Callable[[Sequence[bytes]], int]) -> tuple[int, int]:
        """Of these keys, which follow each other from one of the load on: how many leading ones it brings, and how many
        after those files have. Many requests ask that go on alike, so that each looks up but what is its own.
        ``lookup``: of keys, how many leading ones files have."""
        brought = self.chain[self.chain.index(keys[0]) :]
        coming = alike(keys, brought)
        rest = keys[coming:]
        if coming < len(brought):
            return coming, lookup(rest)
        known, there = self.behind
        same = alike(rest, known)
        if same <= there:
            there = same + lookup(rest[same:])
        self.behind = rest, there
        return coming, there


def alike(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    """How many leading keys are the same, where each stands for all that is before it, too."""
    shorter = min(len(one), len(other))
    return bisect_left(range(shorter), True, key=lambda place: one[place] != other[place])
