"""Copies on CUDA: the engine's own batched copy operation, on side streams ordered by events."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from vllm import _custom_ops as ops

from kvpolicy_vllm.plugin.copier import Copier
from kvpolicy_vllm.plugin.jobs import Job

Events = tuple[torch.cuda.Event, torch.cuda.Event]


class CudaCopier(Copier):
    """One side stream per direction, so that a save never waits for the loads before it.

    A save waits for what is on the compute stream and the compute stream waits for the save: the blocks it reads are
    overwritten by whatever is launched next. A load waits for its own save, and for the compute stream too: it writes
    into blocks whose last readers may still be in flight (see the `kv_producer` role).
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        device = self.device_segments[0].device
        self._save_stream = torch.cuda.Stream(device=device)
        self._load_stream = torch.cuda.Stream(device=device)
        self._saves: dict[int, Events] = {}
        self._loads: dict[int, Events] = {}
        # Host memory of pointer tables must outlive the copies that read them.
        self._tables: deque[tuple[torch.cuda.Event, tuple[torch.Tensor, ...]]] = deque()
        self._device_base = np.array([s.data_ptr() for s in self.device_segments], dtype=np.int64)
        self._host_base = np.array([s.data_ptr() for s in self.host_segments], dtype=np.int64)
        self._piece_bytes = np.array([s.shape[1] * s.element_size() for s in self.device_segments], dtype=np.int64)

    def host_memory(self, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """Pages are locked afterwards: torch's own pinned allocations are rounded up to a power of two."""
        memory = super().host_memory(shape, dtype)
        if self.pinned:
            size = memory.numel() * memory.element_size()
            status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0))
            if status != 0:
                raise RuntimeError(
                    f"{size} bytes of the host pool could not be page-locked (CUDA error {status}); "
                    'give less host_gib, or "pin_memory": false'
                )
        return memory

    def copy_out(self, job: Job) -> None:
        device, host = self._pointers(job)
        self._saves[job.copy_id] = self._submit(self._save_stream, device, host)
        torch.cuda.current_stream().wait_stream(self._save_stream)

    def save_seconds(self, job: Job, called_s: float) -> float | None:
        began, ended = self._saves[job.copy_id]
        return began.elapsed_time(ended) / 1e3 if ended.query() else None

    def copy_in(self, job: Job) -> None:
        device, host = self._pointers(job)
        self._load_stream.wait_event(self._saves[job.copy_id][1])
        self._loads[job.copy_id] = self._submit(self._load_stream, host, device)

    def copied_in(self, job: Job) -> bool:
        if not self._loads[job.copy_id][1].query():
            return False
        del self._loads[job.copy_id]
        return True

    def drop(self, copy_ids: Iterable[int]) -> None:
        copy_ids = list(copy_ids)
        super().drop(copy_ids)
        saving = {job.copy_id for job, *_ in self._saving}
        for copy_id in copy_ids:
            if copy_id not in saving:
                self._saves.pop(copy_id, None)

    def _pointers(self, job: Job) -> tuple[np.ndarray, np.ndarray]:
        blocks, slots = np.asarray(job.block_ids, dtype=np.int64), np.asarray(job.slots, dtype=np.int64)
        device = (self._device_base[:, None] + blocks * self._piece_bytes[:, None]).ravel()
        host = (self._host_base[:, None] + slots * self._piece_bytes[:, None]).ravel()
        return device, host

    def _submit(self, stream: torch.cuda.Stream, source: np.ndarray, target: np.ndarray) -> Events:
        sizes = np.repeat(self._piece_bytes, len(source) // len(self._piece_bytes))
        tables = tuple(torch.from_numpy(table) for table in (source, target, sizes))
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            began.record()
            ops.swap_blocks_batch(*tables)
            ended.record()
        self._tables.append((ended, tables))
        while len(self._tables) > 1 and self._tables[0][0].query():
            self._tables.popleft()
        return began, ended
