"""Base class of copiers, which move KV blocks between the device and the host pool on the worker side.

A KV cache tensor may have blocks outermost, or keys and values apart. `segments_of` finds the contiguous pieces of a
block from the strides, so that nothing here depends on an attention backend's layout.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from kvpolicy.errors import KVPolicyError
from kvpolicy.hardware.link import SimulatedLink
from kvpolicy_vllm.plugin.copiers.arena import host_arena
from kvpolicy_vllm.plugin.messages import Direction, Job, Transfer

if TYPE_CHECKING:
    from kvpolicy_vllm.plugin.copiers.pool_of_ranks import SharedPool

IDLE_NAP_S = 0.001
"""Seconds that an engine with nothing to compute waits for a copy before it polls again."""

Span = tuple[float, float]
"""Start and end of a copy, seconds after it was submitted."""


class CopyError(KVPolicyError, RuntimeError):
    """A copy that failed. Its request is recomputed."""


def segments_of(tensor: torch.Tensor, blocks: int) -> list[torch.Tensor]:
    """Views of shape (blocks, elements), one per contiguous piece that a block has in ``tensor``.

    Raises ValueError where no dimension can be that of the blocks.
    """
    sizes, strides = list(tensor.shape), list(tensor.stride())
    per_block = tensor.numel() // blocks
    for dim in range(tensor.ndim):
        if sizes[dim] != blocks or blocks * strides[dim] > tensor.numel():
            continue
        outer = [d for d in range(tensor.ndim) if d != dim and strides[d] > strides[dim]]
        pieces = 1
        for d in outer:
            pieces *= sizes[d]
        if strides[dim] * pieces != per_block:
            continue
        offsets = [0]
        for d in outer:
            offsets = [offset + i * strides[d] for offset in offsets for i in range(sizes[d])]
        return [
            torch.as_strided(tensor, (blocks, strides[dim]), (strides[dim], 1), tensor.storage_offset() + offset)
            for offset in offsets
        ]
    raise ValueError(f"KV cache tensor of shape {tuple(sizes)} and strides {tuple(strides)} has no {blocks} blocks")


def unique_segments(kv_caches: dict[str, torch.Tensor], blocks: int) -> list[torch.Tensor]:
    """Segments of all layers; layers that share a tensor are counted once."""
    by_address: dict[int, torch.Tensor] = {}
    for tensor in kv_caches.values():
        for segment in segments_of(tensor, blocks):
            by_address.setdefault(segment.data_ptr(), segment)
    return list(by_address.values())


@dataclass(frozen=True, slots=True)
class Finished:
    """A load that has ended, successfully or not."""

    job: Job
    ok: bool


@dataclass(frozen=True, slots=True)
class _Saving:
    """A save that was begun and is not reported yet."""

    job: Job
    submit_s: float
    start_s: float
    end_s: float
    """On the simulated link; without one both are the time of submission."""
    called_s: float
    """Duration of the call that began the copy."""
    queued_bytes: int
    """Bytes of saves that were under way before it."""
    unordered: set[int]
    """Device blocks whose reads are not ordered before the engine's next work."""


@dataclass(frozen=True, slots=True)
class Leftover:
    """Unreported transfers and failed loads of a copier that is given up."""

    transfers: list[Transfer]
    failed_loads: list[Job]


def _overwritten_first(job: Job, overwritten: Set[int]) -> tuple[Job, int]:
    """The job with the blocks that may be overwritten in front, and their number."""
    if overwritten.isdisjoint(job.block_ids):
        return job, 0
    pairs = sorted(zip(job.block_ids, job.slots, strict=True), key=lambda pair: pair[0] not in overwritten)
    blocks, slots = zip(*pairs, strict=True)
    return replace(job, block_ids=blocks, slots=slots), sum(block in overwritten for block in blocks)


