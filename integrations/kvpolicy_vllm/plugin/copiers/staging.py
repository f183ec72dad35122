"""Gathers blocks on the device, so that one piece per block crosses the link instead of one per layer.

Plain torch, for any device; the caller orders the streams.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from kvpolicy_vllm.plugin.copiers.arena import host_arena, offsets_of, segments_in
from kvpolicy_vllm.plugin.copiers.base import Copier
from kvpolicy_vllm.plugin.messages import Job

STAGED_BYTES = 64 << 20
"""Bytes of device memory per direction. Larger copies are split into parts."""


def runs_of(slots: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(position, first slot, count) of every run of consecutive slots."""
    begin = 0
    for end in range(1, len(slots) + 1):
        if end == len(slots) or slots[end] != slots[end - 1] + 1:
            yield begin, slots[begin], end - begin
            begin = end


def part_of(job: Job, begin: int, end: int) -> Job:
    """The job for its blocks ``begin`` to ``end``."""
    return replace(job, block_ids=job.block_ids[begin:end], slots=job.slots[begin:end])


class Staging:
    """Device buffer of one direction, and the copies through it. All work is ordered on the current stream."""

    def __init__(self, segments: Sequence[torch.Tensor], arena: torch.Tensor, max_bytes: int = STAGED_BYTES) -> None:
        widest = torch.int64 if all(s.shape[1] * s.element_size() % 8 == 0 for s in segments) else torch.uint8
        self._segments = [segment.view(widest) for segment in segments]
        self._arena = arena.view(widest)
        self._edges = [edge // widest.itemsize for edge in offsets_of(self._segments)]
        self.blocks = max(1, min(max_bytes // arena.shape[1], arena.shape[0]))
        """Number of blocks that the buffer holds."""
        self._buffer = torch.empty((self.blocks, self._edges[-1]), dtype=widest, device=segments[0].device)

    def out(self, job: Job) -> None:
        """Copy device blocks to host slots."""
        for begin in range(0, len(job.slots), self.blocks):
            part = part_of(job, begin, begin + self.blocks)
            self.gather(part)
            self.send(part)

    def gather(self, job: Job, at: int = 0) -> None:
        """Copy device blocks, at most as many as fit, to the buffer from block ``at`` of it on."""
        (blocks, slots) = next(self._parts(job))
        for number, segment in enumerate(self._segments):
            piece = self._buffer[at : at + len(slots), self._edges[number] : self._edges[number + 1]]
            torch.index_select(segment, 0, blocks, out=piece)

    def send(self, job: Job, at: int = 0) -> None:
        """Copy the buffer, which holds the job's blocks from its block ``at`` on, to host slots."""
        buffer = self._buffer[at:]
        for position, first, count in runs_of(job.slots):
            self._arena[first : first + count].copy_(buffer[position : position + count], non_blocking=True)

    def back(self, job: Job) -> None:
        """Copy host slots to device blocks."""
        for blocks, slots in self._parts(job):
            for position, first, count in runs_of(slots):
                self._buffer[position : position + count].copy_(self._arena[first : first + count], non_blocking=True)
            for number, segment in enumerate(self._segments):
                piece = self._buffer[: len(slots), self._edges[number] : self._edges[number + 1]]
                segment.index_copy_(0, blocks, piece)

    def _parts(self, job: Job) -> Iterator[tuple[torch.Tensor, tuple[int, ...]]]:
        ids = torch.tensor(job.block_ids)
        if self._buffer.device.type != "cpu":
            # With pageable memory the call would wait for all pending work of the stream.
            ids = ids.pin_memory().to(self._buffer.device, non_blocking=True)
        for begin in range(0, len(job.slots), self.blocks):
            yield ids[begin : begin + self.blocks], job.slots[begin : begin + self.blocks]


class StagedCopier(Copier):
    """Copies synchronously through staging, on devices that use the host's memory. Serves tests."""

    def host_pool(self, slots: int) -> list[torch.Tensor]:
        self.arena = host_arena(slots, self.block_bytes)
        self.staging = Staging(self.device_segments, self.arena)
        return segments_in(self.arena, self.device_segments)

    def copy_out(self, job: Job, urgent: int) -> None:
        self.staging.out(job)

    def copy_in(self, job: Job) -> None:
        self.staging.back(job)
