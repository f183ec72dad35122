"""A recorded profile, and a replay of it: what it would have measured in less time, or in another order.

Each window has the time that it took when it was recorded, its set-up included. Which windows are measured, and when an
engine ends, is said by the code of `kvpolicy profile`. ``profile_budget.py`` learns from what a replay measured.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kvpolicy.arrays import Floats
from kvpolicy.datasets.profiles import State as Situation
from kvpolicy.datasets.profiles import read_dataset
from kvpolicy.errors import InputError
from kvpolicy.trace import Row, Trace, read
from kvpolicy_vllm.bench.budget import Budget, after, in_turn, next_job
from kvpolicy_vllm.bench.job import Job
from kvpolicy_vllm.bench.measurement import Arm, Measurement, Window
from kvpolicy_vllm.bench.profile_parts import PAGEABLE, PASS_REPEATS, Part
from kvpolicy_vllm.bench.states import CHECK_PREFIX, State

LIMITED, RANDOM, GRID = "--minutes", "random", "grid"
ORDERS = (LIMITED, RANDOM, GRID)
REASONS = ("warm-up", "noise")
"""Of windows that are recorded as discarded and are part of every engine's run."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """One window and its set-up."""

    window: Window
    steps: range
    begin_s: float
    end_s: float

    @property
    def is_counted(self) -> bool:
        """Whether it is neither of the warm-up nor of the noise."""
        return self.window.discarded not in REASONS


@dataclass(frozen=True, slots=True)
class Engine:
    """What one engine of the profile measured."""

    core: str
    part: Part
    job: Job
    """All of it."""
    windows: tuple[Recorded, ...]
    """In order of time."""

    @property
    def begin_s(self) -> float:
        return self.windows[0].begin_s


def engines_of(trace: Trace) -> list[Engine]:
    """In order of time. Raises InputError for a profile that is not whole."""
    return sorted((_engine(trace, core) for core in trace.headers), key=lambda engine: engine.begin_s)


def _engine(trace: Trace, core: str) -> Engine:
    noise, size = trace.headers[core].noise, trace.headers[core].block_size
    if "left_out" in noise:
        raise InputError(f"core {core}: left out {len(noise['left_out'])} states; a whole profile is needed")
    windows = tuple(_recorded(trace, core))
    by_state: dict[str, list[Window]] = {}
    for one in windows:
        if one.is_counted:
            by_state.setdefault(one.window.state_id, []).append(one.window)
    states = tuple(
        State(name, size, by_state[name][0].cause, tokens, 0, (), 0, 0)
        for name, tokens in _prompts(trace, core).items()
    )
    checks = tuple(state for state in states if state.state_id.startswith(CHECK_PREFIX))
    number = min(window.repeat for some in by_state.values() for window in some) // PASS_REPEATS
    part = Part.of(number, size, not str(noise["part"]).endswith(PAGEABLE))
    job = Job(
        engine={},
        states=tuple(state for state in states if state not in checks),
        checks=checks,
        check_pairs=max(len({window.repeat for window in by_state[check.state_id]}) for check in checks),
        repeats=noise["asked_repeats"],
        first_repeat=PASS_REPEATS * number,
        seed=trace.headers[core].seed,
        max_extra=noise["repeats"] // noise["asked_repeats"],
    )
    return Engine(core, part, job, windows)


def _recorded(trace: Trace, core: str) -> Iterator[Recorded]:
    steps = _of_core(trace, "steps", core)
    starts, lengths = (steps[name].to_pylist() for name in ("start_s", "duration_s"))
    ends = dict(zip(steps["step"].to_pylist(), map(sum, zip(starts, lengths, strict=True)), strict=True))
    first_step, begin_s = 0, float(starts[0])
    names = [name for name in Window.__dataclass_fields__ if name != "steps_out"]
    for row in _of_core(trace, "windows", core).select(names).to_pylist():
        window = Window(**row)
        end_s = ends[window.last_step]
        yield Recorded(window, range(first_step, window.last_step + 1), begin_s, end_s)
        first_step, begin_s = window.last_step + 1, end_s


def _prompts(trace: Trace, core: str) -> dict[str, int]:
    """Prompt tokens of the victim by state, in the order of the names, which is the grid's."""
    decisions = _of_core(trace, "decisions", core).select(["state_id", "prompt_tokens"])
    prompts = {row["state_id"]: row["prompt_tokens"] for row in decisions.to_pylist() if row["state_id"] is not None}
    return dict(sorted(prompts.items()))


def _of_core(trace: Trace, name: str, core: str) -> pa.Table:
    table = trace.table(name)
    return table.filter(pc.equal(table["core"], core))


# ---- a replay ----


@dataclass(slots=True)
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


