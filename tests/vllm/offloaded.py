"""The worker that serves kvpolicy's connector and, beside it, vLLM's SimpleCPUOffloadConnector: its scheduler side is
vLLM's own, its copies are made by hand, as late as vLLM's worker may make them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorWorkerMetadata
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.simple_kv_offload.metadata import INVALID_JOB_ID, SimpleCPUOffloadMetadata, SimpleCPUOffloadWorkerMetadata

from tests.vllm.symbolic import HALF_COPIED, SymbolicWorker

BLOCKS = ("gpu_blocks", "cpu_blocks")
"""As vLLM's metadata names them: on the device, and offloaded."""


@dataclasses.dataclass(frozen=True, slots=True)
class Move:
    """Blocks that are on their way between the device and what is offloaded."""

    due_step: int
    event: int
    device_blocks: tuple[int, ...]
    offloaded_blocks: tuple[int, ...]


class OffloadingWorker(SymbolicWorker):
    """Executes the jobs of both connectors. What is loaded is overwritten when the load begins and right when it ends;
    what is stored is read when the store ends. Either ends in the order in which it began, and all end before a step
    with preemptions, as vLLM's worker has it."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        _, beside = self._scheduler.connector._connectors
        self._offloaded = np.full((beside.scheduler_manager.num_cpu_blocks, self._device.shape[1]), HALF_COPIED)
        self._metadata = SimpleCPUOffloadMetadata()
        self._loads: list[Move] = []
        self._stores: list[Move] = []
        self._loaded: list[int] = []
        self._stored: list[int] = []
        """Events that have ended and are not yet reported."""
        self._requests_of: dict[int, list[str]] = {}
        self._counts |= {"offloaded_loads": 0, "offloaded_stores": 0, "flushes": 0}

    def execute(self, output: Any, sampled: dict[str, bool]) -> ModelRunnerOutput:
        own, self._metadata = output.kv_connector_metadata.metadata
        result = super().execute(dataclasses.replace(output, kv_connector_metadata=own), sampled)
        return dataclasses.replace(result, kv_connector_output=self._joined(result.kv_connector_output))

    def others_write(self) -> None:
        if self._metadata.need_flush:
            self._counts["flushes"] += bool(self._loads or self._stores)
            self._end(until_step=self._steps + self._faults.max_late_steps)
        self._requests_of |= self._metadata.load_event_to_reqs
        if self._metadata.load_event != INVALID_JOB_ID:
            load = self._move("load")
            self._device[list(load.device_blocks)] = HALF_COPIED
            self._loads.append(load)
        if self._metadata.store_event != INVALID_JOB_ID:
            self._stores.append(self._move("store"))

    def _move(self, kind: str) -> Move:
        event, device, offloaded = (getattr(self._metadata, f"{kind}_{what}") for what in ("event", *BLOCKS))
        late = self._rng.randint(0, self._faults.max_late_steps)
        return Move(self._steps + late, event, tuple(device), tuple(offloaded))

    def _end(self, until_step: int) -> None:
        """Of those that are due by then, each once those that began before it have ended."""
        while self._loads and self._loads[0].due_step <= until_step:
            load = self._loads.pop(0)
            self._device[list(load.device_blocks)] = self._offloaded[list(load.offloaded_blocks)]
            self._loaded.append(load.event)
        while self._stores and self._stores[0].due_step <= until_step:
            store = self._stores.pop(0)
            self._offloaded[list(store.offloaded_blocks)] = self._device[list(store.device_blocks)]
            self._stored.append(store.event)

    def _joined(self, own: KVConnectorOutput) -> KVConnectorOutput:
        """What both connectors report, as MultiConnector joins it."""
        self._end(until_step=self._steps)
        loaded, self._loaded, stored, self._stored = self._loaded, [], self._stored, []
        self._counts["offloaded_loads"] += len(loaded)
        self._counts["offloaded_stores"] += len(stored)
        names = {name for event in loaded for name in self._requests_of.pop(event)}
        events = SimpleCPUOffloadWorkerMetadata(dict.fromkeys(stored, 1)) if stored else None
        meta = own.kv_connector_worker_meta
        return dataclasses.replace(
            own,
            finished_recving=(own.finished_recving or set()) | names or None,
            kv_connector_worker_meta=MultiKVConnectorWorkerMetadata((meta, events)) if meta or events else None,
        )
