"""Workers that serve kvpolicy's connector and, beside it, one of vLLM's that offload to host memory: the scheduler side
of either is vLLM's own, its copies are made by hand, as late as vLLM's worker may make them."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
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


class MovingWorker(SymbolicWorker):
    """Executes the jobs of both connectors. What is loaded is overwritten when the load begins and right when it ends;
    what is stored is read when the store ends. Loads end in the order in which they began, and so do stores.

    ``offloaded_blocks``: as many as the other connector has.
    """

    def __init__(self, *arguments: Any, offloaded_blocks: int, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._offloaded = np.full((offloaded_blocks, self._device.shape[1]), HALF_COPIED)
        self._metadata: Any = None
        """Of the other connector, for this step."""
        self._loads: list[Move] = []
        self._stores: list[Move] = []
        self._loaded: list[int] = []
        self._stored: list[int] = []
        """Events that have ended and are not yet reported."""
        self._counts |= {"offloaded_loads": 0, "offloaded_stores": 0, "flushes": 0}

    def execute(self, output: Any, sampled: dict[str, bool]) -> ModelRunnerOutput:
        own, self._metadata = output.kv_connector_metadata.metadata
        result = super().execute(dataclasses.replace(output, kv_connector_metadata=own), sampled)
        return dataclasses.replace(result, kv_connector_output=self._joined(result.kv_connector_output))

    def _start_load(self, event: int, device: Collection[int], offloaded: Collection[int]) -> None:
        load = self._move(event, device, offloaded)
        self._device[list(load.device_blocks)] = HALF_COPIED
        self._loads.append(load)

    def _start_store(self, event: int, device: Collection[int], offloaded: Collection[int]) -> None:
        self._stores.append(self._move(event, device, offloaded))

    def _move(self, event: int, device: Collection[int], offloaded: Collection[int]) -> Move:
        late = self._rng.randint(0, self._faults.max_late_steps)
        return Move(self._steps + late, event, tuple(device), tuple(offloaded))

    def _end_loads(self, until_step: int) -> None:
        """Of those that are due by then, each once those that began before it have ended."""
        while self._loads and self._loads[0].due_step <= until_step:
            load = self._loads.pop(0)
            self._device[list(load.device_blocks)] = self._offloaded[list(load.offloaded_blocks)]
            self._loaded.append(load.event)

    def _end_stores(self, until_step: int) -> None:
        """As :meth:`_end_loads`."""
        while self._stores and self._stores[0].due_step <= until_step:
            self._end_store(self._stores.pop(0))

    def _end_store(self, store: Move) -> None:
        self._offloaded[list(store.offloaded_blocks)] = self._device[list(store.device_blocks)]
        self._stored.append(store.event)

    def _joined(self, own: KVConnectorOutput) -> KVConnectorOutput:
        """What both connectors report, as MultiConnector joins it."""
        self._end_loads(until_step=self._steps)
        self._end_stores(until_step=self._steps)
        loaded, self._loaded, stored, self._stored = self._loaded, [], self._stored, []
        self._counts["offloaded_loads"] += len(loaded)
        self._counts["offloaded_stores"] += len(stored)
        meta, other = own.kv_connector_worker_meta, self._reported(loaded, stored)
        return dataclasses.replace(
            own,
            finished_recving=(own.finished_recving or set()) | self._requests_of(loaded) or None,
            kv_connector_worker_meta=MultiKVConnectorWorkerMetadata((meta, other)) if meta or other else None,
        )

    def _requests_of(self, loaded: list[int]) -> set[str]:
        """Of loads that have ended; called once for each."""
        raise NotImplementedError

    def _reported(self, loaded: list[int], stored: list[int]) -> Any:
        """What the other connector's scheduler side is told, None for nothing."""
        raise NotImplementedError


class OffloadingWorker(MovingWorker):
    """Beside SimpleCPUOffloadConnector. All its copies end before a step with preemptions, as vLLM's worker has it."""

    def __init__(self, scheduler: Any, *arguments: Any, **more: Any) -> None:
        _, beside = scheduler.connector._connectors
        super().__init__(scheduler, *arguments, offloaded_blocks=beside.scheduler_manager.num_cpu_blocks, **more)
        self._requests_by_event: dict[int, list[str]] = {}

    def others_write(self) -> None:
        meta: SimpleCPUOffloadMetadata = self._metadata
        if meta.need_flush:
            self._counts["flushes"] += bool(self._loads or self._stores)
            self._end_loads(until_step=self._steps + self._faults.max_late_steps)
            self._end_stores(until_step=self._steps + self._faults.max_late_steps)
        self._requests_by_event |= meta.load_event_to_reqs
        for kind, start in (("load", self._start_load), ("store", self._start_store)):
            event, device, offloaded = (getattr(meta, f"{kind}_{what}") for what in ("event", *BLOCKS))
            if event != INVALID_JOB_ID:
                start(event, device, offloaded)

    def _requests_of(self, loaded: list[int]) -> set[str]:
        return {name for event in loaded for name in self._requests_by_event.pop(event)}

    def _reported(self, loaded: list[int], stored: list[int]) -> Any:
        return SimpleCPUOffloadWorkerMetadata(dict.fromkeys(stored, 1)) if stored else None