class Copier(ABC):
    """Executes jobs in order.

    ``save`` and ``load`` begin copies, which run beside the engine's steps; ``poll`` reports each load once. Of a
    save's blocks, work that the engine launches next, or later, may overwrite those that ``save`` or a later ``finish``
    is given. Subclasses implement the copies; times, validity and the simulated link are handled here. ``shared``: the
    host pool, where every rank has the same KV and one of them saves it for all.
    """

    def __init__(
        self,
        device_segments: list[torch.Tensor],
        slots: int,
        pin_memory: bool,
        link: SimulatedLink | None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        shared: SharedPool | None = None,
    ) -> None:
        self.shared = shared
        self.device_segments = device_segments
        self.pinned = pin_memory and device_segments[0].device.type != "cpu"
        self.block_bytes = sum(segment.shape[1] * segment.element_size() for segment in device_segments)
        self.host_segments = self.host_pool(slots)
        self.segment_bytes = device_segments[0].shape[1] * device_segments[0].element_size()
        self.transfers: list[Transfer] = []
        self._link = link
        self._link_free_s: dict[Direction, float] = {"save": 0.0, "load": 0.0}
        self._clock = clock
        self._sleep = sleep
        self._saved_s: dict[int, float] = {}
        """By host slot that holds a whole block: when its save ends on the simulated link."""
        self._loading: deque[tuple[Job, float, float, float, int]] = deque()
        self._saving: deque[_Saving] = deque()
        self._failed_loads: list[Job] = []
        self._saved_by: dict[int, int] = {}
        """By slot of a shared pool, number of the save that another rank was last given for it."""
        self._awaiting: list[Job] = []
        """Loads that wait for another rank's saves."""

    def host_pool(self, slots: int) -> list[torch.Tensor]:
        """Allocate the host pool: a tensor of shape (slots, elements) for each segment."""
        if self.shared is not None:
            return self.shared.segments_in(self.device_segments)
        sizes = [segment.shape[1] * segment.element_size() for segment in self.device_segments]
        arenas = [host_arena(slots, size) for size in sizes]
        return [arena.view(segment.dtype) for arena, segment in zip(arenas, self.device_segments, strict=True)]

    @abstractmethod
    def copy_out(self, job: Job, urgent: int) -> None:
        """Copy device blocks to host slots.

        The first ``urgent`` blocks are read before all work that the engine launches next, the others perhaps later.
        """

    def finish_copies_out(self, copy_ids: Iterable[int]) -> None:  # noqa: B027  # nothing where copies are synchronous
        """Order the reads of these unfinished copies before all work that the engine launches next."""

    @abstractmethod
    def copy_in(self, job: Job) -> None:
        """Copy host slots to device blocks, ordered after every step launched before."""

    def drain(self) -> None:  # noqa: B027  # nothing to wait for where copies are synchronous
        """Wait for all copies that were begun."""

    def save_span(self, job: Job, called_s: float) -> Span | None:
        """Span of the job's ``copy_out``; None while it still runs. ``called_s``: duration of the call."""
        return 0.0, called_s

    def load_span(self, job: Job) -> Span | None:
        """Span of the job's ``copy_in``, which has ended; None stands for the time from the call to the poll that saw
        the end."""
        return None

    def copied_in(self, job: Job) -> bool:
        """Whether the job's ``copy_in`` has ended. Raises RuntimeError where it failed."""
        return True

    def finish(self, overwritten: Set[int]) -> None:
        """Have unfinished saves of these device blocks read them before all work that the engine launches next."""
        late = [saving for saving in self._saving if not overwritten.isdisjoint(saving.unordered)]
        if late:
            self.finish_copies_out([saving.job.copy_id for saving in late])
        for saving in late:
            saving.unordered.clear()

    def save(self, job: Job, overwritten: Set[int] = frozenset()) -> None:
        """Begin to save the job's blocks. ``overwritten``: device blocks that the engine's next work may write to.

        A failed copy is recorded, and loading it fails later.
        """
        submit = self._clock()
        if self.shared is not None and not self.shared.saves_here:
            self._leave_to_another(job, submit)
            return
        queued = sum(len(saving.job.slots) for saving in self._saving) * self.block_bytes
        job, urgent = _overwritten_first(job, overwritten)
        try:
            self.copy_out(job, urgent)
        except (RuntimeError, IndexError) as error:
            for slot in job.slots:
                self._saved_s.pop(slot, None)
            self._record(job, "save", False, submit, submit, self._clock(), queued, str(error))
            return
        called_s = self._clock() - submit
        start, end = self._promise("save", len(job.slots), submit)
        self._saved_s.update(dict.fromkeys(job.slots, end))
        self._saving.append(_Saving(job, submit, start, end, called_s, queued, set(job.block_ids[urgent:])))
        self._record_saved()

    def _leave_to_another(self, job: Job, now: float) -> None:
        """Another rank saves the same for all: nothing is copied here."""
        for slot in job.slots:
            self._saved_s.pop(slot, None)
            self._saved_by[slot] = job.copy_id
        self._record(job, "save", True, now, now, now, 0)
        self.transfers[-1] = replace(self.transfers[-1], bytes=0, segments=0)

    def _record_saved(self) -> None:
        while self._saving:
            saving = self._saving[0]
            if self._clock() < saving.end_s:
                return
            span = self.save_span(saving.job, saving.called_s)
            if span is None:
                return
            copied_s = saving.submit_s + span[1]
            start, end = saving.submit_s + span[0], copied_s
            if self._link is not None:
                start, end = saving.start_s, max(saving.end_s, copied_s)
            self._record(saving.job, "save", True, saving.submit_s, start, end, saving.queued_bytes)
            self._saving.popleft()

    def load(self, job: Job) -> None:
        """Begin to load blocks. Where one of them was never saved, the load fails at once. Where another rank still
        saves one, the load begins at a later poll."""
        submit = self._clock()
        if self.shared is not None and not self.shared.saves_here:
            saved = self.shared.has(job.slots, self._saved_by)
            if saved is None:
                self._awaiting.append(job)
                return
            self._saved_s.update(dict.fromkeys(job.slots, submit) if saved else {})
        queued = sum(len(waiting[0].slots) for waiting in self._loading) * self.block_bytes
        try:
            saved_s = max(map(self._saved_until, job.slots))
            self.copy_in(job)
        except (RuntimeError, IndexError) as error:
            self._failed_loads.append(job)
            self._record(job, "load", False, submit, submit, self._clock(), queued, str(error))
            return
        start, end = self._promise("load", len(job.slots), max(submit, saved_s))
        self._loading.append((job, submit, start, end, queued))

    def _saved_until(self, slot: int) -> float:
        if slot not in self._saved_s:
            raise CopyError("a block to load was never saved whole")
        return self._saved_s[slot]

    def holds(self, slot: int) -> bool:
        """Whether the host slot holds a whole block, so that it may be read."""
        return slot in self._saved_s

    def slots_being_saved(self) -> set[int]:
        """Host slots that saves may still be written to."""
        return {slot for saving in self._saving for slot in saving.job.slots}

    def filled(self, slots: Iterable[int]) -> None:
        """These host slots hold whole blocks that come from elsewhere than the device, and can be loaded."""
        self._saved_s.update(dict.fromkeys(slots, self._clock()))

    def copies_on(self, device_segments: list[torch.Tensor]) -> bool:
        """Whether these are the same pieces of memory that this copier copies from and to."""

        def layouts(segments: list[torch.Tensor]) -> list[tuple[int, torch.Size, torch.dtype]]:
            return [(segment.data_ptr(), segment.shape, segment.dtype) for segment in segments]

        return layouts(self.device_segments) == layouts(device_segments)

    def give_up(self) -> Leftover:
        """End all copies under way as failed, as when the device's memory is replaced. Waits for the device."""
        self.drain()
        reason, now = "the KV cache was registered anew", self._clock()
        for saving in self._saving:
            start = min(saving.start_s, now)
            self._record(saving.job, "save", False, saving.submit_s, start, now, saving.queued_bytes, reason)
        for job, submit, start, _, queued in self._loading:
            self._record(job, "load", False, submit, min(start, now), now, queued, reason)
        for job in self._awaiting:
            self._record(job, "load", False, now, now, now, 0, reason)
        unfinished = [waiting[0] for waiting in self._loading] + self._awaiting
        return Leftover(self.transfers, self._failed_loads + unfinished)

    def take_over(self, leftover: Leftover) -> None:
        """Report what an earlier copier had not reported. Its copies are not taken over: loading them fails."""
        self.transfers += leftover.transfers
        self._failed_loads += leftover.failed_loads

    def poll(self, idle: bool = False) -> list[Finished]:
        """Loads that ended since the last call, each once. ``idle``: wait a moment, as there is no other work."""
        self._record_saved()
        awaiting, self._awaiting = self._awaiting, []
        for job in awaiting:
            self.load(job)
        finished = [Finished(job, False) for job in self._failed_loads]
        self._failed_loads = []
        if idle and self._loading and not finished:
            self._sleep(min(IDLE_NAP_S, max(0.0, self._loading[0][3] - self._clock())))
        while self._loading:
            job, submit, start, end, queued = self._loading[0]
            try:
                if self._clock() < end or not self.copied_in(job):
                    break
                self._record_saved()  # a load ends after its save, which may have ended since it was asked about
                now, span = self._clock(), self.load_span(job)
                if span is None or self._link is not None:
                    self._record(job, "load", True, submit, start, max(end, now), queued)
                else:  # the clocks of device and host differ slightly
                    end = min(now, submit + span[1])
                    self._record(job, "load", True, submit, min(end, submit + span[0]), end, queued)
                finished.append(Finished(job, True))
            except RuntimeError as error:
                self._record(job, "load", False, submit, start, self._clock(), queued, str(error))
                finished.append(Finished(job, False))
            self._loading.popleft()
        if idle and self._loading and not finished and self._loading[0][3] <= self._clock():
            self._sleep(IDLE_NAP_S)  # the end is unknown: only the device can tell
        elif idle and (self._saving or self._awaiting) and not self._loading and not finished:
            self._sleep(IDLE_NAP_S)
        return finished

    def _promise(self, direction: Direction, blocks: int, now: float) -> tuple[float, float]:
        """Start and end of a transfer on the simulated link, one at a time per direction; ``now`` without a link."""
        if self._link is None:
            return now, now
        start = max(now, self._link_free_s[direction])
        end = start + self._link.seconds(blocks * self.block_bytes)
        self._link_free_s[direction] = end
        return start, end

    def _record(
        self,
        job: Job,
        direction: Direction,
        ok: bool,
        submit: float,
        start: float,
        end: float,
        queued: int,
        error: str = "",
    ) -> None:
        if self.shared is not None and self.shared.saves_here and direction == "save":
            self.shared.ended(job.slots, job.copy_id, ok)
        pieces = len(self.device_segments)
        self.transfers.append(
            Transfer(
                job.copy_id, direction, ok, len(job.slots) * self.block_bytes, len(job.slots) * pieces,
                self.segment_bytes, self.pinned, queued, submit, start, end, error,
            )
        )  # fmt: skip
