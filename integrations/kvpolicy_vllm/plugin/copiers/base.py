"""Base class of copiers, which move KV blocks between the device and the host pool on the worker side.

A KV cache tensor may have blocks outermost, or keys and values apart. `segments_of` finds the contiguous pieces of a
block from the strides, so that nothing here depends on an attention backend's layout.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from kvpolicy.errors import KVPolicyError
from kvpolicy.hardware.link import SimulatedLink
from kvpolicy_vllm.plugin.messages import Direction, Job, Transfer

IDLE_NAP_S = 0.001
"""Seconds that an engine with nothing to compute waits for a load before it polls again."""

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
class Leftover:
    """Unreported transfers and failed loads of a copier that is given up."""

    transfers: list[Transfer]
    failed_loads: list[Job]


class Copier(ABC):
    """Executes jobs in order.

    After ``save`` returns, work that the engine launches next may overwrite the source blocks. Loads are begun by
    ``load``, and ``poll`` reports each of them once. Subclasses implement the copies; times, validity and the simulated
    link are handled here.
    """

    def __init__(
        self,
        device_segments: list[torch.Tensor],
        slots: int,
        pin_memory: bool,
        link: SimulatedLink | None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
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
        self._valid: set[int] = set()
        self._loading: deque[tuple[Job, float, float, float, int]] = deque()
        self._saving: deque[tuple[Job, float, float, float]] = deque()
        self._failed_loads: list[Job] = []

    def host_pool(self, slots: int) -> list[torch.Tensor]:
        """Allocate the host pool: a tensor of shape (slots, elements) for each segment."""
        return [torch.empty((slots, segment.shape[1]), dtype=segment.dtype) for segment in self.device_segments]

    @abstractmethod
    def copy_out(self, job: Job) -> None:
        """Copy device blocks to host slots, ordered before all work that the engine launches next."""

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

    def save(self, job: Job) -> None:
        """Save the job's blocks. A failed copy is recorded, and loading it fails later."""
        submit = self._clock()
        try:
            self.copy_out(job)
        except RuntimeError as error:
            self._record(job, "save", False, submit, submit, self._clock(), 0, str(error))
            return
        start, end = self._promise("save", len(job.slots), submit)
        if self._link is not None:
            self._sleep(max(0.0, end - self._clock()))
        self._valid.add(job.copy_id)
        self._saving.append((job, submit, start, self._clock() - start))
        self._record_saved()

    def _record_saved(self) -> None:
        while self._saving:
            job, submit, start, called_s = self._saving[0]
            span = self.save_span(job, called_s)
            if span is None:
                return
            self._record(job, "save", True, submit, start + span[0], start + span[1], 0)
            self._saving.popleft()

    def load(self, job: Job) -> None:
        """Begin to load a copy. A copy that was never saved fails at once."""
        submit = self._clock()
        queued = sum(len(waiting[0].slots) for waiting in self._loading) * self.block_bytes
        try:
            if job.copy_id not in self._valid:
                raise CopyError("there is no whole copy to load")
            self.copy_in(job)
        except RuntimeError as error:
            self._failed_loads.append(job)
            self._record(job, "load", False, submit, submit, self._clock(), queued, str(error))
            return
        start, end = self._promise("load", len(job.slots), submit)
        self._loading.append((job, submit, start, end, queued))

    def drop(self, copy_ids: Iterable[int]) -> None:
        self._valid.difference_update(copy_ids)

    def copies_on(self, device_segments: list[torch.Tensor]) -> bool:
        """Whether these are the same pieces of memory that this copier copies from and to."""

        def layouts(segments: list[torch.Tensor]) -> list[tuple[int, torch.Size, torch.dtype]]:
            return [(segment.data_ptr(), segment.shape, segment.dtype) for segment in segments]

        return layouts(self.device_segments) == layouts(device_segments)

    def give_up(self) -> Leftover:
        """End all copies under way as failed, as when the device's memory is replaced. Waits for the device."""
        self.drain()
        reason, now = "the KV cache was registered anew", self._clock()
        for job, submit, start, _ in self._saving:
            self._record(job, "save", False, submit, start, now, 0, reason)
        for job, submit, start, _, queued in self._loading:
            self._record(job, "load", False, submit, min(start, now), now, queued, reason)
        return Leftover(self.transfers, self._failed_loads + [waiting[0] for waiting in self._loading])

    def take_over(self, leftover: Leftover) -> None:
        """Report what an earlier copier had not reported. Its copies are not taken over: loading them fails."""
        self.transfers += leftover.transfers
        self._failed_loads += leftover.failed_loads

    def poll(self, idle: bool = False) -> list[Finished]:
        """Loads that ended since the last call, each once. ``idle``: wait a moment, as there is no other work."""
        self._record_saved()
        finished = [Finished(job, False) for job in self._failed_loads]
        self._failed_loads = []
        if idle and self._loading and not finished:
            self._sleep(min(IDLE_NAP_S, max(0.0, self._loading[0][3] - self._clock())))
        while self._loading:
            job, submit, start, end, queued = self._loading[0]
            try:
                if self._clock() < end or not self.copied_in(job):
                    break
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
        pieces = len(self.device_segments)
        self.transfers.append(
            Transfer(
                job.copy_id, direction, ok, len(job.slots) * self.block_bytes, len(job.slots) * pieces,
                self.segment_bytes, self.pinned, queued, submit, start, end, error,
            )
        )  # fmt: skip
