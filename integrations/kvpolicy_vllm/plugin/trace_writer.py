"""Records a trace from a running scheduler at negligible cost: makes the rows and writes them to disk.

The scheduler appends plain rows to bounded queues; a thread writes them as Parquet parts. If the disk is slow or full,
rows that do not fit are dropped and counted; the scheduler never waits.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from kvpolicy.attribution.ledger import OpenPreemption, Step
from kvpolicy.events import Outcome
from kvpolicy.order import Choice
from kvpolicy.policy.decision import HOST_TIER
from kvpolicy.trace import (
    SCHEMAS,
    Header,
    Row,
    decision_row,
    displacement_row,
    from_rows,
    outcome_row,
    request_row,
    step_row,
    transfer_row,
    write_part,
)
from kvpolicy.trace.resolution import coarse
from kvpolicy.trace.upkeep import MERGED_PARTS, Size, Upkeep, hold_header
from kvpolicy_vllm.plugin.forward_times import ForwardTimes
from kvpolicy_vllm.plugin.host_copies import Settled
from kvpolicy_vllm.plugin.messages import Forward
from kvpolicy_vllm.plugin.observers import Observer, Pending, Tally
from kvpolicy_vllm.plugin.step_parts import fill_parts
from kvpolicy_vllm.plugin.step_sampler import StepSampler
from kvpolicy_vllm.plugin.token_times import TokenTimes

logger = logging.getLogger(f"vllm.{__name__}")


class RowWriter(Protocol):
    """Receiver of a trace's rows."""

    dropped: int
    """Number of rows that could not be kept."""

    @property
    def size(self) -> Size | None:
        """What the trace takes on disk, where that is looked at."""
        ...

    def add(self, table: str, row: Row) -> None: ...

    def flush_soon(self) -> None: ...

    def close(self) -> None: ...


SHOW_STEPS = 256
"""Steps between two looks at what the trace takes on disk."""

Marks = Callable[[Any], Mapping[str, Any]]
"""What a request says of itself: columns of ``requests`` that are named in
:data:`kvpolicy.trace.schemas.ABSENT_COLUMNS`, as arguments of :func:`kvpolicy.trace.request_row`."""


