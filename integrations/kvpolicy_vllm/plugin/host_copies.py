"""Copies of preempted requests on the scheduler side: what is kept for each, the workers' jobs, and their failures.

Each rank's worker executes jobs in order. Therefore the slots of a forgotten copy may be reused at once: the new save
comes after all jobs of the old copy. Only a copy that is being *loaded* keeps its slots until every rank has reported
that the load has ended.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field

from kvpolicy.caching import CachingPolicy
from kvpolicy.events import CACHE_COPY, TOOL_COPY, Preemption
from kvpolicy.host_store import CopyQueues, HostBlock, HostCopy, HostStore, by_owner
from kvpolicy_vllm.plugin.block_tables import Position
from kvpolicy_vllm.plugin.messages import NO_REQUEST, NO_SLOT, Direction, Job, StepJobs, Transfer
from kvpolicy_vllm.plugin.pinned_blocks import PinnedBlocks

logger = logging.getLogger(f"vllm.{__name__}")

MAX_FAILURES_IN_A_ROW = 5
FIRST_SUSPENSION_S = 10.0
MAX_SUSPENSION_S = 600.0
"""Suspensions double in length while no copy succeeds between them, up to this."""
WARNING_EVERY_S = 60.0
NOTHING, NOTHING_IDLE = StepJobs(-1), StepJobs(-1, idle=True)
"""Shared jobs of steps without work for the workers: NOTHING, and NOTHING_IDLE where the step computes nothing."""


@dataclass(slots=True, eq=False, kw_only=True)
class Copy(HostCopy):
    """Saved KV of one request, from one preemption, or what it found of other requests'."""

    request_id: str
    preemption_id: str
    saved: bool = False
    """Whether any save of its own was made."""
    load_into: tuple[int, ...] = ()
    """Device blocks for its load."""
    load_tokens: int = 0
    situation: Preemption | None = None
    """At its preemption."""
    asked_at_resume: tuple[int, int] | None = None
    """Local hit and bytes of loads under way when the policy was last asked whether to load it."""
    loads: bool = True
    """Its answer."""
    positions: tuple[Position, ...] | None = None
    """Of its blocks in the request's block tables, in order; None where they are the first ones of the only table."""
    orphan: bool = False
    """Its request is gone or its content stale. It is released as soon as no worker reads its slots."""


@dataclass(frozen=True, slots=True)
class Settled:
    """All ranks have finished one job."""

    copy: Copy
    """The copy that the job is accounted to."""
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
    def slowest_s(self) -> float:
        """Seconds of that transfer."""
        return self.slowest.end_s - self.slowest.start_s

    @property
    def moved_bytes(self) -> int:
        """Bytes moved over all ranks."""
        return sum(transfer.bytes for transfer in self.transfers if transfer.ok)


@dataclass(slots=True, eq=False)
class Sent:
    """A job that was sent to the workers and that not all ranks have reported as finished."""

    copy: Copy
    direction: Direction
    blocks: list[HostBlock]
    unread: set[int] = field(default_factory=set)
    """Device blocks of a save that no step was told of. They are free on the scheduler side, so a later step may write
    to them while they are still being saved."""
    acks: list[Transfer] = field(default_factory=list)