class Replay:
    """An engine's driver whose windows are the recorded ones, and take as long."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine, self._clock = engine, clock
        self.measured: list[Recorded] = []
        self._ahead: dict[tuple[str, str, int] | str, deque[Recorded]] = {}
        for one in engine.windows:
            window = one.window
            key = window.discarded if window.discarded in REASONS else (window.state_id, window.arm, window.repeat)
            self._ahead.setdefault(key, deque()).append(one)

    def measure(self, state: State, arm: Arm, repeat: int, attempt: int = 0, pause_steps: int = 1) -> Window:
        return self._next("warm-up" if repeat < 0 else (state.state_id, arm, repeat))

    def undisturbed(self, state: State, repeat: int, steps: int) -> Window:
        return self._next("noise")

    def record(self, row: Row) -> None:
        """It is recorded already."""

    def _next(self, key: tuple[str, str, int] | str) -> Window:
        if not (ahead := self._ahead.get(key)):
            raise InputError(f"core {self._engine.core}: {key} was not recorded; a whole profile is needed")
        one = ahead.popleft()
        self.measured.append(one)
        self._clock.now_s += one.end_s - one.begin_s
        return replace(one.window, discarded="") if one.window.discarded in REASONS else one.window


@dataclass(frozen=True, slots=True)
class Profile:
    """A recorded profile, read once."""

    name: str
    trace: Trace
    states: tuple[Situation, ...]
    engines: tuple[Engine, ...]
    start_s: float
    """What an engine's start takes."""

    @classmethod
    def of(cls, folder: Path) -> Profile:
        trace = read(folder)
        engines = engines_of(trace)
        gaps_s = [later.begin_s - earlier.windows[-1].end_s for earlier, later in pairwise(engines)]
        if not gaps_s or min(gaps_s) < 0:
            raise InputError(f"{folder}: has to have engines that were started one after the other")
        return cls(folder.name, trace, read_dataset([folder]).states, tuple(engines), min(gaps_s))


def replayed(
    profile: Profile, held_out: set[str], minutes: float, order: str, rng: random.Random
) -> dict[str, list[Recorded]]:
    """The windows that ``profile`` would have measured within so many minutes, by core, without the states that are
    held out."""
    clock, by_part = Clock(), {engine.part: engine for engine in profile.engines}
    budget = Budget.of(minutes, clock)
    parts = tuple(by_part) if order == GRID else in_turn(tuple(by_part), budget)
    passes = 1 + max(part.number for part in parts)
    done: dict[str, str] = {}
    left_out: dict[str, int] = {}
    measured: dict[str, list[Recorded]] = {}

    def job_of(part: Part) -> Job:
        job = by_part[part].job
        return replace(job, states=tuple(state for state in job.states if state.state_id not in held_out))

    while turn := next_job(parts, passes, job_of, done, left_out, budget):
        part, job = turn
        if part not in by_part:
            break  # a further pass: of what was recorded everything is measured
        if order == RANDOM:
            job = replace(job, states=tuple(rng.sample(job.states, len(job.states))))
        elif order == GRID:
            job = replace(job, states=job_of(part).states, end_s=budget.end_s)
        begin_s, driver = clock(), Replay(by_part[part], clock)
        clock.now_s += profile.start_s
        measurement = Measurement(driver, job, lambda news: None, clock)
        measurement.run()
        if measurement.left_out == Counter(job.requested):
            break  # `profile` throws away what measured no state
        budget.learn(begin_s, measurement.measured_s)
        done[part.name] = by_part[part].core
        left_out = after(left_out, job, measurement.left_out)
        measured[by_part[part].core] = driver.measured
    return measured


def cut(trace: Trace, measured: Mapping[str, Sequence[Recorded]]) -> Trace:
    """The trace as it would be, had only these windows been measured."""
    tables: dict[str, list[pa.Table]] = {}
    for core, windows in measured.items():
        steps = pa.array([step for one in windows for step in one.steps])
        firsts = pa.array([one.window.first_step for one in windows])
        of = {name: _of_core(trace, name, core) for name in trace.tables}
        for name in ("steps", "decisions", "transfers"):
            of[name] = of[name].filter(pc.is_in(of[name]["step"], value_set=steps))
        of["windows"] = of["windows"].filter(pc.is_in(of["windows"]["first_step"], value_set=firsts))
        ids = of["decisions"]["preemption_id"].combine_chunks()
        of["outcomes"] = of["outcomes"].filter(pc.is_in(of["outcomes"]["preemption_id"], value_set=ids))
        of["requests"] = of["requests"].filter(_arrived(of["requests"]["arrival_s"].to_numpy(), windows))
        for name, table in of.items():
            tables.setdefault(name, []).append(table)
    headers = {core: trace.headers[core] for core in measured}
    return Trace(headers, {name: pa.concat_tables(some) for name, some in tables.items()})


def _arrived(arrivals_s: Floats, windows: Sequence[Recorded]) -> pa.Array:
    """Whether each request is one of these windows'. The first requests of an engine arrive just before its first
    step, when the first window begins."""
    begins_s, ends_s = (np.sort([getattr(one, name) for one in windows]) for name in ("begin_s", "end_s"))
    begins_s[0] = -np.inf
    last = np.searchsorted(begins_s, arrivals_s) - 1
    return pa.array(arrivals_s <= ends_s[last])
