"""vLLM's OffloadingConnector, under names that the plugin does not refuse, and the worker that serves it beside
kvpolicy's connector."""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata, TransferJob
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import get_offload_group_idx

from tests.vllm.offloaded import Move, MovingWorker


class Offloading(OffloadingConnector):
    """As it is."""


class ToldOffloading(OffloadingConnector):
    """Told which blocks are given to a request that another connector loads, and not only to those of its own loads and
    to those that are scheduled."""

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        given = {block.block_id for table in blocks.blocks for block in table if not block.is_null}
        self.scheduler._current_batch_allocated_block_ids |= given


class OffloadingConnectorWorker(MovingWorker):
    """A store begins in the step after the one that it came with, or before that one computes where it is to be
    flushed, which ends it at once. What is stored under a key is compared with what the key stands for."""

    def __init__(self, scheduler: Any, *arguments: Any, **more: Any) -> None:
        _, beside = scheduler.connector._connectors
        self._beside = beside.scheduler
        chunks = self._beside.manager._num_chunks
        super().__init__(scheduler, *arguments, offloaded_blocks=chunks, **more)
        self._waiting: dict[int, TransferJob] = {}
        """Stores that have not begun."""
        self._right_of: dict[int, np.ndarray] = {}
        """What each store should find on the device."""
        self._loading_of: dict[int, str] = {}
        self._counts |= {"stored_wrong": 0}

    def others_write(self) -> None:
        meta, flushed = self._metadata, self._metadata.jobs_to_flush or set()
        for event in flushed & meta.store_jobs.keys():
            self._take(event, meta.store_jobs.pop(event))
        for event, job in self._waiting.items():
            self._start_store(event, job.src_spec.block_ids.tolist(), job.dst_spec.block_ids.tolist())
        self._waiting = {}
        while flushed & {store.event for store in self._stores}:
            self._counts["flushes"] += 1
            self._end_store(self._stores.pop(0))
        for event, job in meta.load_jobs.items():
            self._loading_of[event] = job.req_id
            self._start_load(event, job.dst_spec.block_ids.tolist(), job.src_spec.block_ids.tolist())

    def _take(self, event: int, job: TransferJob) -> None:
        self._waiting[event] = job
        self._right_of[event] = self._wanted(event, job)

    def _wanted(self, event: int, job: TransferJob) -> np.ndarray:
        """A row for each block of the device. The scheduler side knows which chunk has which key, and where in its
        request the key's tokens end."""
        keys, context = self._beside._jobs[event].keys, self._beside._req_status[job.req_id].req_context
        ends: dict[int, tuple[int, int]] = {}
        for key in keys:
            chunk, end = self._beside.manager._policy.get(key), context.get_offload_key_position(key)
            assert chunk is not None and end is not None
            ends[chunk.chunk_id] = end, self._sizes[get_offload_group_idx(key)]
        right = self.right(job.req_id, max(end for end, _ in ends.values()))
        of_chunks = (ends[chunk] for chunk in job.dst_spec.block_ids.tolist())
        return np.stack([right[end - size : end] for end, size in of_chunks])

    def _end_store(self, store: Move) -> None:
        different = self._device[list(store.device_blocks)] != self._right_of.pop(store.event)
        self._counts["stored_wrong"] += int(different.any(axis=1).sum())
        super()._end_store(store)

    def _joined(self, own: Any) -> Any:
        for event, job in self._metadata.store_jobs.items():
            self._take(event, job)
        return super()._joined(own)

    def _requests_of(self, loaded: list[int]) -> set[str]:
        return {self._loading_of.pop(event) for event in loaded}

    def _reported(self, loaded: list[int], stored: list[int]) -> Any:
        ended = loaded + stored
        return OffloadingWorkerMetadata(completed_jobs=dict.fromkeys(ended, 1)) if ended else None
