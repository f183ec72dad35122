"""A made-up worker: it computes nothing, and says when steps and copies would have ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.v1.outputs import KVConnectorOutput

from kvpolicy.simulator import Server, StepLoad, Times
from kvpolicy_vllm.plugin.ledger import pairs
from kvpolicy_vllm.plugin.messages import Direction, Job, StepJobs, Transfer, Transfers


def load_of(output: Any, requests: dict[str, Any]) -> StepLoad:
    """What a scheduled step computes; ``requests`` have their computed tokens advanced past it."""
    decodes = read = context = prefills = before = 0
    for name, tokens in output.num_scheduled_tokens.items():
        end = requests[name].num_computed_tokens
        if tokens == 1:
            decodes += 1
            read += end
        else:
            context += pairs(end - tokens, end)
            prefills += 1
            before += end - tokens
    return StepLoad(output.total_num_scheduled_tokens, decodes, read, context, prefills, before)


@dataclass(frozen=True, slots=True)
class Copying:
    """A copy on its way."""

    job: Job
    transfer: Transfer


class VirtualWorker:
    """One device and one link, in virtual time: steps in their order, copies one at a time per direction."""

    def __init__(self, server: Server, times: Times) -> None:
        self._server, self._times = server, times
        self._segment_bytes = server.segment_bytes or server.block_bytes
        self._free_s = 0.0
        self._link_free_s: dict[Direction, float] = {"save": 0.0, "load": 0.0}
        self._copying: list[Copying] = []

    def execute(self, jobs: StepJobs, load: StepLoad, now_s: float) -> float:
        """Take a step that is scheduled now; returns when its output is there."""
        begins_s = max(now_s, self._free_s)
        computes_s = self._times.step_s(load) if load.scheduled_tokens else 0.0
        if self._server.link.overlapped:
            self._free_s = self._beside(jobs, begins_s, computes_s)
        else:
            self._free_s = self._between(jobs, begins_s, computes_s)
        return self._free_s

    def next_copied_s(self) -> float | None:
        """When the next copy on its way ends."""
        return min((copying.transfer.end_s for copying in self._copying), default=None)

    def finished(self, now_s: float) -> KVConnectorOutput | None:
        """Copies that have ended since the last call, as vLLM's worker reports them with a step's output."""
        done = [copying for copying in self._copying if copying.transfer.end_s <= now_s]
        if not done:
            return None
        self._copying = [copying for copying in self._copying if copying.transfer.end_s > now_s]
        done.sort(key=lambda copying: copying.transfer.end_s)
        loaded = {copying.job.request_id for copying in done if copying.transfer.direction == "load"}
        return KVConnectorOutput(
            finished_recving=loaded or None,
            kv_connector_worker_meta=Transfers([copying.transfer for copying in done]),
        )

    def _beside(self, jobs: StepJobs, begins_s: float, computes_s: float) -> float:
        """Copies run beside the steps, which they slow down; loads from the end of this one on."""
        for job in jobs.saves:
            saved_s = self._copy(job, "save", begins_s, max(begins_s, self._link_free_s["save"]))
            if self._server.link.saves_wait:
                begins_s = saved_s
        busy = any(
            copying.transfer.start_s < begins_s + computes_s and copying.transfer.end_s > begins_s
            for copying in self._copying
        )
        ends_s = begins_s + computes_s * (1.0 + self._server.link.slowdown * busy)
        for job in jobs.loads:
            self._copy(job, "load", ends_s, max(ends_s, self._link_free_s["load"], self._saved_s(job)))
        return ends_s

    def _between(self, jobs: StepJobs, begins_s: float, computes_s: float) -> float:
        """The step waits for its saves, computes, and waits for its loads."""
        for job in jobs.saves:
            begins_s = self._copy(job, "save", begins_s, begins_s)
        ends_s = begins_s + computes_s
        for job in jobs.loads:
            ends_s = self._copy(job, "load", ends_s, ends_s)
        return ends_s

    def _saved_s(self, job: Job) -> float:
        """When the save of the copy to be loaded ends, where that is still to come."""
        saving = (c.transfer.end_s for c in self._copying if c.job.copy_id == job.copy_id)
        return max(saving, default=0.0)

    def _copy(self, job: Job, direction: Direction, submit_s: float, start_s: float) -> float:
        size = len(job.slots) * self._server.block_bytes
        segments = len(job.slots) * max(1, self._server.block_bytes // self._segment_bytes)
        end_s = start_s + self._times.copy_s(direction, size, segments, self._segment_bytes)
        waiting = sum(c.transfer.bytes for c in self._copying if c.transfer.direction == direction)
        self._link_free_s[direction] = end_s
        made = Transfer(
            job.copy_id, direction, True, size, segments, self._segment_bytes, True, waiting, submit_s, start_s, end_s
        )
        self._copying.append(Copying(job, made))
        return end_s
