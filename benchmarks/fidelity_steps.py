"""The schedule alone, step by step: each step is given its real duration, and each arrival its place between steps.

What is left to be foretold is who is scheduled, who is preempted, what is computed again. Judged is vLLM's scheduler
on the virtual clock; that the built-in simulator does the same is what `tests/vllm/test_simulators_agree.py` is for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from fidelity_real import PARTS, Floats, Rows, Session, within
from fidelity_record import Real

from kvpolicy import policy
from kvpolicy.events import Direction
from kvpolicy.simulator import Simulator, StepLoad
from kvpolicy.simulator.sinks import MemorySink

COLUMNS = (
    *PARTS, "scheduled_requests", "running_requests", "waiting_requests", "used_blocks", "recomputed_tokens",
    "preemptions", "saves", "loads",
)  # fmt: skip
IDLE_S = 1.0
"""An idle engine waits that long in the replay, whatever it really was: nothing depends on it."""


@dataclass(frozen=True, slots=True)
class Stepwise:
    """One held-out run, and the same schedule made by the simulator."""

    workload: str
    policy: str
    alike: int
    """Steps that are the same in every column of :data:`COLUMNS`, from the first on."""
    steps: int
    preemptions: tuple[int, int]
    """Real and simulated."""
    recomputed_tokens: tuple[int, int]


class RecordedTimes:
    """What each step took in one run, copies included. ``steps``: what each computed (:data:`PARTS`), its seconds."""

    source = "one run as it was recorded"

    def __init__(self, steps: Iterable[tuple[tuple[int, ...], float]]) -> None:
        self._left = deque(steps)

    def step_s(self, load: StepLoad) -> float:
        """The engine asks for every step once, in order. Any other load takes no time: one that is only priced, or a
        step of a schedule that has parted from the recorded one."""
        if self._left and self._left[0][0] == load[: len(PARTS)]:
            return self._left.popleft()[1]
        return 0.0

    def steps_s(self, loads: Floats) -> Floats:
        return np.array([self.step_s(StepLoad(*map(int, load))) for load in loads])

    def copy_s(self, direction: Direction, copied_bytes: int, segments: int, segment_bytes: int) -> float:
        return 0.0


def stepwise(sessions: Sequence[Session], engine: Simulator) -> list[Stepwise]:
    """All held-out runs under deterministic policies. ``engine`` asks for every step's time once: vLLM's scheduler."""
    return [
        _stepwise(engine, session, run)
        for session in sessions
        for run in session.kept_out
        if not run.policy.startswith("random")
    ]


def _stepwise(engine: Simulator, session: Session, run: Real) -> Stepwise:
    rows = sorted(within(session.trace.rows("steps"), [run]), key=lambda row: float(row["start_s"]))
    came_s = sorted(
        row["arrival_s"] for row in session.trace.rows("requests") if run.begin_s <= row["arrival_s"] <= run.end_s
    )
    work = run.work.arriving(_places(rows, came_s))
    times = RecordedTimes(_steps(rows))
    done = engine.run(work, policy.load(run.policy), session.server, times, run.session, MemorySink())
    assert done.trace is not None
    real, simulated = _computing(rows), _computing(done.trace.rows("steps"))
    counted = [
        (sum(row[name] for row in real), sum(row[name] for row in simulated))
        for name in ("preemptions", "recomputed_tokens")
    ]
    return Stepwise(run.workload, run.policy, *_alike(real, simulated), *counted)


def _steps(rows: Rows) -> Iterator[tuple[tuple[int, ...], float]]:
    """What steps compute, and their durations; what passed before in steps that compute nothing is theirs."""
    waited_s = 0.0
    for row in rows:
        waited_s += row["duration_s"]
        if row["scheduled_tokens"]:
            yield tuple(row[part] for part in PARTS), waited_s
            waited_s = 0.0


def _places(rows: Rows, came_s: Sequence[float]) -> list[float]:
    """Arrivals in the replay's time: each within the step at whose end the real engine took it in, or when idle."""
    places: list[float] = []
    clock_s = last_s = 0.0
    left = deque(came_s)
    for row in rows:
        new = 0
        while left and left[0] < row["start_s"] + row["duration_s"]:
            left.popleft()
            new += 1
        idle = new == row["running_requests"] + row["waiting_requests"]  # no other request is there
        clock_s += IDLE_S * idle
        places += [clock_s if idle else clock_s - last_s / 4] * new
        if row["scheduled_tokens"]:
            last_s = row["duration_s"]
        clock_s += row["duration_s"]
    return places


def _computing(rows: Rows) -> Rows:
    return sorted((row for row in rows if row["scheduled_tokens"]), key=lambda row: float(row["start_s"]))


def _alike(real: Rows, simulated: Rows) -> tuple[int, int]:
    for at, (step, other) in enumerate(zip(real, simulated, strict=False)):
        if any(step[name] != other[name] for name in COLUMNS):
            return at, len(real)
    return min(len(real), len(simulated)), max(len(real), len(simulated))


def as_dicts(runs: Sequence[Stepwise]) -> list[dict[str, Any]]:
    return [{name: getattr(run, name) for name in Stepwise.__slots__} for run in runs]
