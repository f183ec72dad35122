"""Saved copies on the scheduler side: their slots, their stages (queued, saved, loading, gone) and their failures.

Each rank's worker executes jobs in order. Therefore the slots of a forgotten copy may be reused at once: the new save
comes after all jobs of the old copy. Only a copy that is being *loaded* keeps its slots until every rank has reported
that the load has ended.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field
from enum import Enum

from kvpolicy_vllm.plugin.messages import Direction, Job, StepJobs, Transfer

logger = logging.getLogger(__name__)

MAX_FAILURES_IN_A_ROW = 5
FIRST_SUSPENSION_S = 10.0
MAX_SUSPENSION_S = 600.0
"""Suspensions double in length while no copy succeeds between them, up to this."""
WARNING_EVERY_S = 60.0
NOTHING, NOTHING_IDLE = StepJobs(-1), StepJobs(-1, idle=True)
"""Shared jobs of steps without work for the workers: NOTHING, and NOTHING_IDLE where the step computes nothing."""


class SlotPool:
    """The free list of host slots, one KV block each. The memory itself is in the workers.

    Freed slots are reused last, so that stale data stays intact as long as possible.
    """

    def __init__(self, slots: int) -> None:
        self.total = self.free = slots
        self.used = 0
        self._unused = deque(range(slots))

    def take(self, count: int) -> tuple[int, ...]:
        """Take ``count`` slots. Raises ValueError where fewer are free; check :attr:`free` first."""
        if count > self.free:
            raise ValueError(f"{count} host slots asked for, {self.free} free")
        self._count(count)
        return tuple(self._unused.popleft() for _ in range(count))

    def give_back(self, slots: tuple[int, ...]) -> None:
        self._count(-len(slots))
        self._unused.extend(slots)

    def _count(self, change: int) -> None:
        self.free, self.used = self.free - change, self.used + change


class Stage(Enum):
    QUEUED = "queued"  # the save has not been sent to the workers
    SAVED = "saved"  # sent; later jobs for the workers find the save done
    LOADING = "loading"


@dataclass(slots=True, eq=False)
class Copy:
    """Saved KV of one request, from one preemption."""

    copy_id: int
    request_id: str
    preemption_id: str
    tokens: int
    slots: tuple[int, ...]
    stage: Stage = Stage.QUEUED
    load_tokens: int = 0
    load_blocks: int = 0
    orphan: bool = False
    """Its request is gone or its content stale. It is released as soon as no worker reads its slots."""
    acks: dict[Direction, list[Transfer]] = field(default_factory=lambda: {"save": [], "load": []})


@dataclass(frozen=True, slots=True)
class Settled:
    """All ranks have finished one direction of one copy."""

    copy: Copy
    direction: Direction
    transfers: tuple[Transfer, ...]

    @property
    def ok(self) -> bool:
        return all(transfer.ok for transfer in self.transfers)

    @property
    def slowest(self) -> Transfer:
        """The slowest rank's transfer, which determines how long the copy took."""
        return max(self.transfers, key=lambda transfer: transfer.end_s - transfer.start_s)

    @property
    def moved_bytes(self) -> int:
        """Bytes moved over all ranks."""
        return sum(transfer.bytes for transfer in self.transfers if transfer.ok)


