"""A made-up worker whose KV cache holds symbols: which token, at which position, under which weights.

A real model hides a wrong KV entry behind tokens that look plausible, and is slow. Here every context position that
a step reads is compared with what has to be there, while saves and loads fail and loads come late at random.
"""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from collections.abc import Set
from typing import Any

import numpy as np
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request

from kvpolicy_vllm.plugin.messages import Direction, Job, StepJobs, Transfer, Transfers

NOTHING, HALF_COPIED = -1, -2
POSITIONS, TOKENS = 1 << 12, 1 << 12
STATE = 1 << 40
"""Above all other symbols."""
WRONG_SHOWN = 20


@dataclasses.dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong with copies: shares of saves and loads that fail, and by how many steps either is late."""

    saves_failing: float = 0.1
    loads_failing: float = 0.15
    max_late_steps: int = 4


NO_FAULTS = Faults(0.0, 0.0, 0)


@dataclasses.dataclass(frozen=True, slots=True)
class Saving:
    """A save that is not at its end."""

    job: Job
    began_step: int
    due_step: int
    unread: dict[int, int]
    """Host slots by device block."""


class SymbolicWorker:
    """Executes each step when it is scheduled, as an engine's worker does; draws its faults from ``seed`` and
    ``rank``. ``clears_first``: whether the step's own writes come before its saves begin, as clearing blocks and
    copying states do on vLLM's model runner v2."""

    def __init__(
        self,
        scheduler: Any,
        requests: list[Request],
        block: int,
        seed: int,
        rank: int = 0,
        faults: Faults = Faults(),
        clears_first: bool = False,
    ) -> None:
        self._scheduler, self._requests, self._faults, self._clears_first = scheduler, requests, faults, clears_first
        self._rng = random.Random(f"faults {seed} {rank}")
        self._texts = {request.request_id: text_of(request) for request in requests}
        self._windows = [getattr(group.kv_cache_spec, "sliding_window", None) for group in _groups(scheduler)]
        self._chunks = [getattr(group.kv_cache_spec, "attention_chunk_size", None) for group in _groups(scheduler)]
        self._sizes = [group.kv_cache_spec.block_size for group in _groups(scheduler)]
        self._keeps_states = [not hasattr(group.kv_cache_spec, "num_kv_heads") for group in _groups(scheduler)]
        # A state takes one place of its block, whatever the tokens that the block stands for.
        kept = zip(self._sizes, self._keeps_states, strict=True)
        width = max([block, *(size for size, is_state in kept if not is_state)])
        self._device = np.full((scheduler.kv_cache_manager.block_pool.num_gpu_blocks, width), NOTHING)
        self._host = np.full((scheduler.kvpolicy.copies.pool.total, width), NOTHING)
        self._saved: set[int] = set()
        """Slots that hold a whole block."""
        self._loading: deque[tuple[int, int, Job, bool]] = deque()
        """Steps in which each load began and ends, the load, and whether it succeeds."""
        self._saving: deque[Saving] = deque()
        self._weights, self._steps, self._turns = 0, 0, 0
        self._wrong: list[str] = []
        self._counts = {"positions_read": 0, "partial_loads": 0, "resets": 0, "reset_when_loaded_and_waiting": 0}
        self._counts["steps_with_held_blocks"] = 0

    def next_turn(self, session: Request) -> None:
        """New input has come for a session, whose text goes on differently from there."""
        name = session.request_id
        self._turns += 1
        rng = random.Random(f"text {name} {self._turns}")
        said = [rng.randrange(1, 1000) for _ in range(session.max_tokens + 1)]
        self._texts[name] = np.array([*session.all_token_ids, *said])

    def weights_changed(self, loaded_and_waiting: int = 0) -> None:
        """No step may come between this and the reset that goes with it. ``loaded_and_waiting``: requests that were
        loaded and not yet admitted when it came."""
        self._weights += 1
        self._counts["resets"] += 1
        self._counts["reset_when_loaded_and_waiting"] += loaded_and_waiting > 0

    @property
    def loading(self) -> int:
        """Loads that are not yet reported."""
        return len(self._loading)

    def found(self) -> dict[str, Any]:
        """What was wrong, and how often something worth testing came about."""
        garbled = [
            request.request_id
            for request in self._requests
            if list(request.all_token_ids) != self._texts[request.request_id][: request.num_tokens].tolist()
        ]
        undecided = len(self._scheduler.kvpolicy.swaps.undecided)
        return self._counts | {"wrong": self._wrong[:WRONG_SHOWN], "garbled": garbled, "undecided": undecided}

    def execute(self, output: Any, sampled: dict[str, bool]) -> ModelRunnerOutput:
        """Blocks that the step may overwrite are saved before its own writes, others as late as they may be. Loads come
        after the step."""
        self._steps += 1
        jobs: StepJobs = output.kv_connector_metadata
        cleared = list(getattr(output, "new_block_ids_to_zero", None) or ())
        done = [] if self._clears_first else self._begin_saves(jobs)
        self._count_held(cleared)
        self.others_write()
        self._device[cleared] = NOTHING
        ends = {name: self._compute(name, count) for name, count in output.num_scheduled_tokens.items()}
        if self._clears_first:
            done = self._begin_saves(jobs)
        for job in jobs.loads:
            self._begin_load(job)
        return ModelRunnerOutput(
            req_ids=list(ends),
            req_id_to_index={name: i for i, name in enumerate(ends)},
            sampled_token_ids=[[int(self._texts[name][end])] if sampled[name] else [] for name, end in ends.items()],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=self._finished(done),
        )

    def _begin_saves(self, jobs: StepJobs) -> list[Transfer]:
        """The transfers of those that fail."""
        done = [transfer for job in jobs.saves for transfer in self._begin_save(job)]
        for saving in self._saving:
            self._read(saving, jobs.overwritten)
        return done

    def _count_held(self, cleared: list[int]) -> None:
        """Where blocks are held until they are saved, none that is being saved may be among those that are cleared."""
        pinned = self._scheduler.kvpolicy.copies.pinned
        self._counts["steps_with_held_blocks"] += pinned is not None and pinned.any
        lost = {block for saving in self._saving for block in saving.unread}.intersection(cleared)
        if lost and self._clears_first and not self._counts["resets"]:  # after a reset nobody needs them
            self._wrong.append(f"step {self._steps}: blocks {sorted(lost)} are cleared while they are saved")

    def others_write(self) -> None:
        """Called before a step computes: nobody else writes to the device here."""

    def _compute(self, name: str, count: int) -> int:
        """Read the context, write ``count`` positions after it; returns where they end."""
        end = self._scheduler.requests[name].num_computed_tokens
        start = end - count
        right = self.right(name, end)
        for group, table in enumerate(self._scheduler.kv_cache_manager.get_block_ids(name)):
            if self._keeps_states[group]:
                self._compute_state(name, group, np.array(table), start, right)
            else:
                self._compute_layers(name, group, np.array(table), start, right)
        self._counts["positions_read"] += start
        return end

    def right(self, name: str, end: int) -> np.ndarray:
        """What has to be at the first ``end`` positions of a request."""
        return (self._weights * TOKENS + self._texts[name][:end]) * POSITIONS + np.arange(end)

    def _compute_layers(self, name: str, group: int, table: np.ndarray, start: int, right: np.ndarray) -> None:
        """Of layers that attend to everything, to a window that ends with the token computed, or to the tokens of its
        chunk."""
        window, chunk, size = self._windows[group], self._chunks[group], self._sizes[group]
        first = 0 if window is None else max(0, start - window + 1)
        positions = np.arange(first if chunk is None else start // chunk * chunk, len(right))
        blocks, right = table[positions // size], right[positions]
        there, old = self._device[blocks, positions % size], positions < start
        different = np.flatnonzero((there != right) & old)
        if different.size:
            at = different[0]
            self._wrong.append(
                f"step {self._steps}, {name}, group {group}: {different.size} of {old.sum()} positions, first "
                f"{positions[at]}: {_named(there[at])} instead of {_named(right[at])}"
            )
        self._device[blocks[~old], positions[~old] % size] = right[~old]

    def _compute_state(self, name: str, group: int, table: np.ndarray, start: int, right: np.ndarray) -> None:
        """Of layers that keep a state: that after the last token before this step, named after that token, is read from
        that token's block, and the one after this step is written to its last token's."""
        size, end = self._sizes[group], len(right)
        if start:
            there, wanted = self._device[table[(start - 1) // size], 0], STATE + right[start - 1]
            if there != wanted:
                self._wrong.append(
                    f"step {self._steps}, {name}, group {group}: {_named(there)} instead of {_named(wanted)}"
                )
        self._device[table[(end - 1) // size], 0] = STATE + right[end - 1]

    def _begin_save(self, job: Job) -> list[Transfer]:
        """The transfer where the save fails, at once; nothing where it goes on."""
        ok = self._rng.random() >= self._faults.saves_failing
        self._host[list(job.slots)] = HALF_COPIED
        for earlier in self._saving:  # of a forgotten copy whose slots are the new one's: it is saved before that one
            for block in [block for block, slot in earlier.unread.items() if slot in job.slots]:
                del earlier.unread[block]
        if not ok:
            self._saved -= set(job.slots)
            return [self._transfer(job, "save", False)]
        self._saved |= set(job.slots)
        late = self._rng.randint(0, self._faults.max_late_steps)
        self._saving.append(
            Saving(job, self._steps, self._steps + late, dict(zip(job.block_ids, job.slots, strict=True)))
        )
        return []

    def _read(self, saving: Saving, blocks: Set[int]) -> None:
        for block in [block for block in saving.unread if block in blocks]:
            self._host[saving.unread.pop(block)] = self._device[block]

    def _finish_saves(self, until_step: int, due_step: int) -> list[Transfer]:
        """Read the rest of all saves that began by ``until_step`` or are due by ``due_step``, in order."""
        done = []
        while self._saving and (self._saving[0].began_step <= until_step or self._saving[0].due_step <= due_step):
            saving = self._saving.popleft()
            self._read(saving, saving.unread.keys())
            done.append(self._transfer(saving.job, "save", True))
        return done

    def _begin_load(self, job: Job) -> None:
        tables = self._scheduler.kv_cache_manager.get_blocks(job.request_id).blocks
        held = [block.block_id for table in tables for block in table if not block.is_null]
        self._counts["partial_loads"] += len(job.block_ids) < len(held)
        ok = self._saved.issuperset(job.slots) and self._rng.random() >= self._faults.loads_failing
        self._loading.append((self._steps, self._steps + self._rng.randint(0, self._faults.max_late_steps), job, ok))

    def _finished(self, done: list[Transfer]) -> KVConnectorOutput:
        """Loads touch host and device as late as they may, so that nothing may be given away before."""
        failed: list[Job] = []
        finished: set[str] = set()
        done += self._finish_saves(-1, self._steps)
        while self._loading and self._loading[0][1] <= self._steps:
            began_step, _, job, ok = self._loading.popleft()
            done += self._finish_saves(began_step, self._steps)  # a load waits for all saves that began before it
            self._device[list(job.block_ids)] = self._host[list(job.slots)] if ok else HALF_COPIED
            done.append(self._transfer(job, "load", ok))
            finished.add(job.request_id)
            failed += [] if ok else [job]
        return KVConnectorOutput(
            finished_recving=finished or None,
            kv_connector_worker_meta=Transfers(done) if done else None,
            **_failures(failed),
        )

    def _transfer(self, job: Job, direction: Direction, ok: bool) -> Transfer:
        size = self._scheduler.kvpolicy.copies.block_bytes * len(job.slots)
        return Transfer(job.copy_id, direction, ok, size, 1, size, False, 0, 0.0, 0.0, 0.0, "" if ok else "made up")


def text_of(request: Request) -> np.ndarray:
    """The prompt and all that the request will ever say: its own words, so that no two texts are alike by chance."""
    rng = random.Random(f"text {request.request_id}")
    said = [rng.randrange(1, 1000) for _ in range(request.max_tokens + 1)]
    return np.array([*request.prompt_token_ids, *said])


def _failures(failed: list[Job]) -> dict[str, Any]:
    """vLLM 0.32 and later take failures by request, earlier versions by block."""
    if any(field.name == "failed_recving" for field in dataclasses.fields(KVConnectorOutput)):
        return {"failed_recving": {job.request_id for job in failed}}
    return {"invalid_block_ids": {block for job in failed for block in job.block_ids}}


def _groups(scheduler: Any) -> Any:
    return scheduler.kv_cache_config.kv_cache_groups


def _named(symbol: int) -> str:
    if symbol >= STATE:
        return f"the state after {_named(symbol - STATE)}"
    if symbol < 0:
        return {NOTHING: "nothing", HALF_COPIED: "half a copy"}[int(symbol)]
    rest, position = divmod(int(symbol), POSITIONS)
    weights, token = divmod(rest, TOKENS)
    return f"token {token} of position {position} under weights {weights}"
