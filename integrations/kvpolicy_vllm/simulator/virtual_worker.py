"""A worker that computes nothing and tells when steps and copies would have ended."""

from __future__ import annotations

from typing import Any

from vllm.v1.outputs import KVConnectorOutput

from kvpolicy.attribution.ledger import OpenPreemption, Step
from kvpolicy.simulator import Server, StepLoad, Times
from kvpolicy.simulator.base import load_of
from kvpolicy.simulator.link_queues import LinkQueues
from kvpolicy_vllm.plugin.messages import Job, StepJobs, Transfers


def load_of_output(output: Any, requests: dict[str, Any]) -> StepLoad:
    """The load of a scheduled step. Computed tokens of ``requests`` are already advanced past it."""
    step: Step[OpenPreemption] = Step(-1)
    scheduled = output.num_scheduled_tokens
    step.compose(scheduled.values(), [requests[name].num_computed_tokens for name in scheduled])
    return load_of(step)


class VirtualWorker:
    """One device and one link, in virtual time: steps in their order, copies one at a time per direction."""

    def __init__(self, server: Server, times: Times) -> None:
        self._times = times
        self._free_s = 0.0
        self._link: LinkQueues[Job] = LinkQueues(server, times)
        self.last_step_s = 0.0, 0.0
        """Seconds that the last step takes without what copies add, and with it."""

    def execute(self, jobs: StepJobs, load: StepLoad, now_s: float) -> float:
        """Execute a step that is scheduled now; return the time at which its output is available."""
        begins_s = max(now_s, self._free_s)
        computes_s = self._times.step_s(load) if load.scheduled_tokens else 0.0
        self._free_s = self._link.step(_with_blocks(jobs.saves), _with_blocks(jobs.loads), begins_s, computes_s)
        self.last_step_s = computes_s, self._free_s - begins_s
        return self._free_s

    def next_copied_s(self) -> float | None:
        """End of the next copy under way; None without one."""
        return self._link.next_end_s()

    def finished(self, now_s: float) -> KVConnectorOutput | None:
        """Copies that ended since the last call, as vLLM's worker reports them with a step's output."""
        done = self._link.ended(now_s)
        if not done:
            return None
        loaded = {job.request_id for job, transfer in done if transfer.direction == "load"}
        return KVConnectorOutput(
            finished_recving=loaded or None,
            kv_connector_worker_meta=Transfers([transfer for _, transfer in done]),
        )


def _with_blocks(jobs: tuple[Job, ...]) -> list[tuple[Job, int]]:
    return [(job, len(job.slots)) for job in jobs]