class CopyBook:
    """All copies of one engine core. ``ranks``: how many workers must finish a transfer."""

    def __init__(self, slots: int, ranks: int, block_bytes: int) -> None:
        self.pool = SlotPool(slots)
        self.ranks = ranks
        self.block_bytes = block_bytes
        self.health = CopyHealth()
        self._next_id = 0
        self._of_request: dict[str, Copy] = {}
        self._by_id: dict[int, Copy] = {}
        self._saves: dict[int, tuple[int, ...]] = {}
        """Device blocks of saves that have not been sent to the workers, by copy id."""
        self._unconfirmed: dict[int, tuple[int, ...]] = {}
        """Device blocks of saves that were sent and that not all ranks have confirmed, by copy id, without those that a
        step was told of. They are free on the scheduler side, so a later step may write to them while they are still
        being saved."""
        self._missing_acks: dict[int, int] = {}
        """Number of ranks on which a save that was sent may still read the device, by copy id; forgotten ones, too."""
        self._loads: list[Job] = []
        self._dropped: list[int] = []
        self.loading = 0
        """Number of copies being loaded, including those of requests that are gone: their end must be waited for."""
        self._queued_blocks: dict[Direction, int] = {"save": 0, "load": 0}

    def __len__(self) -> int:
        return len(self._by_id)

    def of(self, request_id: str) -> Copy | None:
        return self._of_request.get(request_id)

    @property
    def under_way(self) -> bool:
        """Whether workers may still be reading or writing device blocks."""
        return self.loading > 0 or bool(self._missing_acks)

    def preemption_of(self, job: Job) -> str:
        """The preemption that a job just taken belongs to."""
        return self._by_id[job.copy_id].preemption_id

    def queued_bytes(self, direction: Direction) -> int:
        """Bytes of one rank that are being copied or wait for the link."""
        return self._queued_blocks[direction] * self.block_bytes

    def save(self, request_id: str, preemption_id: str, tokens: int, block_ids: tuple[int, ...]) -> Copy:
        """Queue a save. The caller has checked that enough slots are free."""
        self.forget(request_id)
        self._next_id += 1
        copy = Copy(self._next_id, request_id, preemption_id, tokens, self.pool.take(len(block_ids)))
        self._of_request[request_id] = copy
        self._by_id[copy.copy_id] = copy
        self._queued_blocks["save"] += len(copy.slots)
        self._saves[copy.copy_id] = block_ids
        return copy

    def loadable_tokens(self, request_id: str, wanted: int, local: int) -> int:
        """Number of tokens between ``local`` and ``wanted`` that a load would bring back. Changes nothing."""
        copy = self._of_request.get(request_id)
        if copy is None or copy.stage is Stage.LOADING:
            return 0
        return max(0, min(copy.tokens, wanted) - local)

    def begin_load(self, request_id: str, first_block: int, block_ids: tuple[int, ...], tokens: int) -> None:
        """Queue the load of ``tokens`` tokens into ``block_ids``, from block ``first_block`` of the copy on."""
        copy = self._of_request[request_id]
        copy.stage = Stage.LOADING
        self.loading += 1
        copy.load_tokens, copy.load_blocks = tokens, len(block_ids)
        self._queued_blocks["load"] += copy.load_blocks
        slots = copy.slots[first_block : first_block + len(block_ids)]
        self._loads.append(Job(copy.copy_id, request_id, block_ids, slots))

    def forget(self, request_id: str) -> Copy | None:
        """The request no longer needs its copy: resumed without it, finished or aborted."""
        copy = self._of_request.pop(request_id, None)
        if copy is None:
            return None
        if copy.stage is Stage.LOADING:
            copy.orphan = True
        else:
            self._release(copy)
        return copy

    def forget_all(self) -> None:
        """Forget all copies because they are stale, as after a reset."""
        # Loads that have not been sent are still sent, since vLLM waits for their completion.
        for request_id in list(self._of_request):
            self.forget(request_id)

    def take_jobs(self, step: int, idle: bool, taken_of: Callable[[Iterable[int]], Set[int]]) -> StepJobs:
        """The workers' jobs in this step. ``taken_of``: those of some device blocks that a request has after
        scheduling."""
        if not (self._saves or self._loads or self._dropped or self._unconfirmed):  # true in nearly every step
            return NOTHING_IDLE if idle else NOTHING
        saves = tuple(self._save_job(copy_id, block_ids) for copy_id, block_ids in self._saves.items())
        self._unconfirmed |= self._saves
        self._missing_acks |= dict.fromkeys(self._saves, self.ranks)
        overwritten = self._overwritten(taken_of)
        if not (saves or self._loads or self._dropped or overwritten):
            return NOTHING_IDLE if idle else NOTHING
        jobs = StepJobs(step, saves, tuple(self._loads), tuple(self._dropped), idle, overwritten)
        self._saves, self._loads, self._dropped = {}, [], []
        return jobs

    def _overwritten(self, taken_of: Callable[[Iterable[int]], Set[int]]) -> frozenset[int]:
        """Blocks of unconfirmed saves that the step may write to. Each is named for its save once: it is saved before
        that step computes, and no later step has to wait for it."""
        overwritten: set[int] = set()
        for copy_id, block_ids in self._unconfirmed.items():
            taken = taken_of(block_ids)
            if taken:
                overwritten |= taken
                self._unconfirmed[copy_id] = tuple(block for block in block_ids if block not in taken)
        return frozenset(overwritten)

    def _save_job(self, copy_id: int, block_ids: tuple[int, ...]) -> Job:
        copy = self._by_id[copy_id]
        if copy.stage is Stage.QUEUED:
            copy.stage = Stage.SAVED
        return Job(copy_id, copy.request_id, block_ids, copy.slots)

    def acknowledge(self, done: Iterable[Transfer]) -> list[Settled]:
        """Register transfers that workers finished; return copies that are now finished on all ranks."""
        settled = []
        for transfer in done:
            if transfer.direction == "save":
                self._count_ack(transfer.copy_id)
            copy = self._by_id.get(transfer.copy_id)
            if copy is None:  # forgotten while its save was under way
                continue
            acks = copy.acks[transfer.direction]
            acks.append(transfer)
            if len(acks) == self.ranks:
                settled.append(Settled(copy, transfer.direction, tuple(acks)))
                self._settle(settled[-1])
        return settled

    def _count_ack(self, copy_id: int) -> None:
        missing = self._missing_acks.pop(copy_id, 0) - 1
        if missing > 0:
            self._missing_acks[copy_id] = missing

    def _settle(self, settled: Settled) -> None:
        copy = settled.copy
        current = self._of_request.get(copy.request_id) is copy
        if settled.direction == "save":
            self._queued_blocks["save"] -= len(copy.slots)
            self._unconfirmed.pop(copy.copy_id, None)
            if current and not settled.ok and copy.stage is not Stage.LOADING:
                self.forget(copy.request_id)
        else:
            if current:
                del self._of_request[copy.request_id]
            self.loading -= 1
            self._queued_blocks["load"] -= copy.load_blocks
            self._release(copy)

    def _release(self, copy: Copy) -> None:
        del self._by_id[copy.copy_id]
        self.pool.give_back(copy.slots)
        if len(copy.acks["save"]) < self.ranks:  # its save will not be confirmed any more
            self._queued_blocks["save"] -= len(copy.slots)
            self._unconfirmed.pop(copy.copy_id, None)
        if copy.stage is Stage.QUEUED:
            del self._saves[copy.copy_id]
        else:
            self._dropped.append(copy.copy_id)


