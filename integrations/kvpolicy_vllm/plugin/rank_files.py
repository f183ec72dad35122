"""A rank's files of KV on the worker side: executes the scheduler's jobs from and to host slots, in the background."""

from __future__ import annotations

import logging
import time
from collections import deque
from operator import sub

import numpy as np
import torch
from numpy.typing import NDArray

from kvpolicy.caching import Part
from kvpolicy.cost.block_price import interpolated
from kvpolicy.tiers import HINT_COUNTS, MAX_HANG_S, LastingTier, Pieces, digest_of_key
from kvpolicy_vllm.plugin.copiers.base import IDLE_NAP_S, Copier
from kvpolicy_vllm.plugin.messages import FileJob, FileReport, StepJobs

logger = logging.getLogger(f"vllm.{__name__}")

FOUND_AT_ONCE = 20_000
"""Digests of blocks of an earlier server that one report has, at most: reports go through vLLM's own messages."""


class RankFiles:
    """The files of one rank. A job names blocks and host slots; every job is reported once, whatever happens to it.

    ``failures``: methods of the tier's caching policy that failed; they are reported, and removed from it. ``hang_s``:
    how long a medium that hangs is waited for. ``counts_hints``: whether it reports what became of hints.
    """

    def __init__(
        self,
        tier: LastingTier,
        copier: Copier,
        failures: list[str] | None = None,
        hang_s: float = MAX_HANG_S,
        counts_hints: bool = False,
    ) -> None:
        self._tier, self._copier, self._hang_s = tier, copier, hang_s
        self._failures = [] if failures is None else failures
        self._memory = host_rows(copier)
        self._reports: list[FileReport] = []
        self._open: dict[int, tuple[FileJob, set[bytes], tuple[bytes, ...]]] = {}
        """Jobs under way, by number, with the digests of blocks that have failed already, and of those refused."""
        self._last: StepJobs | None = None
        self._stale: set[int] = set()
        """Numbers of loads into memory that is not used any more."""
        self._waiting: list[FileJob] = []
        """Loads into slots that the copier is still writing to, for contents that have left them since."""
        found = tier.digests()
        self._found = deque([found[at : at + FOUND_AT_ONCE] for at in range(0, len(found), FOUND_AT_ONCE)] or [[]])
        """What an earlier server left and is not reported yet."""
        self._gone: set[bytes] = set()
        """What has left files before all of that was reported."""
        self._left: list[bytes] = []
        """What has left files since reports were taken, as was seen when others were dropped."""
        self._counts_hints = counts_hints
        self._hints_came = False
        """Whether there were hints since the last reports."""
        self._hinted = (0,) * len(HINT_COUNTS)
        """What became of hints, as far as it is reported."""

    def let_go(self) -> None:
        """Use no host slots until :meth:`copy_with`, so that their memory can be freed before there is other. Waits for
        what is under way; loads fail. Where the medium hangs for longer, what is under way goes on with the old memory,
        to which the tier refers until it has ended."""
        self._begin_loads(anyway=True)
        if not self._tier.wait_idle(self._hang_s):
            logger.warning("kvpolicy: files hang; host memory that was replaced stays until they go on")
        self._stale |= {number for number, (job, _, _) in self._open.items() if not job.chain}
        del self._copier, self._memory

    def copy_with(self, copier: Copier) -> None:
        """Use the host slots of another copier from now on."""
        self._copier, self._memory = copier, host_rows(copier)

    def begin(self, jobs: StepJobs) -> None:
        """Begin a step's jobs, once, however often they are given, and loads that had to wait."""
        if jobs is not self._last:
            self._last = jobs
            if jobs.file_prices:
                self._tier.reprice(interpolated(jobs.file_prices))
            if jobs.forget_hints:
                self._tier.forget_hints()
            for event in jobs.file_events:
                if event.hints is None:
                    self._tier.asked(event.keys)
                else:
                    self._tier.hinted(event.keys, event.hints, event.client, event.request, event.over)
                    self._hints_came = self._counts_hints
            if jobs.file_drops:
                self._drop(frozenset(jobs.file_drops))
            for job in jobs.file_stores:
                self._store(job)
            for job in jobs.file_loads:
                self._open[job.number] = job, set(), ()
                self._waiting.append(job)
        if self._waiting:
            self._begin_loads()

    def nap(self) -> None:
        """Wait a moment for what is under way: nothing else is to be done in this step."""
        if self._open:
            time.sleep(IDLE_NAP_S)

    def _begin_loads(self, anyway: bool = False) -> None:
        """Begin the loads whose slots no save is being written to. ``anyway``: all, as their memory is not used any
        more."""
        waiting, self._waiting = self._waiting, []
        busy = set() if anyway else self._copier.slots_being_saved()
        for job in waiting:
            if busy.isdisjoint(job.slots):
                self._tier.load(job.number, [*zip(job.keys, map(self._pieces, job.slots), strict=True)])
            else:
                self._waiting.append(job)

    def _drop(self, digests: frozenset[bytes]) -> None:
        """The scheduler knows already that these are not there."""
        drop = getattr(self._tier, "drop_digests", None)  # tiers of one's own may be older
        if drop is not None:
            drop(digests)
            self._gone.update(digests if self._found else ())
            self._left += [digest for digest in self._tier.take_gone() if digest not in digests]

    def _store(self, job: FileJob) -> None:
        first = job.chain.index(job.keys[0])
        wanted = {first + place: self._pieces(slot) for place, slot in enumerate(job.slots) if self._copier.holds(slot)}
        lacking = [index for index, key in enumerate(job.chain) if index >= first and not self._tier.lookup([key])]
        taken = self._tier.store(job.number, Part(job.chain, job.first), wanted)
        left_out = [index for index in lacking if index not in taken]
        refused = tuple(digest_of_key(job.chain[index]) for index in left_out)
        if taken:
            self._open[job.number] = job, set(), refused
        else:
            self._reports.append(FileReport(job.number, refused=refused))

    def _pieces(self, slot: int) -> Pieces:
        return [rows[slot] for rows in self._memory]

    def reports(self) -> list[FileReport]:
        """What has happened since the last call."""
        for finished in self._tier.finished():
            job, failed, refused = self._open.pop(finished.job)
            failed.update(map(digest_of_key, finished.failed))
            if finished.job in self._stale:
                self._stale.discard(finished.job)
                failed.update(map(digest_of_key, job.keys))
            if finished.kind == "load":
                pairs = zip(job.keys, job.slots, strict=True)
                self._copier.filled(slot for key, slot in pairs if digest_of_key(key) not in failed)
            moved = len(finished.done)
            self._reports.append(FileReport(finished.job, tuple(failed), refused, moved, finished.took))
        gone, self._left = self._left + self._tier.take_gone(), []
        reports, self._reports = self._reports, []
        if self._found:
            self._gone.update(gone)
            found = tuple(digest for digest in self._found.popleft() if digest not in self._gone)
            reports.append(FileReport(found=found, ready=not self._found))
        if gone:
            reports.append(FileReport(gone=tuple(gone)))
        if self._hints_came:
            self._hints_came = False
            counts, before = self._tier.usage().counts, self._hinted
            self._hinted = tuple(counts.get(name, 0) for name in HINT_COUNTS)
            if self._hinted != before:
                reports.append(FileReport(hinted=tuple(map(sub, self._hinted, before))))
        while self._failures:
            reports.append(FileReport(policy_failed=self._failures.pop(0)))
        return reports

    def close(self) -> None:
        self._tier.close(self._hang_s)


def host_rows(copier: Copier) -> list[NDArray[np.uint8]]:
    """The host slots as bytes: arrays of shape (slots, bytes) that together hold a block each row."""
    arena = getattr(copier, "arena", None)
    tensors = copier.host_segments if arena is None else [arena]
    return [tensor.view(torch.uint8).numpy() for tensor in tensors]
