"""Copiers that misbehave on purpose, and ones that keep digests or save late. Named by import path, so they reach every
worker.

The plan comes from the environment variable ``KVPOLICY_TEST_FAULTS``: ``{"late_polls": 3, "fail_saves": [2],
"fail_loads": [1], "fail_watch": [5]}``, counting copies of one worker, and looks at its watch of forward passes, from
0; or ``{"by_rank": [plan, plan]}``.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank

from kvpolicy_vllm.plugin.copiers.base import CopyError, Finished, Span
from kvpolicy_vllm.plugin.copiers.indexing import IndexingCopier
from kvpolicy_vllm.plugin.copiers.staging import part_of
from kvpolicy_vllm.plugin.forward_timer import HostWatch
from kvpolicy_vllm.plugin.messages import Job


class LateCopier(IndexingCopier):
    """Reads the blocks of a save as late as a device may: when the engine's next work may overwrite them, when a load
    comes, or after some polls. Until then the host slots hold rubbish."""

    LATE_POLLS = 3

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._unread: dict[int, tuple[Job, int]] = {}

    def copy_out(self, job: Job, urgent: int) -> None:
        slots = set(job.slots)  # those of a forgotten copy are written to before these of the new one
        self.finish_copies_out([i for i, (earlier, _) in self._unread.items() if not slots.isdisjoint(earlier.slots)])
        for host in self.host_segments:
            host[torch.tensor(job.slots)] = 7.0
        if urgent:
            super().copy_out(part_of(job, 0, urgent), urgent)
        self._unread[job.copy_id] = part_of(job, urgent, len(job.slots)), self.LATE_POLLS

    def finish_copies_out(self, copy_ids: Iterable[int]) -> None:
        for copy_id in copy_ids:
            job, _ = self._unread.pop(copy_id, (None, 0))
            if job is not None and job.slots:
                super().copy_out(job, 0)

    def save_span(self, job: Job, called_s: float) -> Span | None:
        if job.copy_id in self._unread:
            return None
        return super().save_span(job, called_s)

    def copy_in(self, job: Job) -> None:
        self.finish_copies_out(list(self._unread))
        super().copy_in(job)

    def poll(self, idle: bool = False) -> list[Finished]:
        self._unread = {copy_id: (job, polls - 1) for copy_id, (job, polls) in self._unread.items()}
        self.finish_copies_out([copy_id for copy_id, (_, polls) in self._unread.items() if polls == 0])
        return super().poll(idle)


def failing_at(looks: set[int], look: Callable[[HostWatch], float]) -> Callable[[HostWatch], float]:
    numbers = count()

    def looked(watch: HostWatch) -> float:
        if next(numbers) in looks:
            raise RuntimeError("made to fail")
        return look(watch)

    return looked


class FaultyCopier(LateCopier):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        plan = json.loads(os.environ.get("KVPOLICY_TEST_FAULTS", "{}"))
        if "by_rank" in plan:
            plan = plan["by_rank"][get_tensor_model_parallel_rank()]
        self._late_polls = plan.get("late_polls", 0)
        self._fail_saves, self._fail_loads = set(plan.get("fail_saves", ())), set(plan.get("fail_loads", ()))
        self._saves = self._loads = 0
        self._asked: dict[int, int] = {}
        if "fail_watch" in plan:
            HostWatch.mark = failing_at(set(plan["fail_watch"]), HostWatch.mark)  # type: ignore[method-assign]

    def copy_out(self, job: Job, urgent: int) -> None:
        self._saves += 1
        if self._saves - 1 in self._fail_saves:
            raise CopyError("made to fail")
        super().copy_out(job, urgent)

    def copy_in(self, job: Job) -> None:
        self._loads += 1
        if self._loads - 1 in self._fail_loads:
            for device in self.device_segments:  # a copy that breaks off leaves rubbish behind
                device[torch.tensor(job.block_ids)] = 7.0
            raise CopyError("made to fail")
        super().copy_in(job)

    def copied_in(self, job: Job) -> bool:
        """Late by so many asks: the engine takes about one step for each."""
        self._asked[job.copy_id] = self._asked.get(job.copy_id, 0) + 1
        return self._asked[job.copy_id] > self._late_polls and super().copied_in(job)


class DigestCopier(IndexingCopier):
    """Keeps a digest of every block it brings back, and what the digest was when it was saved, by (copy, host slot)."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.saved: dict[str, str] = {}
        self.restored: dict[str, str] = {}
        self._by_slot: dict[int, str] = {}

    def copy_out(self, job: Job, urgent: int) -> None:
        self._by_slot |= self._digests(job)
        super().copy_out(job, urgent)

    def copy_in(self, job: Job) -> None:
        super().copy_in(job)
        for slot, digest in self._digests(job).items():
            self.saved[f"{job.copy_id}/{slot}"] = self._by_slot[slot]
            self.restored[f"{job.copy_id}/{slot}"] = digest

    def _digests(self, job: Job) -> dict[int, str]:
        values = {}
        for block, slot in zip(job.block_ids, job.slots, strict=True):
            state = hashlib.sha256()
            for device in self.device_segments:
                state.update(device[block].contiguous().view(torch.uint8).numpy().tobytes())
            values[slot] = state.hexdigest()
        return values
