"""What one engine of a profile measures: which windows, in which order, and until when.

`bench.measure_engine` measures them on an engine, `benchmarks/profile_budget.py` replays those of a recorded profile.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from kvpolicy.trace import Row, window_row
from kvpolicy_vllm.bench.job import Job, Noise
from kvpolicy_vllm.bench.states import State

Arm = Literal["none", "recompute", "swap"]
ARMS: tuple[Arm, ...] = ("none", "recompute", "swap")

NOISE_WINDOWS = 10
NOISE_STEPS = 12
TRIES = 3
"""Maximum attempts at a window that is discarded."""
CHECKED_ARMS: tuple[Arm, Arm] = ("recompute", "swap")
"""The option that each state of the self-check is for."""


@dataclass(frozen=True, slots=True)
class Window:
    """One measured window: its row in table ``windows``, and what later windows need."""

    state_id: str
    arm: str
    repeat: int
    cause: str
    first_step: int
    last_step: int
    duration_s: float
    preemption_id: str | None
    discarded: str
    """Why the window is discarded; empty where it counts."""
    steps_out: int = 0
    """Steps in which the victim was not in the batch."""

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


class Driver(Protocol):
    """Sets up states and measures windows of them."""

    def measure(self, state: State, arm: Arm, repeat: int, attempt: int = 0, pause_steps: int = 1) -> Window:
        """Measure one window of ``state``. ``pause_steps``: for how many steps arm ``none`` pauses the victim."""

    def undisturbed(self, state: State, repeat: int, steps: int) -> Window:
        """Measure ``steps`` steps of the running requests without a preemption, for the machine's own noise."""

    def record(self, row: Row) -> None:
        """Write the row of a window into the trace."""


class Measurement:
    """Runs all measurements of one engine, in order."""

    def __init__(
        self,
        driver: Driver,
        job: Job,
        tell: Callable[[dict[str, Any]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._driver = driver
        self._job = job
        self._tell = tell
        self._clock = clock
        limits_s = (None if job.max_s is None else clock() + job.max_s, job.end_s)
        self._end_s = min((limit for limit in limits_s if limit is not None), default=math.inf)
        self._rng = random.Random(f"{job.seed}/order/{job.first_repeat}")
        self._steps_out: dict[tuple[str, str], int] = {}
        self.discarded: dict[str, int] = {}
        self.left_out = Counter(job.requested)
        """Repeats or pairs that were asked for and are not measured, by state."""
        self.measured_s = 0.0
        """Time that went into states and the self-check, once they are measured."""

    def run(self) -> Noise:
        self._warm_up()
        noise = self._noise()
        # What is wanted by state makes up for what earlier engines left out.
        factor = 1 if self._job.wanted is not None else min(noise.factor, self._job.max_extra)
        checks = sum(map(self._job.pairs_of, self._job.checks))
        states = factor * sum(map(self._job.repeats_of, self._job.states))
        self._tell({"windows": len(ARMS) * states + 2 * checks})
        start_s = self._clock()
        self._measure_states(factor)
        self._measure_checks()
        self.measured_s = self._clock() - start_s
        return noise

    def _measure_states(self, factor: int) -> None:
        """All arms of every state, repeat by repeat; ``factor``: multiplies the repeats."""
        wanted = {state.state_id: factor * self._job.repeats_of(state) for state in self._job.states}
        for repeat in range(max(wanted.values())):
            states = [state for state in self._job.states if repeat < wanted[state.state_id]]
            for state in states if self._job.in_order and repeat == 0 else self._shuffled(states):
                if self._clock() > self._end_s:
                    return
                for arm in self._shuffled(ARMS):
                    self._measure(state, arm, self._job.first_repeat + repeat)
                self._count(state)

    def _measure_checks(self) -> None:
        """Pairs of a window and its control, of every option."""
        for state, arm in zip(self._job.checks, CHECKED_ARMS, strict=True):
            for pair in range(self._job.pairs_of(state)):
                if self._clock() > self._end_s:
                    return
                # Arm and control alternate, and so does which of them comes first.
                order: tuple[Arm, Arm] = ("none", arm) if pair % 2 else (arm, "none")
                for order_arm in order:
                    self._measure(state, order_arm, self._job.first_repeat + pair)
                self._count(state)

    def _count(self, state: State) -> None:
        """One repeat or pair of the state is measured."""
        self.left_out[state.state_id] -= 1
        self.left_out = +self.left_out

    def _shuffled(self, items: Sequence[Any]) -> list[Any]:
        return self._rng.sample(list(items), len(items))

    def _warm_up(self) -> None:
        """Run windows that are thrown away, so that one-time work of the engine affects no measurement."""
        longest = max(self._job.states, key=lambda state: state.prompt_tokens)
        fullest = max(self._job.states, key=lambda state: len(state.other_prompts))
        for state in (longest, fullest):
            for arm in ARMS:
                window = self._driver.measure(state, arm, -1)
                self._steps_out[state.state_id, arm] = window.steps_out
                self._record(window, "warm-up")

    def _noise(self) -> Noise:
        """Measure the variation of identical windows without a preemption."""
        middle = sorted(self._job.states, key=lambda state: sum(state.other_prompts))[len(self._job.states) // 2]
        durations_s = []
        for repeat in range(NOISE_WINDOWS):
            window = self._driver.undisturbed(middle, repeat, NOISE_STEPS)
            self._record(window, "noise")
            durations_s.append(window.duration_s)
        return Noise.of(durations_s)

    def _measure(self, state: State, arm: Arm, repeat: int) -> None:
        for attempt in range(TRIES):
            pause = self._pause_steps(state) if arm == "none" else 1
            window = self._driver.measure(state, arm, repeat, attempt, pause)
            self._record(window, window.discarded)
            if not window.discarded:
                self._steps_out[state.state_id, arm] = window.steps_out
                break
        self._tell({"done": 1})

    def _pause_steps(self, state: State) -> int:
        """Steps that the victim was out of the batch when it was really preempted; 1 where not yet measured."""
        measured_steps = [
            self._steps_out[key] for arm in ("swap", "recompute") if (key := (state.state_id, arm)) in self._steps_out
        ]
        return measured_steps[0] if measured_steps else 1

    def _record(self, window: Window, discarded: str) -> None:
        if discarded not in ("", "warm-up", "noise"):
            self.discarded[discarded] = self.discarded.get(discarded, 0) + 1
        self._driver.record(window.row() | {"discarded": discarded})
