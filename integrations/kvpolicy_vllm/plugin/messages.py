"""Messages between the scheduler side and the workers, once per step.

Plain records; only the connector knows vLLM's interface to them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvpolicy.events import Direction, Transfer
from kvpolicy.request_marks import ANYBODY, Client, Hints
from kvpolicy.tiers import Took

__all__ = [
    "NO_REQUEST",
    "NO_SLOT",
    "Direction",
    "FileEvent",
    "FileJob",
    "FileReport",
    "Forward",
    "Job",
    "StepJobs",
    "Transfer",
    "Transfers",
]

NO_SLOT = -1
NO_REQUEST = ""
"""Request of a copy that a measuring tool makes."""


@dataclass(frozen=True, slots=True)
class Job:
    """One copy of whole blocks between the device and the host pool, the same on every rank.

    ``copy_id`` is never reused, so that a reused request id or slot cannot be mistaken for an earlier one. It rises in
    the order of the jobs.
    """

    copy_id: int
    request_id: str
    block_ids: tuple[int, ...]
    """Device blocks, in the order of ``slots``."""
    slots: tuple[int, ...]
    """Host slots, one block each; :data:`NO_SLOT` for a block that is not in host memory, so that its load fails."""
    saved_by: int = 0
    """For a load: ``copy_id`` of the last save that it needs."""


@dataclass(frozen=True, slots=True)
class FileJob:
    """One store or load of whole blocks between host slots and files, the same on every rank. The slots hold nothing
    else until every rank has reported the number, which is never reused."""

    number: int
    keys: tuple[bytes, ...]
    """Of the blocks, which follow each other in their prompt."""
    slots: tuple[int, ...]
    chain: tuple[bytes, ...] = ()
    """For a store: the keys, after that of the block before them, where there is one."""
    first: int = 0
    """Index in its prompt of the first block of ``chain``."""


@dataclass(frozen=True, slots=True)
class FileReport:
    """From one rank: what became of a job, or of its files."""

    number: int = 0
    """0 for a report of no job."""
    failed: tuple[bytes, ...] = ()
    """Digests of the job's blocks that are not in this rank's files after a store, or not in its host slots after a
    load."""
    refused: tuple[bytes, ...] = ()
    """Digests of the others that are not in its files after a store, since there was no room for them, too much before
    them, or no whole block in their slots."""
    moved: int = 0
    """How many of the job's blocks this rank wrote to its files, which does not count those that were there, or read
    from them."""
    took: Took | None = None
    """Of a load, as far as this rank's tier says it."""
    gone: tuple[bytes, ...] = ()
    """Digests of blocks that were in its files and are not any more, those apart that it was told to drop."""
    found: tuple[bytes, ...] = ()
    """Digests of blocks that an earlier server left in its files."""
    ready: bool = False
    """Whether all of those have been reported now."""
    hinted: tuple[int, ...] = ()
    """How many blocks more, by what became of hints about them, in the order of :data:`kvpolicy.caching.holds.EVENTS`.
    Of rank 0 alone, as all ranks do the same."""
    policy_failed: str = ""
    """The method of the caching policy of its files that failed, so that ``lru`` took its place."""


@dataclass(frozen=True, slots=True)
class Forward:
    """From one rank: how long a step's forward pass took on its device."""

    step: int
    seconds: float | None
    """None where timing it failed."""


@dataclass(frozen=True, slots=True)
class FileEvent:
    """What the policy of files learns of a request: its prompt as it arrives, or what it says of its window as it
    arrives or ends."""

    keys: tuple[bytes, ...]
    """Of the blocks of its prompt or window."""
    hints: Hints | None = None
    """None where the request arrives with this prompt."""
    client: Client = ANYBODY
    """The one that the hints are granted to."""
    request: str = ""
    """What tells it from others, where it has hints."""
    over: bool = False
    """Whether it ends."""


@dataclass(slots=True)
class StepJobs:
    """From scheduler to workers. Saves come before loads."""

    step: int
    saves: tuple[Job, ...] = ()
    loads: tuple[Job, ...] = ()
    idle: bool = False
    """Whether the step computes nothing, so that waiting a moment for a load delays no request."""
    overwritten: frozenset[int] = frozenset()
    """Device blocks that this step may write to, of saves that it brings or that are not confirmed yet. They have to be
    off the device, or gathered in a buffer, before the step computes, and are not named again for the same save. No
    step waits for other blocks."""
    at_once: bool = False
    """Whether another connector may write to those blocks at any time from now on: they have to be off the device
    before the worker goes on."""
    forget_hints: bool = False
    """Whether nobody will ask for contents of files again that hints have named before, as after a reset."""
    file_events: tuple[FileEvent, ...] = ()
    """Since the step before, in their order: a request may arrive before or after another one has ended the same
    session."""
    file_prices: tuple[float, ...] = ()
    """What blocks of files save, from :func:`kvpolicy.cost.block_price.sampled`; empty where nothing has changed."""
    file_drops: tuple[bytes, ...] = ()
    """Digests of blocks that some rank has no more in its files: the others give them up, before they store."""
    file_stores: tuple[FileJob, ...] = ()
    file_loads: tuple[FileJob, ...] = ()
    timed: int | None = None
    """Number of this step where its forward pass is to be timed, as while a trace is recorded."""


@dataclass(slots=True)
class Transfers:
    """From workers to scheduler: transfers that finished on the ranks in one step, and forward passes."""

    done: list[Transfer] = field(default_factory=list)
    files: list[FileReport] = field(default_factory=list)
    forwards: list[Forward] = field(default_factory=list)

    def aggregate(self, other: Transfers) -> Transfers:
        """Join the transfers of two ranks."""
        return Transfers(self.done + other.done, self.files + other.files, self.forwards + other.forwards)
