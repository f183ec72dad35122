"""Host memory that all ranks of an engine map, for KV that is the same on every one of them, as MLA's is.

One rank saves; all load what it saved. A rank that does not save goes by the numbers of the saves that have ended,
which stand beside the blocks. It may be asked to load before the scheduler knows that the save has ended, so no message
lies between the two: these numbers alone say that the blocks are there. Some CPUs (aarch64) let another core see a
number before the blocks that were written earlier. So the saver writes a number, and the others read it, under a lock
of the kernel's on the memory: what was done before it is released is seen by whoever takes it next.

A slot is saved to anew only after every rank has reported the end of its loads from there to the scheduler, and the
scheduler has sent the new save: messages order these two.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from kvpolicy_vllm.plugin.copiers.arena import guarded, segments_in

SAVER = 0
"""The rank that saves."""


class SharedPool:
    """A pool of ``slots`` blocks, the same memory in every rank's process.

    ``tell_all``: gives every rank what the saver passes, and returns when all have it. Every rank makes its own pool at
    the same time, as ``tell_all`` waits for the others. Raises OSError where a rank cannot map the saver's memory.
    """

    def __init__(self, slots: int, block_bytes: int, rank: int, tell_all: Callable[[Any], Any]) -> None:
        self.saves_here = rank == SAVER
        pool_bytes = -(-slots * block_bytes // mmap.PAGESIZE) * mmap.PAGESIZE  # whole pages are locked
        total_bytes = pool_bytes + slots * torch.int64.itemsize
        opened = self._create(total_bytes) if self.saves_here else None
        path = tell_all(None if opened is None else f"/proc/{os.getpid()}/fd/{opened}")
        # Every rank opens the memory for itself: a lock excludes those who have opened it elsewhere.
        self._memory = os.open(path, os.O_RDWR) if opened is None else opened
        weakref.finalize(self, os.close, self._memory)
        mapped = guarded(mmap.mmap(self._memory, total_bytes), touch=self.saves_here)
        tell_all(None)  # the path leads there as long as the saver has its pool, which it now may give up
        self.arena = torch.frombuffer(mapped, dtype=torch.uint8, count=slots * block_bytes).view(slots, block_bytes)
        self._ended = torch.frombuffer(mapped, dtype=torch.int64, count=slots, offset=pool_bytes)
        """By slot, number of the last save that ended there; negative where it failed, 0 where none ended."""

    @contextmanager
    def _locked(self, how: int) -> Iterator[None]:
        fcntl.flock(self._memory, how)
        try:
            yield
        finally:
            fcntl.flock(self._memory, fcntl.LOCK_UN)

    @staticmethod
    def _create(total_bytes: int) -> int:
        memory = os.memfd_create("kvpolicy-pool")
        os.ftruncate(memory, total_bytes)
        return memory

    def segments_in(self, segments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Views of the pool by segment, each of shape (slots, elements) and of its segment's type."""
        return segments_in(self.arena, segments)

    def ended(self, slots: Sequence[int], number: int, ok: bool) -> None:
        """The save with this number has ended; for the rank that saves."""
        with self._locked(fcntl.LOCK_EX):
            self._ended[list(slots)] = number if ok else -number

    def has(self, slots: Sequence[int], saved_by: Mapping[int, int]) -> bool | None:
        """Whether all these slots hold what the saves with the numbers ``saved_by`` bring, by slot; None while one of
        these saves goes on, False where one has failed or a slot has none."""
        if not all(slot in saved_by for slot in slots):
            return False
        wanted = torch.tensor([saved_by[slot] for slot in slots])
        with self._locked(fcntl.LOCK_SH):
            ended = self._ended[list(slots)]
        if bool((ended == -wanted).any()):
            return False
        return True if bool((ended == wanted).all()) else None