class TraceRecorder(Observer):
    """Makes the rows of a trace from events. ``anonymous`` maps a request id to its name in the trace; ``marks``: what
    a request says of itself; ``ranks``: how many workers time each forward pass. ``step_share``: share of the quiet
    steps that are recorded, drawn with ``seed``."""

    trouble = "an event could not be recorded (counted as records_dropped)"
    given_up = "recording failed too often in a row: the trace ends here"

    def __init__(
        self,
        recorder: RowWriter,
        anonymous: Callable[[str], str],
        core: str,
        tally: Tally,
        marks: Marks,
        ranks: int = 1,
        step_share: float = 1.0,
        seed: int = 0,
    ) -> None:
        self.recorder = recorder
        self._times = ForwardTimes(ranks, partial(recorder.add, "steps"))
        self._sampler = StepSampler(step_share, seed, self._times.add) if step_share < 1 else None
        self._marks = marks
        self._anonymous = anonymous
        self._core = core
        self._tally = tally
        self._dropped = 0
        self._displacements = 0
        self._tokens = TokenTimes()

    def begin_afresh(self) -> bool:
        self._tally.add("records_dropped")
        self._tokens.incomplete = True
        return super().begin_afresh()

    def close(self) -> None:
        self._release_steps()
        self.recorder.close()
        self._count_dropped()

    def _count_dropped(self) -> None:
        if self.recorder.dropped > self._dropped:
            self._tally.add("records_dropped", self.recorder.dropped - self._dropped)
            self._dropped = self.recorder.dropped

    def _show_size(self) -> None:
        if self.recorder.size is not None:
            self._tally.set("trace_bytes", self.recorder.size.bytes)
            self._tally.set("trace_files", self.recorder.size.files)

    # ---- requests ----

    def arrived(self, request: Any, now: float) -> None:
        self._tokens.arrived(request.request_id, now)

    def preempted(self, request: Any) -> None:
        self._tokens.preempted.append(request.request_id)

    def ended(self, request: Any, now: float) -> None:
        life = self._tokens.ended(request, now)
        if life is None:
            return
        row = request_row(
            request=self._anonymous(request.request_id),
            arrival_s=life.arrival_s,
            first_token_s=life.first_token_s,
            last_token_s=life.last_token_s,
            prompt_tokens=request.num_prompt_tokens,
            output_tokens=request.num_output_tokens,
            preemptions=request.num_preemptions,
            recomputed_tokens=life.recomputed_tokens,
            loaded_tokens=life.loaded_tokens,
            finish=str(request.get_finished_reason()),
            **self._marks(request),
        )
        self.recorder.add("requests", row)

    def repeated(self, step: Step[OpenPreemption]) -> None:
        for part in step.repeated:
            life = self._tokens.of(str(part.opened.request))
            if life is not None:
                life.recomputed_tokens += part.tokens

    def loaded(self, request_id: str, tokens: int) -> None:
        life = self._tokens.of(request_id)
        if life is not None:
            life.loaded_tokens += tokens

    prompt_loaded = loaded

    # ---- steps ----

    def scheduled(self, step: Step[OpenPreemption], output: Any, scheduler: Any) -> None:
        """Fill in the numbers of running and waiting requests and of used blocks."""
        step.running_requests = len(scheduler.running)
        step.waiting_requests = max(0, scheduler.get_num_unfinished_requests() - step.running_requests)
        pool = scheduler.kv_cache_manager.block_pool
        step.used_blocks = pool.num_gpu_blocks - pool.get_num_free_blocks()

    def done(self, step: Step[OpenPreemption], output: Any, scheduler: Any, began_s: float, now: float) -> None:
        fill_parts(step, output)
        self._tokens.step(output, scheduler.requests, now)
        if self.recorder.dropped > self._dropped:
            self._count_dropped()
        if not (step.scheduled_tokens or step.lost or step.saves or scheduler.requests):
            return
        self.failures = 0
        row = step_row(step, began_s, now)
        if self._sampler is None:
            self._times.add(row)
        else:
            self._sampler.add(row)
        if step.number % SHOW_STEPS == 0:
            self._show_size()

    def forwards_timed(self, forwards: Sequence[Forward]) -> None:
        if failed := self._times.reported(forwards):
            self._tally.add("untimed_forwards", failed)

    def _release_steps(self) -> None:
        if self._sampler is not None:
            self._sampler.release()
        self._times.release()

    def idle(self) -> None:
        self._release_steps()
        self._show_size()
        self.recorder.flush_soon()
        self._count_dropped()

    # ---- preemptions ----

    def executed(self, pending: Pending) -> None:
        identity = pending.identity
        row = decision_row(
            pending.situation,
            pending.decision,
            preemption_id=identity.preemption_id,
            decision_id=f"{identity.preemption_id}-0",
            request=self._anonymous(identity.request_id),
            generation=identity.generation,
            step=identity.step,
            overflow_id=f"{self._core}-{identity.step}",
            **identity.labels,
        )
        self.recorder.add("decisions", row)

    def displacing(self, order: str, choice: Choice, id_of: Callable[[int], str], step: int, now: float) -> None:
        self._displacements += 1
        row = displacement_row(
            choice,
            displacement_id=f"{self._core}-{self._displacements}",
            step=step,
            time_s=now,
            order=order,
            name_of=lambda number: self._anonymous(id_of(number)),
        )
        self.recorder.add("displacements", row)

    def closed(self, opened: OpenPreemption, outcome: Outcome) -> None:
        self.recorder.add("outcomes", outcome_row(outcome))

    def copied(self, settled: Settled, step: int) -> None:
        transfer = replace(settled.slowest, bytes=settled.moved_bytes, ok=settled.ok)
        if self._sampler is not None:
            self._sampler.copied(transfer.start_s, transfer.end_s)
        row = transfer_row(transfer, preemption_id=settled.copy.preemption_id, step=step, tier=HOST_TIER)
        self.recorder.add("transfers", row)


def pseudonym(salt: bytes, request_id: str) -> str:
    """A request's name in traces: a keyed hash, so that the request cannot be identified by it."""
    return hashlib.blake2b(request_id.encode(), key=salt, digest_size=8).hexdigest()


MIN_PART_S = 0.5
"""Minimum seconds between parts that are requested by :meth:`TraceWriter.flush_soon`, when the engine idles."""


