"""Another connector beside kvpolicy's, and the worker that serves both.

The connector claims to have the whole blocks of some requests, new ones and preempted ones, and loads them within a
step or beside steps. It keeps the blocks of some finished requests for a while, as one that sends them does.
"""

from __future__ import annotations

import dataclasses
import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorWorkerMetadata
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import RequestStatus

from tests.vllm.symbolic import HALF_COPIED, SymbolicWorker

SETTINGS = {"kv_connector": "StoreConnector", "kv_connector_module_path": "tests.vllm.store", "kv_role": "kv_both"}


@dataclass(frozen=True, slots=True)
class StoreLoad:
    """Positions ``start`` to ``end`` of a request, whose block table is ``block_ids``."""

    request_id: str
    block_ids: tuple[int, ...]
    start: int
    end: int
    beside_steps: bool


@dataclass
class StoreJobs(KVConnectorMetadata):
    """From the scheduler to the worker, once per step."""

    loads: list[StoreLoad] = field(default_factory=list)
    sending: list[str] = field(default_factory=list)
    """Finished requests whose blocks are kept until the worker reports them."""


class StoreConnector(KVConnectorBase_V1, SupportsHMA):
    """The scheduler's side; what the worker does is in :class:`WorkerBeside`."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._block = vllm_config.cache_config.block_size
        self._asked: dict[str, tuple[int, bool]] = {}
        self._jobs = StoreJobs()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        drawn = zlib.crc32(f"{request.request_id}/{request.num_preemptions}".encode()) % 3
        tokens = (request.num_tokens - 1) // self._block * self._block - num_computed_tokens
        self._asked[request.request_id] = num_computed_tokens, drawn == 2
        return (tokens, drawn == 2) if drawn and tokens > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens > 0:
            start, beside_steps = self._asked[request.request_id]
            table = tuple(blocks.get_block_ids()[0])
            end = start + num_external_tokens
            self._jobs.loads.append(StoreLoad(request.request_id, table, start, end, beside_steps))

    def build_connector_meta(self, scheduler_output: Any) -> StoreJobs:
        jobs, self._jobs = self._jobs, StoreJobs()
        return jobs

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        sends = request.status != RequestStatus.FINISHED_ABORTED and zlib.crc32(request.request_id.encode()) % 2 == 0
        if sends:
            self._jobs.sending.append(request.request_id)
        return sends, None

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        return self.request_finished(request, block_ids[0])

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """See :class:`WorkerBeside`."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """See :class:`WorkerBeside`."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """It has everything."""

    def wait_for_save(self) -> None:
        """It has everything."""


class WorkerBeside(SymbolicWorker):
    """Executes the jobs of both connectors. Loads beside steps overwrite their blocks when they begin, fail at random
    and are reported steps later."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._store = StoreJobs()
        self._overwritten: frozenset[int] = frozenset()
        self._under_way: list[tuple[int, StoreLoad]] = []
        self._sending: list[tuple[int, str]] = []
        self._counts |= {"store_loads": 0, "store_loads_in_steps": 0, "store_failed": 0, "sent": 0, "met": 0}

    def execute(self, output: Any, sampled: dict[str, bool]) -> ModelRunnerOutput:
        own, self._store = output.kv_connector_metadata.metadata
        self._overwritten = own.overwritten
        assert own.at_once == bool(own.overwritten)
        result = super().execute(dataclasses.replace(output, kv_connector_metadata=own), sampled)
        return dataclasses.replace(result, kv_connector_output=self._joined(result.kv_connector_output))

    def others_write(self) -> None:
        for load in self._store.loads:
            blocks = load.block_ids[load.start // self._sizes[0] : load.end // self._sizes[0]]
            self._counts["met"] += bool(self._overwritten.intersection(blocks))
            if load.beside_steps:
                self._device[list(blocks)] = HALF_COPIED
                self._under_way.append((self._steps + self._late(), load))
            else:
                self._write(load)
                self._counts["store_loads_in_steps"] += 1
        self._sending += [(self._steps + self._late(), name) for name in self._store.sending]

    def _late(self) -> int:
        return self._rng.randint(0, self._faults.max_late_steps)

    def _write(self, load: StoreLoad) -> None:
        positions = np.arange(load.start, load.end)
        blocks = np.array(load.block_ids)[positions // self._sizes[0]]
        self._device[blocks, positions % self._sizes[0]] = self.right(load.request_id, load.end)[positions]

    def _joined(self, own: KVConnectorOutput) -> KVConnectorOutput:
        """What both connectors report, as MultiConnector joins it."""
        due = [load for step, load in self._under_way if step <= self._steps]
        self._under_way = [one for one in self._under_way if one[0] > self._steps]
        failed = [load for load in due if self._rng.random() < self._faults.loads_failing]
        for load in due:
            if load not in failed:
                self._write(load)
        sent = {name for step, name in self._sending if step <= self._steps}
        self._sending = [one for one in self._sending if one[0] > self._steps]
        for name, count in {"store_loads": len(due), "store_failed": len(failed), "sent": len(sent)}.items():
            self._counts[name] += count
        more: dict[str, Any] = {}
        if any(one.name == "failed_recving" for one in dataclasses.fields(KVConnectorOutput)):
            more["failed_recving"] = (own.failed_recving or set()) | {load.request_id for load in failed}
        else:
            blocks = {block for load in failed for block in load.block_ids[load.start // self._sizes[0] :]}
            more["invalid_block_ids"] = own.invalid_block_ids | blocks
        meta = own.kv_connector_worker_meta
        return dataclasses.replace(
            own,
            finished_recving=(own.finished_recving or set()) | {load.request_id for load in due} or None,
            finished_sending=sent or None,
            kv_connector_worker_meta=None if meta is None else MultiKVConnectorWorkerMetadata((meta, None)),
            **more,
        )
