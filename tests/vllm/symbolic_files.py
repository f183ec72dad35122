"""A worker whose host memory has files below it: a mapping in place of a disk, as late, lossy and forgetful as one."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvpolicy.tiers import digest_of_key
from kvpolicy_vllm.plugin.messages import FileJob, FileReport, StepJobs, Transfer, Transfers
from tests.vllm.symbolic import HALF_COPIED, SymbolicWorker

MAX_LATE_STEPS = 6
FAILING, LOST = 0.05, 0.05
"""Share of blocks that fail, and of steps after which a file is gone."""


@dataclass
class UnderWay:
    """A store or a load, which is done in one go at its end."""

    job: FileJob
    due_step: int | None
    """None for a load that waits for saves to its slots."""


class SymbolicFiles(SymbolicWorker):
    """What a block of a file overwrites is overwritten when its load begins; what it is stored from is read last."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._disk: dict[bytes, np.ndarray] = {}
        self._on_disk: list[UnderWay] = []
        self._chance = random.Random(f"files {arguments[3:5]}")
        self._jobs = StepJobs(-1)
        self._ready = False
        self.stored = self.brought = 0

    @property
    def loading(self) -> int:
        return super().loading + len(self._on_disk)

    def execute(self, output: Any, sampled: dict[str, bool]) -> ModelRunnerOutput:
        self._jobs = output.kv_connector_metadata
        return super().execute(output, sampled)

    def _finished(self, done: list[Transfer]) -> KVConnectorOutput:
        found = super()._finished(done)
        self._on_disk += [UnderWay(job, self._later()) for job in self._jobs.file_stores]
        self._on_disk += [UnderWay(job, None) for job in self._jobs.file_loads]
        reports = [] if self._ready else [FileReport(ready=True)]
        self._ready = True
        for under in list(self._on_disk):
            if under.due_step is None:
                self._begin_from_disk(under)
            elif under.due_step <= self._steps:
                self._on_disk.remove(under)
                reports.append(self._do(under.job))
        if self._disk and self._chance.random() < LOST:
            key = self._chance.choice(list(self._disk))
            del self._disk[key]
            reports.append(FileReport(gone=(digest_of_key(key),)))
        if not reports:
            return found
        meta = found.kv_connector_worker_meta or Transfers()
        return dataclasses.replace(found, kv_connector_worker_meta=Transfers(meta.done, reports))

    def _later(self) -> int:
        return self._steps + self._chance.randint(0, MAX_LATE_STEPS)

    def _begin_from_disk(self, under: UnderWay) -> None:
        """Once no save is being written to its slots any more."""
        busy = {slot for saving in self._saving for slot in saving.unread.values()}
        if busy.isdisjoint(under.job.slots):
            under.due_step = self._later()
            self._host[list(under.job.slots)] = HALF_COPIED

    def _do(self, job: FileJob) -> FileReport:
        failed = []
        for key, slot in zip(job.keys, job.slots, strict=True):
            if self._chance.random() < FAILING or not (slot in self._saved if job.chain else key in self._disk):
                failed.append(digest_of_key(key))
            elif job.chain:
                self._disk[key] = self._host[slot].copy()
                self.stored += 1
            else:
                self._host[slot] = self._disk[key]
                self._saved.add(slot)
                self.brought += 1
        return FileReport(job.number, failed=tuple(failed))