class TraceWriter:
    """Writes rows into part files. One per engine core.

    A part is written every ``part_rows`` rows or ``part_s`` seconds, so that a killed server loses no more than that,
    and within half a second of :meth:`flush_soon`.
    """

    def __init__(
        self,
        core: Path,
        header: Header,
        part_rows: int = 5000,
        part_s: float = 2.0,
        max_waiting: int = 100_000,
        close_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        upkeep: Upkeep | None = None,
    ) -> None:
        """``upkeep``: merges the parts and holds the trace to its limits, and numbers are coarser
        (:mod:`kvpolicy.trace.resolution`); None: all stays as it was recorded."""
        self.core = core
        self.dropped = 0
        self.size: Size | None = None
        """What the trace takes on disk; None before it was looked at, and without upkeep."""
        self._upkeep = upkeep
        self._unkept_parts = 0
        self._held_header: int | None = None
        self._header = header
        self._part_rows = part_rows
        self._part_s = part_s
        self._max_waiting = max_waiting
        self._close_s = close_s
        self._clock = clock
        self._waiting: dict[str, deque[Row]] = {name: deque() for name in SCHEMAS}
        self._parts = dict.fromkeys(SCHEMAS, 0)
        self._has_header = False
        self._complained = self._complained_of_upkeep = False
        self._writing = threading.Lock()
        self._writing_rows = 0
        """Number of rows that are off the queue but not yet on disk."""
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvpolicy-trace", daemon=True)
        self._thread.start()

    def add(self, table: str, row: Row) -> None:
        """Queue one row, or drop and count it where too many wait."""
        waiting = self._waiting[table]
        if len(waiting) >= self._max_waiting:
            self.dropped += 1
        else:
            waiting.append(row)

    def flush_soon(self) -> None:
        """Have the thread write the rows added so far, as when the engine becomes idle. Does not wait."""
        self._wake.set()

    def flush(self) -> None:
        """Write all rows added so far. For tests and tools: waits for the disk."""
        with self._writing:
            for name in SCHEMAS:
                while self._waiting[name]:
                    self._write(name)

    def close(self) -> None:
        """Write the rest, once. Waits ``close_s`` for the disk; rows not written by then are dropped and counted."""
        self._stop.set()
        self._wake.set()
        self._thread.join(timeout=self._close_s)
        if self._thread.is_alive():
            unwritten = self._writing_rows + sum(map(len, self._waiting.values()))
            self.dropped += unwritten
            logger.warning(
                "kvpolicy: trace %s was not written within %g s at the end, dropping %d records",
                self.core, self._close_s, unwritten,
            )  # fmt: skip

    def _run(self) -> None:
        last_write_s, requested = self._clock(), False
        while not self._stop.is_set():
            if self._wake.wait(MIN_PART_S / 5):  # not cleared unseen: a request may come just after the time is over
                self._wake.clear()  # before writing: a request meanwhile may be for later rows
                requested = True
            since_s = self._clock() - last_write_s
            due = since_s >= (min(MIN_PART_S, self._part_s) if requested else self._part_s)
            if (
                requested and not due
            ):  # stays requested; a server that idles after every request must not write a part for each
                self._stop.wait(MIN_PART_S / 5)
            if due or any(len(rows) >= self._part_rows for rows in self._waiting.values()):
                last_write_s, requested = self._clock(), False
                self.flush()
                self.keep_up()
        self.flush()  # in this thread, not in close(): a disk that hangs must not block the caller
        if self._held_header is not None:
            os.close(self._held_header)

    def keep_up(self) -> None:
        """Merge small parts, and remove the oldest, once enough were written since."""
        if self._upkeep is None or self._unkept_parts < MERGED_PARTS:
            return
        self._unkept_parts = 0
        try:
            try:
                self._upkeep.merge()
            finally:
                self.size = self._upkeep.retain()
        # As in _write: a trace that cannot be merged is written on.
        except Exception as error:  # noqa: BLE001
            if not self._complained_of_upkeep:
                self._complained_of_upkeep = True
                logger.warning("kvpolicy: trace %s cannot be merged or cut: %s", self.core, error)

    def _write(self, name: str) -> None:
        waiting = self._waiting[name]
        rows = [waiting.popleft() for _ in range(min(len(waiting), self._part_rows))]
        self._writing_rows = len(rows)
        try:
            if not self._has_header:
                self._header.write(self.core)
                self._has_header = True
            elif not (self.core / "header.json").exists():
                raise FileNotFoundError(f"{self.core} was removed while it was recorded into")
            if self._held_header is None and self._upkeep is not None:
                self._held_header = hold_header(self.core)
            table = from_rows(name, rows)
            write_part(self.core, name, self._parts[name], table if self._upkeep is None else coarse(table))
            self._parts[name] += 1
            self._unkept_parts += 1
        # The thread must survive any error: a full disk may have space again later. Dropped rows are counted.
        except Exception as error:  # noqa: BLE001
            self.dropped += len(rows)
            if not self._complained:
                self._complained = True
                logger.warning("kvpolicy: cannot write trace %s, dropping records: %s", self.core, error)
        self._writing_rows = 0
