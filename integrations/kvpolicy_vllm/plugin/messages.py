"""What the scheduler side and the workers tell each other, once per step.

Plain records; the connector alone knows what vLLM asks of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvpolicy.events import Direction, Transfer

__all__ = ["Direction", "Job", "StepJobs", "Transfer", "Transfers"]


@dataclass(frozen=True, slots=True)
class Job:
    """One copy of whole blocks between the device and the host pool, the same on every rank.

    ``copy_id`` is the generation: never given twice, so that a request id that comes back, or a slot that is used
    again, cannot be mistaken for what it was before.
    """

    copy_id: int
    request_id: str
    block_ids: tuple[int, ...]
    """Device blocks, in the order of ``slots``."""
    slots: tuple[int, ...]
    """Host slots, one block each."""


@dataclass(slots=True)
class StepJobs:
    """Scheduler to workers. Saves come before loads; ``dropped`` copies can no longer be loaded."""

    step: int
    saves: tuple[Job, ...] = ()
    loads: tuple[Job, ...] = ()
    dropped: tuple[int, ...] = ()
    idle: bool = False
    """Whether the step computes nothing, so that waiting a moment for a load delays nobody."""


@dataclass(slots=True)
class Transfers:
    """Workers to scheduler: what finished on the ranks in one step."""

    done: list[Transfer] = field(default_factory=list)

    def aggregate(self, other: Transfers) -> Transfers:
        """Those of two ranks."""
        return Transfers(self.done + other.done)