class CopyBook:
    """All copies of one engine core. ``ranks``: how many workers must finish a transfer. ``cache``: what slots that no
    copy needs are used by; None for nothing."""

    def __init__(self, slots: int, ranks: int, block_bytes: int, cache: CachingPolicy | None = None) -> None:
        self.pool: HostStore = HostStore(slots, cache)
        self.ranks = ranks
        self.block_bytes = block_bytes
        self.segment_bytes = block_bytes
        """Contiguous bytes of a block."""
        self._cache = Copy(0, request_id=NO_REQUEST, preemption_id=CACHE_COPY)
        """What saves of contents that no copy needs are accounted to."""
        self.health = CopyHealth()
        self.saved: Callable[[Iterable[HostBlock]], None] | None = None
        """Called with the contents that a save has brought to host memory."""
        self._next_id = 0
        self._of_request: dict[str, Copy] = {}
        self._saves: list[HostBlock] = []
        """Blocks whose save has not been sent to the workers."""
        self._loads: list[Copy] = []
        """Copies whose load has not been sent to the workers."""
        self._sent: dict[int, Sent] = {}
        """Jobs under way, by number."""
        self._unread_saves: dict[int, Sent] = {}
        """Those that are saves with blocks that no step was told of."""
        self.begun: list[Copy] = []
        """Copies made since jobs were taken last."""
        self.given_up: list[Copy] = []
        self.loading = 0
        """Number of copies being loaded, including those of requests that are gone: their end must be waited for."""
        self.queues = queues = CopyQueues(block_bytes)
        self.pool.admission.takes_saves = lambda: queues.takes_saves
        self.pool.admission.takes_pins = lambda: queues.takes_pins
        self.pinned: PinnedBlocks | None = None
        """Holds the device blocks of unfinished saves, so that no step writes to them; None where the workers save a
        block before the step that is given it writes to it. The scheduler sets it."""

    def of(self, request_id: str) -> Copy | None:
        return self._of_request.get(request_id)

    @property
    def under_way(self) -> bool:
        """Whether workers may still be reading or writing device blocks."""
        return self.loading > 0 or bool(self._sent)

    def queued_bytes(self, direction: Direction) -> int:
        """Bytes of one rank that are being copied or wait for the link."""
        return self.queues.bytes(direction)

    def keep(
        self,
        request_id: str,
        preemption_id: str,
        tokens: int,
        contents: Iterable[tuple[Hashable | None, int]],
        gain_per_block: float | None = None,
    ) -> Copy:
        """Keep what a request is about to lose. ``contents``: hash and device block of each of its blocks, in order;
        without a hash a block is saved at once, for which the caller has checked that slots can be had.
        ``gain_per_block``: see :class:`kvpolicy.host_store.HostCopy`."""
        self.forget(request_id)
        copy = Copy(
            tokens, self._number(), request_id=request_id, preemption_id=preemption_id, gain_per_block=gain_per_block
        )
        self._of_request[request_id] = copy
        self.begun.append(copy)
        self._queue_saves(self.pool.add(copy, contents))
        return copy

    def lost(self, block_ids: Iterable[int]) -> None:
        """These device blocks are given away: what copies need of them is saved before the next step computes."""
        self._queue_saves(self.pool.lost(block_ids))

    def take_given_up(self) -> list[Copy]:
        """Copies that were given up since the last call, because slots were short."""
        given_up, self.given_up = self.given_up, []
        return given_up

    def loadable_tokens(self, request_id: str, wanted: int, local: int) -> int:
        """Number of tokens between ``local`` and ``wanted`` that a load would bring back. Changes nothing."""
        copy = self._of_request.get(request_id)
        if copy is None or copy.loading:
            return 0
        return max(0, min(copy.tokens, wanted) - local)

    def begin_load(self, request_id: str, wanted: Sequence[int], block_ids: tuple[int, ...], tokens: int) -> None:
        """Queue the load of ``tokens`` tokens into ``block_ids``. ``wanted``: the indices of the copy's blocks that
        are loaded there, one each."""
        copy = self._of_request[request_id]
        copy.load_tokens = tokens
        self._queue_load(copy, wanted, block_ids)

    def load_contents(self, request_id: str, keys: Sequence[Hashable], block_ids: tuple[int, ...], tokens: int) -> Copy:
        """Queue the load of contents of other requests, of ``tokens`` tokens, into ``block_ids``; the copy needs them
        until it has ended."""
        copy = Copy(0, self._number(), request_id=request_id, preemption_id=CACHE_COPY)
        self._of_request[request_id] = copy
        self.pool.hold(copy, keys)
        copy.load_tokens = tokens
        self._queue_load(copy, range(len(keys)), block_ids)
        return copy

    def _queue_load(self, copy: Copy, wanted: Sequence[int], block_ids: tuple[int, ...]) -> None:
        self._queue_saves(self.pool.begin_load(copy, wanted))
        self.loading += 1
        copy.load_into = block_ids
        self.queues.add("load", len(block_ids))
        self._loads.append(copy)

    def save_for_tool(self, contents: Sequence[tuple[Hashable | None, int]]) -> Copy:
        """Queue a save for no request, as a tool that measures does. No step waits for it: the device blocks have to
        stay as they are until it has ended. The copy is kept until it is released or slots are short.

        ``contents``: hash and device block; later copies find contents by their hashes.
        """
        copy = Copy(0, self._number(), request_id=NO_REQUEST, preemption_id=TOOL_COPY)
        self._queue_saves(self.pool.add(copy, contents))
        self.lost(block_id for _, block_id in contents)
        return copy

    def load_for_tool(self, copy: Copy, block_ids: tuple[int, ...]) -> None:
        """Queue the load of a tool's copy into device blocks that nobody reads."""
        self._queue_load(copy, range(len(block_ids)), block_ids)

    def forget(self, request_id: str) -> Copy | None:
        """The request no longer needs its copy: resumed without it, finished or aborted."""
        copy = self._of_request.pop(request_id, None)
        if copy is None:
            return None
        if copy.loading:
            copy.orphan = True
        else:
            self.pool.release(copy)
        return copy

    def forget_all(self) -> None:
        """Forget all copies because they are stale, as after a reset."""
        # Loads that have not been sent are still sent, since vLLM waits for their completion.
        for request_id in list(self._of_request):
            self.forget(request_id)
        self.pool.forget_keys()
        if self.pinned is not None:  # what is still being saved will not be loaded
            self.pinned.release_others(())

    def take_jobs(self, step: int, idle: bool, taken_of: Callable[[Iterable[int]], Set[int]]) -> StepJobs:
        """The workers' jobs in this step. ``taken_of``: those of some device blocks that a request has after
        scheduling."""
        if not (self._saves or self._loads or self._unread_saves):  # true in nearly every step
            return NOTHING_IDLE if idle else NOTHING
        saves = tuple(self._save_jobs())
        self._release_saved()
        loads = tuple(self._load_job(copy) for copy in self._loads)
        self._loads = []
        overwritten = self._overwritten(taken_of)
        if not (saves or loads or overwritten):
            return NOTHING_IDLE if idle else NOTHING
        return StepJobs(step, saves, loads, idle, overwritten)

    def take_begun(self) -> list[Copy]:
        """Copies made since the last call that needed no save yet. Call after :meth:`take_jobs`."""
        if not self.begun:
            return []
        begun, self.begun = self.begun, []
        return [copy for copy in begun if not copy.saved]

    def preemption_of(self, job: Job) -> str:
        """The preemption that a job under way is accounted to."""
        return self._sent[job.copy_id].copy.preemption_id

    def acknowledge(self, done: Iterable[Transfer]) -> list[Settled]:
        """Register transfers that workers finished; return jobs that are now finished on all ranks."""
        settled = []
        for transfer in done:
            sent = self._sent.get(transfer.copy_id)
            if sent is None:
                continue
            sent.acks.append(transfer)
            if len(sent.acks) == self.ranks:
                del self._sent[transfer.copy_id]
                self._unread_saves.pop(transfer.copy_id, None)
                settled.append(Settled(sent.copy, sent.direction, tuple(sent.acks)))
                self._settle(sent, transfer.copy_id, settled[-1])
        self._release_saved()
        return settled

    def _release_saved(self) -> None:
        """Give back the device blocks that are held for saves which have ended, or which nobody needs any more."""
        if self.pinned is not None and self.pinned.any:
            sent = {block for one in self._sent.values() if one.direction == "save" for block in one.blocks}
            self.pinned.release_others(sent.union(self._saves))

    def _settle(self, sent: Sent, copy_id: int, settled: Settled) -> None:
        ok = settled.ok
        self.queues.ended(sent.direction, len(sent.blocks), settled.slowest_s if ok else None)
        if sent.direction == "load":
            if self._of_request.get(sent.copy.request_id) is sent.copy:
                del self._of_request[sent.copy.request_id]
            self.loading -= 1
            if not ok and self.pool.cache is not None:  # whoever finds them would fail again
                for block in sent.blocks:
                    self.pool.spoiled(block)
            self.pool.release(sent.copy)
        elif ok:
            if self.saved is not None:
                self.saved(block for block in sent.blocks if block.saved_by == copy_id)
        else:
            for block in sent.blocks:
                self._damage(block)
                if self.pool.cache is not None and block.saved_by == copy_id:
                    self.pool.spoiled(block)

    def _damage(self, block: HostBlock) -> None:
        """The block's save has failed: copies that need it are forgotten. One that is being loaded fails to load."""
        for copy in list(block.holders):
            if not copy.loading:
                self.forget(copy.request_id)
                self.pool.release(copy)  # a tool's is of no request

    def _queue_saves(self, blocks: list[HostBlock]) -> None:
        self._saves += blocks
        if self.pinned is not None:
            self.pinned.hold(blocks)
        self.queues.add("save", len(blocks))
        if self.pool.given_up:
            copy: Copy
            for copy in self.pool.given_up:
                if self._of_request.get(copy.request_id) is copy:
                    del self._of_request[copy.request_id]
                    self.given_up.append(copy)
            self.pool.given_up = []

    def _save_jobs(self) -> Iterator[Job]:
        """One job for each copy that a save is accounted to."""
        saves = by_owner(self._saves, self._cache)
        self.queues.add("save", sum(len(blocks) for _, blocks in saves) - len(self._saves))  # less forgotten ones
        self._saves = []
        for copy, blocks in saves:
            copy.saved = True
            job = self._job(copy, blocks, tuple(block.place for block in blocks))
            for block in blocks:
                block.saved_by = job.copy_id
            self._sent[job.copy_id] = sent = Sent(copy, "save", blocks, set(job.block_ids))
            if copy.preemption_id != TOOL_COPY:
                self._unread_saves[job.copy_id] = sent
            yield job

    def _load_job(self, copy: Copy) -> Job:
        job = self._job(copy, copy.blocks, copy.load_into)
        self._sent[job.copy_id] = Sent(copy, "load", copy.blocks)
        return job

    def _job(self, copy: Copy, blocks: list[HostBlock], block_ids: tuple[int, ...]) -> Job:
        # A worker refuses to load what has no slot; vLLM then recomputes the request.
        slots = tuple(NO_SLOT if block.slot is None else block.slot for block in blocks)
        saved_by = max((block.saved_by for block in blocks), default=0)
        return Job(self._number(), copy.request_id, block_ids, slots, saved_by)

    def _number(self) -> int:
        self._next_id += 1
        return self._next_id

    def _overwritten(self, taken_of: Callable[[Iterable[int]], Set[int]]) -> frozenset[int]:
        """Blocks of unfinished saves that the step may write to. Each is named for its save once: it is saved before
        that step computes, and no later step has to wait for it. Blocks that are pinned are not written to."""
        if self.pinned is not None:
            return frozenset()
        overwritten: set[int] = set()
        for copy_id, sent in list(self._unread_saves.items()):
            if any(block.holders or block.cached for block in sent.blocks):
                taken = taken_of(sent.unread)
                overwritten |= taken
                sent.unread -= taken
            else:  # forgotten
                sent.unread.clear()
            if not sent.unread:
                del self._unread_saves[copy_id]
        return frozenset(overwritten)


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
