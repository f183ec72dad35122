"""Bringing one state about in a live engine, and measuring one window of it.

A window begins with the step in which the victim is taken and ends when it has emitted a few tokens more. Whatever
else happens to anybody in between makes it worthless: then it says why it was discarded.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from vllm import SamplingParams
from vllm.v1.request import RequestStatus

from kvpolicy.errors import KVPolicyError
from kvpolicy.trace import Row, window_row
from kvpolicy_vllm.bench.states import State, free_blocks_for, running_for, waiting_prompt_tokens

Arm = Literal["none", "recompute", "swap"]
ARMS: tuple[Arm, ...] = ("none", "recompute", "swap")

WINDOW_TOKENS = 4
"""Tokens the victim emits before its window ends."""
MAX_WINDOW_S = 60.0
MAX_PAUSE_STEPS = 32
OUTPUT_TOKENS = 100_000
"""Asked of every request: none finishes by itself. Cut to what the model can hold."""


class WindowError(KVPolicyError, RuntimeError):
    """The engine did not do what it must for any window to be measured."""


@dataclass(frozen=True, slots=True)
class Window:
    """One measured window; its row in table ``windows`` and what the next one needs to know."""

    state_id: str
    arm: str
    repeat: int
    cause: str
    first_step: int
    last_step: int
    duration_s: float
    preemption_id: str | None
    discarded: str
    """Empty where the window counts, else the reason."""
    steps_out: int = 0
    """Steps the victim was not in the batch."""

    def row(self) -> Row:
        return window_row(
            state_id=self.state_id,
            arm=self.arm,
            repeat=self.repeat,
            cause=self.cause,
            first_step=self.first_step,
            last_step=self.last_step,
            duration_s=self.duration_s,
            preemption_id=self.preemption_id,
            discarded=self.discarded,
        )


class WindowDriver:
    """Drives one in-process engine whose scheduler is kvpolicy's.

    ``llm``: a :class:`vllm.LLM` with ``VLLM_ENABLE_V1_MULTIPROCESSING=0``.
    """

    def __init__(self, llm: Any, seed: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.engine = llm.llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.controller = self.scheduler.kvpolicy
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.model_tokens = int(self.scheduler.max_model_len)
        self.block_size = int(self.scheduler.block_size)
        self._vocabulary = int(llm.llm_engine.model_config.get_vocab_size())
        self._seed = seed
        self._clock = clock
        self._held: list[Any] = []
        self._names: list[str] = []
        self._count = 0
        self._stepped_s = clock()

    # ---- windows ----

    def measure(self, state: State, arm: Arm, repeat: int, attempt: int = 0, pause_steps: int = 1) -> Window:
        """One window of ``state``. ``pause_steps``: how long arm ``none`` keeps the victim out of the batch."""
        rng = random.Random(f"{self._seed}/{state.state_id}/{arm}/{repeat}/{attempt}")
        try:
            scene = self._set_up(state, rng)
            return scene.play(arm, repeat, min(pause_steps, MAX_PAUSE_STEPS))
        finally:
            self._clear()

    def undisturbed(self, state: State, repeat: int, steps: int) -> Window:
        """``steps`` steps of the same running requests with nobody taken: what the machine's own noise is read off."""
        rng = random.Random(f"{self._seed}/{state.state_id}/undisturbed/{repeat}")
        try:
            self._set_up(state, rng)
            first, began = self.next_step, self._clock()
            for _ in range(steps):
                self.step()
            took = self._clock() - began
            return Window(
                state.state_id, "undisturbed", repeat, state.cause, first, self.next_step - 1, took, None, "noise"
            )
        finally:
            self._clear()

    # ---- what a scene needs ----

    @property
    def next_step(self) -> int:
        """The number the next step will have in table ``steps``."""
        return int(self.controller.next_step)

    @property
    def now_s(self) -> float:
        return self._clock()

    def step(self) -> None:
        """One engine step; what was done here since the last one is not charged to it."""
        self.controller.leave_out(max(0.0, self._clock() - self._stepped_s))
        self.engine.step()
        self._stepped_s = self._clock()

    def leave_free(self, blocks: int) -> None:
        """Take blocks out of play, or give some back, until ``blocks`` are free."""
        free = self.pool.get_num_free_blocks()
        if free > blocks:
            self._held += self.pool.get_new_blocks(free - blocks)
        elif free < blocks:
            back, self._held = self._held[: blocks - free], self._held[blocks - free :]
            self.pool.free_blocks(back)

    def keep_free(self, blocks: int) -> None:
        """Give blocks back where fewer than ``blocks`` are free: over a slow link a window outlasts its first ones."""
        if self.pool.get_num_free_blocks() < blocks:
            self.leave_free(blocks)

    def add(self, tokens: int, rng: random.Random) -> Any:
        """A new request with a random prompt; returns the scheduler's record of it."""
        before = set(self.scheduler.requests)
        self._count += 1
        name = f"profile-{self._count}"
        prompt = [rng.randrange(1, self._vocabulary) for _ in range(tokens)]
        most = min(OUTPUT_TOKENS, self.model_tokens - tokens)
        sampling = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True, detokenize=False)
        self.engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        self._names.append(name)
        (new,) = set(self.scheduler.requests) - before
        return self.scheduler.requests[new]

    def held_by(self, request: Any) -> list[int]:
        return [int(block) for block in self.scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]]

    def needs_block(self, request: Any) -> bool:
        """Whether the request's next token needs a block it does not hold yet."""
        return int(request.num_computed_tokens) + 1 > len(self.held_by(request)) * self.block_size

    def _set_up(self, state: State, rng: random.Random) -> Scene:
        others = [self.add(tokens, rng) for tokens in state.other_prompts]
        victim = self.add(state.prompt_tokens, rng)
        while victim.num_output_tokens < max(1, state.decoded_tokens):
            if victim.num_preemptions or any(other.num_preemptions for other in others):
                raise WindowError(f"state {state.state_id} does not fit into {self.pool.num_gpu_blocks} blocks")
            self.step()
        return Scene(self, state, others, victim, rng)

    def _clear(self) -> None:
        """Everybody out, all memory back; idle steps, so that the time between two windows is nobody's."""
        self.controller.pin(None, None)
        self.engine.abort_request(self._names)
        self._names = []
        self.pool.free_blocks(self._held)
        self._held = []
        deadline = self._clock() + MAX_WINDOW_S
        self.step()
        while self.pool.get_num_free_blocks() < self.pool.num_gpu_blocks - 1:
            if self._clock() > deadline:
                raise WindowError(f"blocks were not given back within {MAX_WINDOW_S:g} s of a window's end")
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

    def play(self, arm: Arm, repeat: int, pause_steps: int) -> Window:
        driver, state = self.driver, self.state
        self._await_the_moment()
        enough = [victim.num_output_tokens + WINDOW_TOKENS for victim in self.victims]
        lost = [block for victim in self.victims for block in driver.held_by(victim)]
        if arm != "none":
            labels = {"state_id": state.state_id, "arm": arm, "repeat": repeat}
            driver.controller.pin(arm, labels)
        first, began = driver.next_step, driver.now_s
        opened = self._take(arm, lost, pause_steps)
        driver.controller.pin(None, None)
        deadline = began + MAX_WINDOW_S
        trouble = self._trouble(arm)
        while not trouble and any(v.num_output_tokens < n for v, n in zip(self.victims, enough, strict=True)):
            driver.keep_free(state.growth_blocks)
            driver.step()
            self._steps_out += any(victim not in driver.scheduler.running for victim in self.victims)
            trouble = self._trouble(arm) or ("no end" if driver.now_s > deadline else "")
        took = driver.now_s - began
        if not trouble and any(one.executed != arm for one in opened):
            trouble = f"{next(one.executed for one in opened if one.executed != arm)} was executed"
        # The first that was taken is the last that was admitted.
        preemption_id = opened[-1].preemption_id if opened else None
        return Window(
            state.state_id, arm, repeat, state.cause, first, driver.next_step - 1, took, preemption_id, trouble,
            self._steps_out,
        )  # fmt: skip

    def _await_the_moment(self) -> None:
        """Set free memory and who waits, then go on until the next step is the one.

        At least one step passes after everything is set up, so that no preemption is charged with what a new request
        brings with it. In a natural state the moment is when someone needs a block.
        """
        driver, state = self.driver, self.state
        driver.leave_free(state.growth_blocks + state.spare_blocks)
        tokens = waiting_prompt_tokens(driver.model_tokens)
        self.waiting = [driver.add(tokens, self._rng) for _ in range(state.waiting)]
        driver.step()
        if state.victims > 1:
            self._align()
            return
        for _ in range(driver.block_size):
            if state.cause == "forced" or self._in_need():
                return
            driver.step()
        raise WindowError(f"state {state.state_id}: nobody came to need a block in {driver.block_size} steps")

    def _align(self) -> None:
        """Keep whoever needs a block out of the batch until everybody does: then all ask for one in the same step."""
        driver, everybody = self.driver, [*self.others, *self.victims]
        for _ in range(2 * driver.block_size):
            for request in self._in_need():
                if request in driver.scheduler.running:
                    driver.scheduler.pause_at_next_step(request.request_id)
            if not driver.scheduler.running:
                for request in everybody:
                    driver.scheduler.resume_request(request.request_id)
                return
            driver.step()
        raise WindowError(f"state {self.state.state_id}: not everybody came to need a block at a time")

    def _in_need(self) -> list[Any]:
        return [request for request in (*self.others, *self.victims) if self.driver.needs_block(request)]

    def _take(self, arm: Arm, lost: list[int], pause_steps: int) -> list[Any]:
        """The step in which the victims are taken; returns the preemptions that were opened, none for arm ``none``."""
        driver, state = self.driver, self.state
        names = [victim.request_id for victim in self.victims]
        if arm == "none":
            for name in names:
                driver.scheduler.pause_at_next_step(name)
            for _ in range(max(1, pause_steps)):
                driver.step()
                self._steps_out += 1
            for name in names:
                driver.scheduler.resume_request(name)
            return []
        if state.cause == "memory":
            driver.leave_free(self._too_few())
        else:
            for name in names:
                driver.scheduler.preempt_at_next_step(name)
        driver.step()
        self._steps_out += 1
        # Under pressure others take what was freed; here nobody does, so the cached blocks are made to go.
        driver.pool.evict_blocks(set(lost))
        if state.cause == "memory":
            driver.leave_free(len(lost) + state.growth_blocks + state.spare_blocks)
        opened = [driver.controller.ledger.of(name) for name in names]
        return [one for one in opened if one is not None]

    def _too_few(self) -> int:
        """Free blocks with which exactly so many victims have to go."""
        victims = self.state.victims
        if victims == 1:
            # All but one of those who need a block find one: exactly one allocation fails.
            return len(self._in_need()) - 1
        blocks = len(self.driver.held_by(self.victims[-1]))
        found = free_blocks_for(victims, len(self.others) + victims, blocks)
        if found < 0:
            wanted = running_for(victims, blocks)
            raise WindowError(f"state {self.state.state_id}: {victims} victims want {wanted} running requests")
        return found

    def _trouble(self, arm: Arm) -> str:
        """Why this window is worthless; empty where it is not."""
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
