"""Copiers for CUDA, on side streams ordered by events: piece by piece in one call, or through a staging buffer."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from vllm import _custom_ops as ops

from kvpolicy_vllm.plugin.copiers.arena import host_arena, offsets_of, segments_in
from kvpolicy_vllm.plugin.copiers.base import Copier, Span
from kvpolicy_vllm.plugin.copiers.staging import Staging, part_of
from kvpolicy_vllm.plugin.messages import Job

URGENT_BYTES = 32 << 20
"""Bytes of device memory for blocks that the next step overwrites."""

Events = tuple[torch.cuda.Event, torch.cuda.Event, torch.cuda.Event]
"""Events of submission, start and end, on the device's clock."""


class CudaCopier(Copier):
    """Copies on one side stream per direction, so that a save never waits for earlier loads.

    A save waits for the compute stream. Blocks that the next step overwrites are gathered in a buffer on the compute
    stream, as many as fit, and the step waits for the others of them; it waits for no other block. A later step that
    overwrites blocks of an unfinished save waits for that save. A load waits for all saves, including its own, and for
    the compute stream, since the last readers of the blocks that it writes may still be in flight (see the
    `kv_producer` role).

    Pieces are copied by the engine's own batched copy: one driver call for any number of pieces.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        device = self.device_segments[0].device
        self._save_stream = torch.cuda.Stream(device=device)
        self._load_stream = torch.cuda.Stream(device=device)
        # Nothing is launched on this stream, so an event on it has the time at which it was recorded.
        self._idle_stream = torch.cuda.Stream(device=device)
        self._urgent = Staging(self.device_segments, self.arena, URGENT_BYTES)
        self._urgent_next = 0
        self._urgent_sent: list[tuple[int, int, torch.cuda.Event]] = []
        """Ranges of the buffer that were used, with the events of their content having left it."""
        self._saves: dict[int, Events] = {}
        self._loads: dict[int, Events] = {}
        # Pointer tables in host memory must outlive the copies that read them.
        self._tables: deque[tuple[torch.cuda.Event, tuple[torch.Tensor, ...]]] = deque()
        self._new_tables: tuple[torch.Tensor, ...] = ()
        self._device_base = np.array([s.data_ptr() for s in self.device_segments], dtype=np.int64)
        self._device_stride = np.array([s.stride(0) * s.element_size() for s in self.device_segments], dtype=np.int64)
        """Bytes from one block to the next, which may be more than those of a piece."""
        self._piece_bytes = np.array([s.shape[1] * s.element_size() for s in self.device_segments], dtype=np.int64)
        self._piece_offset = np.array(offsets_of(self.device_segments)[:-1], dtype=np.int64)

    def host_pool(self, slots: int) -> list[torch.Tensor]:
        self.arena = host_arena(slots, self.block_bytes) if self.shared is None else self.shared.arena
        if self.pinned:
            _page_lock(self, self.arena)
        return segments_in(self.arena, self.device_segments)

    def copy_out(self, job: Job, urgent: int) -> None:
        gathered = min(urgent, self._urgent.blocks)
        at = self._gather(part_of(job, 0, gathered)) if gathered else 0
        compute = torch.cuda.current_stream()
        try:
            self._saves[job.copy_id] = self._on(
                self._save_stream, lambda: self._save_parts(job, gathered, at, urgent, compute)
            )
        except RuntimeError:
            self._save_stream.synchronize()  # the slots are free now: launched parts of the copy must have ended
            raise

    def finish_copies_out(self, copy_ids: Iterable[int]) -> None:
        for copy_id in copy_ids:
            torch.cuda.current_stream().wait_event(self._saves[copy_id][2])

    def _gather(self, job: Job) -> int:
        """Gather blocks in the next range of the buffer, on the compute stream, and return where it begins.

        The range's former content must have left it. It leaves behind the saves before it, so a range is used again as
        late as can be: with one for all, a third victim's step would wait for the whole save of the first.
        """
        count = len(job.slots)
        begin = self._urgent_next if self._urgent_next + count <= self._urgent.blocks else 0
        end = self._urgent_next = begin + count
        untouched = []
        for used in self._urgent_sent:
            if used[0] < end and begin < used[1]:
                torch.cuda.current_stream().wait_event(used[2])
            else:
                untouched.append(used)
        self._urgent_sent = untouched
        self._urgent.gather(job, begin)
        return begin

    def _save_parts(self, job: Job, gathered: int, at: int, urgent: int, compute: torch.cuda.Stream) -> None:
        """On the save stream: overwritten blocks that are not in the buffer, then those that are in it from ``at`` on,
        then the rest."""
        if urgent > gathered:
            self.move_out(part_of(job, gathered, urgent))
            compute.wait_event(_recorded())
        if gathered:
            self._urgent.send(part_of(job, 0, gathered), at)
            self._urgent_sent.append((at, at + gathered, _recorded()))
        if len(job.slots) > urgent:
            self.move_out(part_of(job, urgent, len(job.slots)))

    def save_span(self, job: Job, called_s: float) -> Span | None:
        if not self._saves[job.copy_id][2].query():
            return None
        return _span(self._saves.pop(job.copy_id))

    def copy_in(self, job: Job) -> None:
        self._load_stream.wait_stream(self._save_stream)
        try:
            self._loads[job.copy_id] = self._on(self._load_stream, lambda: self.move_in(job))
        except RuntimeError:
            self._load_stream.synchronize()  # the blocks are reused now: launched parts of the copy must have ended
            raise

    def copied_in(self, job: Job) -> bool:
        try:
            return bool(self._loads[job.copy_id][2].query())
        except RuntimeError:
            del self._loads[job.copy_id]
            raise

    def load_span(self, job: Job) -> Span | None:
        return _span(self._loads.pop(job.copy_id))

    def drain(self) -> None:
        self._save_stream.synchronize()
        self._load_stream.synchronize()

    def move_out(self, job: Job) -> None:
        """Device blocks to host slots, on the current stream."""
        device, host = self._pointers(job)
        self._move(device, host)

    def move_in(self, job: Job) -> None:
        """Host slots to device blocks, on the current stream."""
        device, host = self._pointers(job)
        self._move(host, device)

    def _on(self, stream: torch.cuda.Stream, move: Callable[[], None]) -> Events:
        submitted, started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        with torch.cuda.stream(self._idle_stream):
            submitted.record()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            started.record()
            move()
            ended.record()
        self._tables.append((ended, self._new_tables))
        self._new_tables = ()
        while len(self._tables) > 1 and self._tables[0][0].query():
            self._tables.popleft()
        return submitted, started, ended

    def _pointers(self, job: Job) -> tuple[np.ndarray, np.ndarray]:
        blocks, slots = np.asarray(job.block_ids, dtype=np.int64), np.asarray(job.slots, dtype=np.int64)
        device = (self._device_base[:, None] + blocks * self._device_stride[:, None]).ravel()
        host = (self.arena.data_ptr() + self._piece_offset[:, None] + slots * self.block_bytes).ravel()
        return device, host

    def _move(self, source: np.ndarray, target: np.ndarray) -> None:
        sizes = np.repeat(self._piece_bytes, len(source) // len(self._piece_bytes))
        tables = tuple(torch.from_numpy(table) for table in (source, target, sizes))
        self._new_tables += tables
        ops.swap_blocks_batch(*tables)


class StagedCudaCopier(CudaCopier):
    """Gathers blocks on the device first, so that one piece per block crosses the link, and adjacent slots together.

    Needs two buffers of device memory and one launch per layer. Used for pageable host memory, since the batched copy
    is defined only for page-locked memory.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._outward = Staging(self.device_segments, self.arena)
        self._inward = Staging(self.device_segments, self.arena)

    def move_out(self, job: Job) -> None:
        self._outward.out(job)

    def move_in(self, job: Job) -> None:
        self._inward.back(job)


def _recorded() -> torch.cuda.Event:
    """An event on the current stream after all that was launched there."""
    event = torch.cuda.Event()
    event.record()
    return event


def _span(events: Events) -> Span:
    submitted, started, ended = events
    return float(submitted.elapsed_time(started)) / 1e3, float(submitted.elapsed_time(ended)) / 1e3


def _page_lock(owner: object, memory: torch.Tensor) -> None:
    """Page-lock ``memory`` until ``owner`` is gone. Raises RuntimeError where the driver refuses.

    The memory is locked after allocation, since torch rounds its own page-locked allocations up to a power of two.
    """
    runtime = torch.cuda.cudart()
    status = runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0).value
    if status != 0:
        raise RuntimeError(
            f"{memory.nbytes} bytes of the host pool could not be page-locked (CUDA error {status}); "
            'give less host_gib, or "pin_memory": false'
        )
    weakref.finalize(owner, runtime.cudaHostUnregister, memory.data_ptr()).atexit = False