class CopyHealth:
    """Suspends swapping for a while after several failures in a row, and limits warnings about failures.

    One per engine core. Times are seconds on the controller's clock.
    """

    def __init__(self) -> None:
        self._in_a_row: dict[Direction, int] = {"save": 0, "load": 0}
        """Failures in a row by direction. Counted separately, since a successful save precedes every failed load."""
        self._suspension_s = FIRST_SUSPENSION_S
        self._suspended_until_s: float | None = None
        self._warned_s: float | None = None
        self._unreported = 0

    def suspended(self, now: float) -> bool:
        """Whether swapping is suspended now. After a suspension has ended, a single failure starts the next one."""
        if self._suspended_until_s is None:
            return False
        if now < self._suspended_until_s:
            return True
        self._suspended_until_s = None
        logger.warning("kvpolicy: swapping is tried again")
        return False

    def settled(self, settled: Settled, now: float) -> None:
        """One direction of a copy is finished on all ranks."""
        if settled.ok:
            self.succeeded(settled.direction)
            return
        first = next(transfer for transfer in settled.transfers if not transfer.ok)
        self.failed(settled.direction, f"{first.direction} of copy {first.copy_id} failed: {first.error}", now)

    def succeeded(self, direction: Direction) -> None:
        """A copy succeeded. Only a successful load shows that swapping works, and resets the suspension's length."""
        self._in_a_row[direction] = 0
        if direction == "load":
            self._suspension_s = FIRST_SUSPENSION_S

    def failed(self, direction: Direction, what: str, now: float) -> None:
        """A copy failed. ``what``: which one and why."""
        self._in_a_row[direction] += 1
        self._unreported += 1
        if self._warned_s is None or now - self._warned_s >= WARNING_EVERY_S:
            others = f" (and {self._unreported - 1} more since the last warning)" if self._unreported > 1 else ""
            logger.warning("kvpolicy: %s%s; the request is recomputed", what, others)
            self._warned_s, self._unreported = now, 0
        if self._in_a_row[direction] >= MAX_FAILURES_IN_A_ROW and self._suspended_until_s is None:
            self._suspend(direction, now)

    def _suspend(self, direction: Direction, now: float) -> None:
        self._suspended_until_s = now + self._suspension_s
        logger.warning(
            "kvpolicy: %d %ss in a row failed; nothing is swapped for %g s (counted as fallback 'copies_failing')",
            self._in_a_row[direction],
            direction,
            self._suspension_s,
        )
        self._suspension_s = min(2 * self._suspension_s, MAX_SUSPENSION_S)
