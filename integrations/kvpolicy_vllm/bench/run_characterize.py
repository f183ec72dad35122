"""`kvpolicy characterize`: what the overflow study's figures are drawn from, measured on a live engine.

Single overflows are measured as a profile measures them, in states named after the figure they are for
(:mod:`kvpolicy.overflow`). What is served to its end is served by :mod:`kvpolicy_vllm.bench.pressure`, under recompute,
swap and a policy that is learned from a small profile of this very machine and link. Every part, an engine each, is in
the trace once it is whole: an interrupted study goes on with the next.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kvpolicy import trace as traces
from kvpolicy.fields import WrongValue
from kvpolicy.overflow import SERVED
from kvpolicy.settings import Measurement
from kvpolicy.trace import Header
from kvpolicy.training import train
from kvpolicy_vllm.bench.job import Job
from kvpolicy_vllm.bench.profile_parts import Rig, model_length
from kvpolicy_vllm.bench.reach import (
    ARMS,
    DECODED,
    FULL_CPU,
    FULL_DEVICE,
    LEARNING,
    QUICK,
    Reach,
    Step,
    runs_of,
    steps_of,
    study_states,
    time_left,
)
from kvpolicy_vllm.bench.run_demo import SHAPE
from kvpolicy_vllm.bench.run_profile import (
    Tell,
    asked_for,
    measure_part,
    prepare,
    scratch_of,
    take_up,
    telling,
    write_plan,
)
from kvpolicy_vllm.bench.serve_job import ServedJob, serve_part
from kvpolicy_vllm.bench.states import Span

NEXT = ", "
"""Between the names of what one core holds."""
MODEL = "learned"
"""Folder, beside the trace's cores, of the cost model that the learned policy goes by."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a finished study's measuring says of itself."""

    out: Path
    figures: tuple[str, ...]
    windows: Mapping[str, int]
    """That count, by state."""
    discarded: Mapping[str, int]
    """By reason."""

    def text(self) -> str:
        lines = [f"{self.out}: {sum(self.windows.values())} windows that count, for {', '.join(self.figures)}"]
        lines += [f"  {state}: {count}" for state, count in self.windows.items() if "/" in state]
        lines += [f"  {others} of a profile"] if (others := sum("/" not in state for state in self.windows)) else []
        lines += [f"  discarded: {count} x {reason}" for reason, count in self.discarded.items()]
        return "\n".join([*lines, f"the figures: kvpolicy report {self.out} --out report.html --figures figures"])


def characterize(
    out: Path,
    figures: Sequence[str],
    how: Measurement = Measurement(),
    progress: Tell | None = None,
    reach: Reach | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Measured:
    """Measure ``figures`` (see :data:`kvpolicy.overflow.FIGURES`) and write a trace to ``out``.

    ``reach``: instead of what ``how.quick`` says. Raises ValueError as :func:`~kvpolicy_vllm.bench.run_profile.profile`
    does, and for a level the model is too short for; EngineFailed where an engine ends badly; KeyboardInterrupt, which
    says what is kept, where it is interrupted.
    """
    asked = asked_for(how, study=("quick" if how.quick else "full") if reach is None else asdict(reach))
    # The figures may differ from one call to the next: what is there stays.
    done = whole_parts(out, take_up(out, asked))
    study = Study(out, asked, done, how.seed, tuple(figures))
    try:
        with scratch_of(out) as scratch, telling(progress, "characterize") as tell:
            rig = prepare(scratch, how, None, SHAPE)
            reach = (QUICK if how.quick else FULL_DEVICE if rig.device else FULL_CPU) if reach is None else reach
            study.measure(replace(rig, extent=reach.learning), reach, scratch, tell, clock)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(study.interrupted()) from None
    return _told(out, study.figures)


def whole_parts(out: Path, done: Mapping[str, str]) -> dict[str, str]:
    """The parts that are done, core by name: also one that was killed between moving a core in and noting it."""
    cores = {path.parent.name: str(Header.read(path).noise.get("part", "")) for path in out.glob("*/header.json")}
    return {name: core for core, names in cores.items() for name in names.split(NEXT)} | dict(done)


class Study:
    """The parts of a study, measured one after the other."""

    def __init__(self, out: Path, asked: dict[str, Any], done: dict[str, str], seed: int, figures: tuple[str, ...]):
        self.figures = figures
        self._out = out
        self._asked = asked
        self._done = done
        self._seed = seed
        self._steps: list[Step] = []

    def measure(self, rig: Rig, reach: Reach, scratch: Path, tell: Tell, clock: Callable[[], float]) -> None:
        self._steps = steps_of(reach, self.figures, rig.device)
        steps = [step.without(self._done) for step in self._steps]
        began = clock()
        for number, step in enumerate(steps):
            if not step.figures:
                continue
            if step.figures[0] in SERVED and not (self._out / MODEL).exists():
                self._learn(scratch)

            def told(done: int, of: int, number: int = number, name: str = step.title) -> None:
                left = time_left(steps, number, done / of if of else 0.0, clock() - began)
                tell(f"{name} ({number + 1}/{len(steps)}{_worded(left)})", done, of)

            folder = scratch / step.title
            folder.mkdir()
            core = self._measure(step, rig, reach, folder, told)
            self._done |= dict.fromkeys(step.names, core)
            write_plan(self._out, {"asked": self._asked, "done": self._done})

    def _measure(self, step: Step, rig: Rig, reach: Reach, folder: Path, told: Callable[[int, int], None]) -> str:
        part = NEXT.join(step.names)
        if step.figures[0] in SERVED:
            served = served_job(rig, reach, step, folder, f"cheapest:{self._out / MODEL}")
            return serve_part(served, self._out, folder, part, told)
        learns = step.figures == (LEARNING,)
        job = rig.job(step.part, folder) if learns else study_job(rig, reach, step, folder)
        return measure_part(job, self._out, folder, part, told)

    def _learn(self, scratch: Path) -> None:
        """Train the learned policy on its own profile alone: not on what happens to have been measured before."""
        cores = [core for name, core in self._done.items() if name.startswith(f"{LEARNING}-")]
        folder = scratch / LEARNING
        for core in cores:
            shutil.copytree(self._out / core, folder / core)
        made = scratch / MODEL
        # A noisy machine is told of in the report; it does not end the study.
        train([folder], made, force=True, seed=self._seed)
        made.replace(self._out / MODEL)

    def interrupted(self) -> str:
        """What is kept and how to go on."""
        names = [name for step in self._steps for name in step.names]
        of = f" of {len(names)}" if names else ""
        kept = len([name for name in names if name in self._done]) if names else len(self._done)
        return (
            f"interrupted: {kept}{of} parts are measured and kept in {self._out}; the same command again goes on with "
            "the next, and measures nothing twice"
        )


def _worded(left_s: float | None) -> str:
    if left_s is None:
        return ""
    return f", ~{left_s / 60:.0f} min left" if left_s >= 90 else f", ~{left_s:.0f} s left"


def study_job(rig: Rig, reach: Reach, step: Step, folder: Path) -> Job:
    """What the part's engine is to do; its trace goes into ``folder``. Raises ValueError for too short a model."""
    part = step.part
    states = tuple(state for figure in step.figures for state in study_states(reach, figure, part.block_size))
    longest = max(state.prompt_tokens for state in states)
    wanted = 2 * longest + 4 * part.block_size
    _refuse_short(rig, step.title, wanted, longest)
    requests = 1 + max(len(state.other_prompts) for state in states)
    span = Span(DECODED, longest, requests - 1, 0, wanted)
    blocks = max(max(state.device_blocks for state in states), -(-wanted // part.block_size) + 1)
    engine = rig.engine_arguments(part, folder / "trace", span, blocks)
    return Job(
        engine=engine | {"max_num_seqs": max(requests, engine["max_num_seqs"])},
        states=states,
        checks=(states[0], states[0]),
        check_pairs=0,
        repeats=reach.repeats,
        first_repeat=part.number * 100,
        seed=rig.seed,
        max_extra=1,
    )


def served_job(rig: Rig, reach: Reach, step: Step, folder: Path, learned: str) -> ServedJob:
    """What the part's engine is to serve; ``learned``: the learned policy. Raises ValueError for too short a model."""
    load, part = reach.load, step.part
    wanted = load.total_tokens + load.block_size
    _refuse_short(rig, step.title, wanted, load.total_tokens)
    span = Span(DECODED, load.total_tokens, load.requests - 1, 0, wanted)
    policies = {"recompute": "always-recompute", "swap": "always-swap", "learned": learned}
    assert set(policies) == set(ARMS)
    engine = rig.engine_arguments(part, folder / "trace", span, load.all_blocks)
    return ServedJob(
        engine=engine | {"max_num_seqs": max(load.requests, engine["max_num_seqs"])},
        load=load,
        policies=policies,
        runs=tuple(run for figure in step.figures for run in runs_of(reach, figure, part.number, rig.seed)),
        seed=rig.seed,
    )


def _refuse_short(rig: Rig, what: str, wanted: int, longest: int) -> None:
    has = model_length(rig.llm)
    if has < wanted:
        raise WrongValue("llm", f"holds {has} tokens, {what} needs {wanted} for sequences of {longest}")


def _told(out: Path, figures: tuple[str, ...]) -> Measured:
    windows = traces.read(out).rows("windows", ("state_id", "arm", "discarded"))
    count = Counter(row["state_id"] for row in windows if not row["discarded"])
    reasons = Counter(row["discarded"] for row in windows) - Counter(("", "warm-up", "noise") * len(windows))
    return Measured(out, figures, dict(sorted(count.items())), dict(reasons))
