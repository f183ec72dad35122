"""Sets up one state in a live engine and measures one window of it.

A window begins with the step in which the victim is preempted and ends when the victim has emitted a few more tokens.
If anything else happens to a request in between, the window is discarded, with the reason.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from vllm import SamplingParams
from vllm.v1.request import RequestStatus

from kvpolicy.errors import InputError, KVPolicyError
from kvpolicy.trace import Row
from kvpolicy_vllm.bench.measurement import Arm, Window
from kvpolicy_vllm.bench.request_blocks import RequestBlocks
from kvpolicy_vllm.bench.states import State, free_blocks_for, running_for, waiting_prompt_tokens
from kvpolicy_vllm.bench.tool_copies import ToolCopies
from kvpolicy_vllm.plugin.engine_config import why_not_priced

WINDOW_TOKENS = 4
"""Tokens the victim emits before its window ends."""
MAX_WINDOW_S = 60.0
MAX_PAUSE_STEPS = 32
OUTPUT_TOKENS = 100_000
"""Output tokens of every request, so many that none finishes by itself; limited by the model's length."""


class WindowError(KVPolicyError, RuntimeError):
    """The engine did not reach the situation that a window needs."""


class WindowDriver:
    """Drives one in-process engine whose scheduler is kvpolicy's.

    ``llm``: a :class:`vllm.LLM` with ``VLLM_ENABLE_V1_MULTIPROCESSING=0``.
    """

    def __init__(self, llm: Any, seed: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.engine = llm.llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        if reason := why_not_priced(self.scheduler.vllm_config, self.scheduler.kv_cache_config):
            raise InputError(f"costs are measured on models whose layers are understood; of this one's: {reason}")
        self.controller = self.scheduler.kvpolicy
        self.tables = RequestBlocks(self.scheduler)
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.model_tokens = int(self.scheduler.max_model_len)
        self.block_size = self.tables.block_size
        self._vocabulary = int(llm.llm_engine.model_config.get_vocab_size())
        self._seed = seed
        self._clock = clock
        self._held_blocks: list[Any] = []
        self.tool_copies = ToolCopies(self.controller.copies, self.pool)
        self._names: list[str] = []
        self._count = 0
        self._last_step_end_s = clock()

    # ---- windows ----

    def measure(self, state: State, arm: Arm, repeat: int, attempt: int = 0, pause_steps: int = 1) -> Window:
        """Measure one window of ``state``. ``pause_steps``: for how many steps arm ``none`` pauses the victim."""
        rng = random.Random(f"{self._seed}/{state.state_id}/{arm}/{repeat}/{attempt}")
        try:
            scene = self._set_up(state, rng)
            return scene.measure(arm, repeat, min(pause_steps, MAX_PAUSE_STEPS))
        finally:
            self._clear()

    def undisturbed(self, state: State, repeat: int, steps: int) -> Window:
        """Measure ``steps`` steps of the running requests without a preemption, for the machine's own noise."""
        rng = random.Random(f"{self._seed}/{state.state_id}/undisturbed/{repeat}")
        try:
            self._set_up(state, rng)
            first_step, start_s = self.next_step, self._clock()
            for _ in range(steps):
                self.step()
            duration_s = self._clock() - start_s
            return Window(
                state.state_id,
                "undisturbed",
                repeat,
                state.cause,
                first_step,
                self.next_step - 1,
                duration_s,
                None,
                "noise",
            )
        finally:
            self._clear()

    def record(self, row: Row) -> None:
        """Write the row of a window into the trace."""
        self.controller.recorder.add("windows", row)

    # ---- what a scene needs ----

    @property
    def next_step(self) -> int:
        """Number that the next step will have in table ``steps``."""
        return int(self.controller.next_step)

    @property
    def now_s(self) -> float:
        return self._clock()

    def step(self) -> None:
        """Run one engine step. Time spent here since the last step is left out of its duration."""
        self.controller.leave_out(max(0.0, self._clock() - self._last_step_end_s))
        self.engine.step()
        self._last_step_end_s = self._clock()

    def leave_free(self, blocks: int) -> None:
        """Hold blocks back, or release some, until ``blocks`` are free."""
        free = self.pool.get_num_free_blocks()
        if free > blocks:
            self._held_blocks += self.pool.get_new_blocks(free - blocks)
        elif free < blocks:
            released, self._held_blocks = self._held_blocks[: blocks - free], self._held_blocks[blocks - free :]
            self.pool.free_blocks(released)

    def keep_free(self, blocks: int) -> None:
        """Release blocks until ``blocks`` are free: over a slow link a window outlasts the blocks it began with."""
        if self.pool.get_num_free_blocks() < blocks:
            self.leave_free(blocks)

    def add(self, tokens: int, rng: random.Random, beginning: Sequence[int] = ()) -> Any:
        """Add a request with a random prompt after ``beginning``; return the scheduler's object for it."""
        known_ids = set(self.scheduler.requests)
        self._count += 1
        name = f"profile-{self._count}"
        prompt = [*beginning, *(rng.randrange(1, self._vocabulary) for _ in range(tokens - len(beginning)))]
        max_tokens = min(OUTPUT_TOKENS, self.model_tokens - tokens)
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        self.engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        self._names.append(name)
        (request_id,) = set(self.scheduler.requests) - known_ids
        return self.scheduler.requests[request_id]

    def is_alone(self, block: int) -> bool:
        """Whether only one request holds the block."""
        return bool(self.pool.blocks[block].ref_cnt == 1)

    def hashed_blocks_of(self, request: Any) -> list[tuple[Any, int]]:
        """Hash and number of each of the request's full blocks."""
        full_blocks = int(request.num_computed_tokens) // self.block_size
        blocks = [self.pool.blocks[block_id] for block_id in self.tables.of(request)[:full_blocks]]
        return [(block.block_hash, int(block.block_id)) for block in blocks if block.block_hash is not None]

    def _set_up(self, state: State, rng: random.Random) -> Scene:
        state = self.tables.reachable(state, self.model_tokens)
        self.tool_copies.take_blocks(state.tool_blocks)
        others = [self.add(tokens, rng) for tokens in state.other_prompts]
        shared_tokens: list[int] = []
        if state.shared_blocks:
            shared_tokens = list(others[0].prompt_token_ids[: state.shared_blocks * self.block_size])
            while not others[0].num_output_tokens:
                self.step()  # so that the victim finds its blocks in the prefix cache
        victim = self.add(state.prompt_tokens, rng, shared_tokens)
        while victim.num_output_tokens < max(1, state.decoded_tokens):
            if victim.num_preemptions or any(other.num_preemptions for other in others):
                raise WindowError(f"state {state.state_id} does not fit into {self.pool.num_gpu_blocks} blocks")
            self.step()
        return Scene(self, state, others, victim, rng)

    def _clear(self) -> None:
        """Abort all requests and free all memory, then run idle steps, which take up the time between two windows."""
        self.controller.pin(None, None)
        self.engine.abort_request(self._names)
        self._names = []
        self.pool.free_blocks(self._held_blocks)
        self._held_blocks = []
        self.step()
        self.step_until(
            lambda: not self.controller.copies.under_way and self._free_but_tools(),
            "blocks given back and copies ended",
        )
        self.tool_copies.clear()

    def _free_but_tools(self) -> bool:
        free = self.pool.get_num_free_blocks() + len(self.tool_copies.blocks)
        return bool(free >= self.pool.num_gpu_blocks - 1)

    def step_until(self, reached: Callable[[], bool], what: str) -> None:
        """Run steps until ``reached``. Raises WindowError, saying ``what`` was not, after :data:`MAX_WINDOW_S`."""
        deadline = self._clock() + MAX_WINDOW_S
        while not reached():
            if self._clock() > deadline:
                raise WindowError(f"{what}: not reached within {MAX_WINDOW_S:g} s")
            self.step()


class Scene:
    """The requests of one window, running and decoding, the victims last."""

    def __init__(self, driver: WindowDriver, state: State, others: list[Any], victim: Any, rng: random.Random) -> None:
        self.driver = driver
        self.state = state
        staying = len(others) - (state.victims - 1)
        self.others = others[:staying]
        self.victims = [*others[staying:], victim]
        self.waiting: list[Any] = []
        self._rng = rng
        self._steps_out = 0

    def measure(self, arm: Arm, repeat: int, pause_steps: int) -> Window:
        """Preempt the victims as ``arm`` says and step until they have emitted :data:`WINDOW_TOKENS` more tokens."""
        driver, state = self.driver, self.state
        self._advance_to_preemption()
        self._prepare_copies()
        final_tokens = [victim.num_output_tokens + WINDOW_TOKENS for victim in self.victims]
        lost_blocks = [block for victim in self.victims for block in self._lost_blocks(victim)]
        if arm != "none":
            labels = {"state_id": state.state_id, "arm": arm, "repeat": repeat}
            driver.controller.pin(arm, labels)
        first_step, start_s = driver.next_step, driver.now_s
        preemptions = self._preempt_victims(arm, lost_blocks, pause_steps)
        driver.controller.pin(None, None)
        deadline = start_s + MAX_WINDOW_S
        discarded = self._discard_reason(arm)
        while not discarded and any(v.num_output_tokens < n for v, n in zip(self.victims, final_tokens, strict=True)):
            driver.keep_free(self._growth_blocks)
            driver.step()
            self._steps_out += any(victim not in driver.scheduler.running for victim in self.victims)
            discarded = self._discard_reason(arm) or ("no end" if driver.now_s > deadline else "")
        duration_s = driver.now_s - start_s
        if not discarded and any(opened.executed != arm for opened in preemptions):
            discarded = f"{next(opened.executed for opened in preemptions if opened.executed != arm)} was executed"
        # Victims are in order of admission. Where memory lacks, vLLM preempts the one admitted last first. Forced ones
        # go in that order: the last one finds what the others queued.
        preemption_id = preemptions[-1].preemption_id if preemptions else None
        return Window(
            state.state_id, arm, repeat, state.cause, first_step, driver.next_step - 1, duration_s, preemption_id,
            discarded, self._steps_out,
        )  # fmt: skip

    def _advance_to_preemption(self) -> None:
        """Set free memory and waiting requests, then step until the victims can be preempted in the next step.

        At least one step passes after the set-up, so that no preemption is charged with the work of a new request. In
        a natural state the preemption takes place when a request needs a block, and where the victim's blocks are in
        host memory before, when all of them are full.
        """
        driver, state = self.driver, self.state
        driver.leave_free(self._growth_blocks + state.spare_blocks)
        tokens = waiting_prompt_tokens(driver.model_tokens)
        self.waiting = [driver.add(tokens, self._rng) for _ in range(state.waiting)]
        driver.step()
        if state.victims > 1 and state.cause == "memory":
            self._align()
            return
        for _ in range(driver.block_size):
            if self._victim_is_ready():
                return
            driver.step()
        raise WindowError(f"state {state.state_id}: no request needed a block within {driver.block_size} steps")

    def _victim_is_ready(self) -> bool:
        if self.state.stored:
            return self.driver.tables.lacking(self.victims[-1]) > 0
        return self.state.cause == "forced" or bool(self._needing_block())

    def _prepare_copies(self) -> None:
        """Bring to host memory what the state has there, while all requests are paused."""
        driver, state = self.driver, self.state
        load_blocks = round(state.queued_load_share * len(self._lost_blocks(self.victims[-1])))
        if not (state.stored or load_blocks):
            return
        running = list(driver.scheduler.running)
        for request in running:
            driver.scheduler.pause_at_next_step(request.request_id)
        if state.stored:
            driver.tool_copies.store(driver.hashed_blocks_of(self.victims[-1]))
        driver.tool_copies.prepare_load(load_blocks)
        driver.step()
        driver.step_until(lambda: not driver.controller.copies.under_way, "copies in host memory")
        for request in running:
            driver.scheduler.resume_request(request.request_id)

    def _lost_blocks(self, victim: Any) -> list[int]:
        """Blocks that the victim alone holds."""
        return [block for block in self.driver.tables.of(victim) if self.driver.is_alone(block)]

    @property
    def _growth_blocks(self) -> int:
        """Blocks that the running requests may need during a window, over all of their block tables."""
        return self.state.growth_blocks * self.driver.tables.count

    def _align(self) -> None:
        """Pause requests that need a block until all do, so that all of them ask for one in the same step."""
        driver, requests = self.driver, [*self.others, *self.victims]
        for _ in range(2 * driver.block_size):
            for request in self._needing_block():
                if request in driver.scheduler.running:
                    driver.scheduler.pause_at_next_step(request.request_id)
            if not driver.scheduler.running:
                for request in requests:
                    driver.scheduler.resume_request(request.request_id)
                return
            driver.step()
        raise WindowError(f"state {self.state.state_id}: the requests did not need a block in the same step")

    def _needing_block(self) -> list[Any]:
        return [request for request in (*self.others, *self.victims) if self.driver.tables.lacking(request) > 0]

    def _preempt_victims(self, arm: Arm, lost_blocks: list[int], pause_steps: int) -> list[Any]:
        """Run the step in which the victims are preempted; return the open preemptions, none for arm ``none``."""
        driver, state = self.driver, self.state
        names = [victim.request_id for victim in self.victims]
        driver.tool_copies.begin(round(state.queued_save_share * len(self._lost_blocks(self.victims[-1]))))
        if arm == "none":
            for name in names:
                driver.scheduler.pause_at_next_step(name)
            for _ in range(max(1, pause_steps)):
                driver.step()
                self._steps_out += 1
            for name in names:
                driver.scheduler.resume_request(name)
            return []
        # A window leaves memory free for its load, which must not wait for more, as it would under pressure.
        driver.scheduler.loaded_requests.growth.forget()
        if state.cause == "memory":
            driver.leave_free(self._scarce_blocks())
        else:
            for name in names:
                driver.scheduler.preempt_at_next_step(name)
        driver.step()
        self._steps_out += 1
        # Under pressure other requests take the freed blocks. Here none does, so they are evicted from the cache.
        driver.pool.evict_blocks(set(lost_blocks))
        readmission_blocks = max(len(lost_blocks), sum(map(driver.tables.to_readmit, self.victims)))
        room_blocks = readmission_blocks + self._growth_blocks + state.spare_blocks
        if state.cause == "memory":
            driver.leave_free(room_blocks)
        else:
            driver.keep_free(room_blocks if readmission_blocks > len(lost_blocks) else 0)
        preemptions = [driver.controller.ledger.open_preemption(name) for name in names]
        return [preemption for preemption in preemptions if preemption is not None]

    def _scarce_blocks(self) -> int:
        """Number of free blocks with which exactly the state's number of victims is preempted."""
        victims, tables = self.state.victims, self.driver.tables
        if victims == 1:
            # One block fewer than the requests that need some take: exactly one allocation fails.
            return sum(map(tables.lacking, self._needing_block())) - 1
        blocks = len(tables.of(self.victims[-1]))
        free = free_blocks_for(victims, len(self.others) + victims, blocks, tables.lacking(self.victims[-1]))
        if free < 0:
            needed = running_for(victims, blocks)
            raise WindowError(f"state {self.state.state_id}: {victims} victims need {needed} running requests")
        return free

    def _discard_reason(self, arm: Arm) -> str:
        """Why this window must be discarded; empty where it counts."""
        expected = 0 if arm == "none" else 1
        for victim in self.victims:
            if victim.num_preemptions != expected:
                return f"the victim was preempted {victim.num_preemptions} times, not {expected}"
        if any(other.num_preemptions for other in self.others):
            return "another request was preempted"
        if any(request.is_finished() for request in (*self.others, *self.victims)):
            return "a request finished"
        if any(request.status == RequestStatus.RUNNING for request in self.waiting):
            return "a waiting request was admitted"
        return ""
