"""Copies on CUDA: the engine's own batched copy operation, on a side stream ordered by events."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch
from vllm import _custom_ops as ops

from kvpolicy_vllm.plugin.copier import Copier
from kvpolicy_vllm.plugin.jobs import Direction, Job


class CudaCopier(Copier):
    """One side stream for both directions, so that a save is always finished before its load begins.

    A save waits for what is on the compute stream and the compute stream waits for the save: the blocks it reads are
    overwritten by whatever is launched next. A load waits for the compute stream too: it writes into blocks whose last
    readers may still be in flight (see the `kv_producer` role).
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._stream = torch.cuda.Stream(device=self.device_segments[0].device)
        self._events: dict[int, torch.cuda.Event] = {}
        # Host memory of pointer tables must outlive the copies that read them.
        self._tables: deque[tuple[torch.cuda.Event, tuple[torch.Tensor, ...]]] = deque()
        self._device_base = np.array([s.data_ptr() for s in self.device_segments], dtype=np.int64)
        self._host_base = np.array([s.data_ptr() for s in self.host_segments], dtype=np.int64)
        self._piece_bytes = np.array([s.shape[1] * s.element_size() for s in self.device_segments], dtype=np.int64)

    def copy_out(self, job: Job) -> None:
        self._submit(job, "save")
        torch.cuda.current_stream().wait_stream(self._stream)

    def copy_in(self, job: Job) -> None:
        self._events[job.copy_id] = self._submit(job, "load")

    def copied_in(self, job: Job) -> bool:
        if not self._events[job.copy_id].query():
            return False
        del self._events[job.copy_id]
        return True

    def _submit(self, job: Job, direction: Direction) -> torch.cuda.Event:
        blocks = np.asarray(job.block_ids, dtype=np.int64)
        slots = np.asarray(job.slots, dtype=np.int64)
        device = (self._device_base[:, None] + blocks * self._piece_bytes[:, None]).ravel()
        host = (self._host_base[:, None] + slots * self._piece_bytes[:, None]).ravel()
        sizes = np.repeat(self._piece_bytes, len(blocks))
        source, target = (device, host) if direction == "save" else (host, device)
        tables = tuple(torch.from_numpy(table) for table in (source, target, sizes))
        self._stream.wait_stream(torch.cuda.current_stream())
        event = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            ops.swap_blocks_batch(*tables)
            event.record()
        self._tables.append((event, tables))
        while self._tables[0][0].query() and len(self._tables) > 1:
            self._tables.popleft()
        return event
