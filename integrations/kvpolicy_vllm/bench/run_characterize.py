"""`kvpolicy characterize`: measures what the overflow study's figures need, on a live engine.

Single overflows are measured as in a profile, in states named after their figure (:mod:`kvpolicy.overflow`). Whole runs
are served by :mod:`kvpolicy_vllm.bench.pressure`, under recompute, swap and a policy learned from a small profile of
the same machine and link. Every part has an engine of its own and is added to the trace once complete: an interrupted
study is resumed with the next part.
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
from kvpolicy.cost import load
from kvpolicy.evaluation.log_headroom import served_headrooms, served_lines
from kvpolicy.fields import WrongValue
from kvpolicy.headroom import Headroom
from kvpolicy.overflow import SERVED
from kvpolicy.settings import Measurement
from kvpolicy.trace import Header
from kvpolicy.training import train
from kvpolicy_vllm import launch
from kvpolicy_vllm.bench.budget import Budget
from kvpolicy_vllm.bench.job import Job
from kvpolicy_vllm.bench.profile_parts import PASS_REPEATS, Extent, Rig
from kvpolicy_vllm.bench.reach import (
    ARMS,
    DECODED_TOKENS,
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
from kvpolicy_vllm.bench.run_profile import (
    ProgressCallback,
    measure_part,
    open_plan,
    plan_arguments,
    prepare,
    progress_reporter,
    scratch_of,
    write_plan,
)
from kvpolicy_vllm.bench.serve_job import ServedJob, serve_part
from kvpolicy_vllm.bench.states import Span

SHAPE = {"hidden": 512, "intermediate": 1536, "layers": 2, "spread": 0.1}
"""Of the model that is made where none is given, 8.4 million parameters. It is wide and flat: in a narrower, deeper
model the fixed cost of a step in Python would hide the cost of recomputed tokens, unlike in real models."""
NAME_SEPARATOR = ", "
"""Separates the names of the parts that one core holds."""
STUDIED = {
    "--block-size": "the study has block sizes of its own",
    "--max-model-len": "the study's requests have lengths of their own",
}
"""Flags that an engine may not have here, besides those that no measured engine may have."""
MODEL = "learned"
"""Folder, beside the trace's cores, of the learned policy's cost model."""


@dataclass(frozen=True, slots=True)
class CharacterizeReport:
    """Summary of a finished study's measurements."""

    out: Path
    figures: tuple[str, ...]
    windows: Mapping[str, int]
    """Windows that are not discarded, by state."""
    discarded: Mapping[str, int]
    """Discarded windows, by reason."""
    headrooms: Mapping[str, Headroom]
    """What there was to win in the runs served under recompute, by state."""
    not_begun: tuple[str, ...] = ()
    """Parts that time was too short for, each a figure, a block size and a pass; another call goes on with them."""

    def text(self) -> str:
        lines = [f"{self.out}: {sum(self.windows.values())} valid windows, for {', '.join(self.figures)}"]
        lines += [f"  {state}: {count}" for state, count in self.windows.items() if "/" in state]
        lines += (
            [f"  {profile_states} of a profile"]
            if (profile_states := sum("/" not in state for state in self.windows))
            else []
        )
        lines += [f"  discarded: {count} x {reason}" for reason, count in self.discarded.items()]
        lines += [f"  {line}" for line in served_lines(self.headrooms)]
        if self.not_begun:
            lines.append(f"  left out: {', '.join(self.not_begun)}; the same command goes on with them")
        return "\n".join([*lines, f"the figures: kvpolicy report {self.out} --out report.html --figures figures"])


def characterize(
    out: Path,
    figures: Sequence[str],
    how: Measurement = Measurement(),
    progress: ProgressCallback | None = None,
    reach: Reach | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> CharacterizeReport:
    """Measure ``figures`` (see :data:`kvpolicy.overflow.FIGURES`) and write a trace to ``out``.

    ``reach``: overrides the one that ``how.quick`` selects. Raises InputError as
    :func:`~kvpolicy_vllm.bench.run_profile.profile` does, and where the model is too short for a level; EngineFailed
    where an engine fails; KeyboardInterrupt with a message about what is kept.
    """
    launch.refuse_measured(how.vllm_flags, how.llm is not None, STUDIED)
    budget = Budget.of(how.minutes, clock)
    arguments = plan_arguments(how, study=("quick" if how.quick else "full") if reach is None else asdict(reach))
    # Figures are no part of the arguments: a later call may add some, and parts that exist are kept.
    done = finished_parts(out, open_plan(out, arguments))
    study = Study(out, arguments, done, how.seed, tuple(figures))
    try:
        with scratch_of(out) as scratch, progress_reporter(progress, "characterize") as tell:
            rig = prepare(scratch, how, None, SHAPE)
            reach = (QUICK if how.quick else FULL_DEVICE if rig.device else FULL_CPU) if reach is None else reach
            study.measure(replace(rig, extent=_learning(rig, reach)), reach, scratch, tell, budget)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(study.interrupted()) from None
    return _report_of(out, study.figures, study.not_begun)


def _learning(rig: Rig, reach: Reach) -> Extent:
    """How much is measured for the learned policy: with no more requests at a time than the user's server has."""
    if rig.server is None:
        return reach.learning
    return replace(reach.learning, max_others=min(reach.learning.max_others, rig.server.max_requests - 1))


def finished_parts(out: Path, done: Mapping[str, str]) -> dict[str, str]:
    """The finished parts, core by name, including one whose core was added just before the process was killed."""
    cores = {path.parent.name: str(Header.read(path).noise.get("part", "")) for path in out.glob("*/header.json")}
    return {name: core for core, names in cores.items() for name in names.split(NAME_SEPARATOR)} | dict(done)


class Study:
    """Measures the parts of a study one after the other."""

    def __init__(self, out: Path, arguments: dict[str, Any], done: dict[str, str], seed: int, figures: tuple[str, ...]):
        self.figures = figures
        self._out = out
        self._arguments = arguments
        self._done = done
        self._seed = seed
        self._steps: list[Step] = []

    @property
    def not_begun(self) -> tuple[str, ...]:
        return tuple(name for step in self._steps for name in step.names if name not in self._done)

    def measure(self, rig: Rig, reach: Reach, scratch: Path, tell: ProgressCallback, budget: Budget) -> None:
        """Measure until all is measured, or the time is over; what is begun is finished."""
        _refuse_states(rig)
        clock = budget.clock
        self._steps = steps_of(reach, self.figures, rig.device)
        steps = [step.without(self._done) for step in self._steps]
        start_s = clock()
        for number, step in enumerate(steps):
            if not step.figures:
                continue
            if self._done and budget.over:
                return
            if step.figures[0] in SERVED and not (self._out / MODEL).exists():
                self._learn(scratch)

            def report_step(done: int, total: int, number: int = number, name: str = step.title) -> None:
                left_s = time_left(steps, number, done / total if total else 0.0, clock() - start_s)
                tell(f"{name} ({number + 1}/{len(steps)}{_worded(left_s)})", done, total)

            folder = scratch / step.title
            folder.mkdir()
            core = self._measure(step, rig, reach, folder, report_step)
            self._done |= dict.fromkeys(step.names, core)
            write_plan(self._out, {"asked": self._arguments, "done": self._done})

    def _measure(
        self, step: Step, rig: Rig, reach: Reach, folder: Path, report_step: Callable[[int, int], None]
    ) -> str:
        part = NAME_SEPARATOR.join(step.names)
        if step.figures[0] in SERVED:
            job = served_job(rig, reach, step, folder, f"cheapest:{self._out / MODEL}")
            return serve_part(job, self._out, folder, part, report_step)
        learns = step.figures == (LEARNING,)
        profile_job = rig.job(step.part, folder) if learns else study_job(rig, reach, step, folder)
        return measure_part(profile_job, self._out, folder, part, report_step)

    def _learn(self, scratch: Path) -> None:
        """Train the learned policy on its own profile only, so that the measured figures do not affect it."""
        cores = [core for name, core in self._done.items() if name.startswith(f"{LEARNING}-")]
        folder = scratch / LEARNING
        for core in cores:
            shutil.copytree(self._out / core, folder / core)
        model = scratch / MODEL
        # Noise appears in the report; it must not end the study.
        train([folder], model, force=True, seed=self._seed)
        model.replace(self._out / MODEL)

    def interrupted(self) -> str:
        """Message about what is kept and how to continue."""
        names = [name for step in self._steps for name in step.names]
        total = f" of {len(names)}" if names else ""
        done = len([name for name in names if name in self._done]) if names else len(self._done)
        return (
            f"interrupted: {done}{total} parts are measured and kept in {self._out}; run the same command again to "
            "continue with the next part"
        )


def _worded(left_s: float | None) -> str:
    if left_s is None:
        return ""
    return f", ~{left_s / 60:.0f} min left" if left_s >= 90 else f", ~{left_s:.0f} s left"


def study_job(rig: Rig, reach: Reach, step: Step, folder: Path) -> Job:
    """The job of the part's engine; its trace goes into ``folder``. Raises WrongValue for too short a model."""
    part = step.part
    states = tuple(state for figure in step.figures for state in study_states(reach, figure, part.block_size))
    longest = max(state.prompt_tokens for state in states)
    needed_tokens = 2 * longest + 4 * part.block_size
    _refuse_short(rig, step.title, needed_tokens, longest)
    requests = 1 + max(len(state.other_prompts) for state in states)
    span = Span(DECODED_TOKENS, longest, requests - 1, 0, needed_tokens)
    blocks = max(max(state.device_blocks for state in states), -(-needed_tokens // part.block_size) + 1)
    engine = rig.engine_arguments(part, folder / "trace", span, blocks)
    return Job(
        engine=engine | {"max_num_seqs": max(requests, engine["max_num_seqs"])},
        states=states,
        checks=(states[0], states[0]),
        check_pairs=0,
        repeats=reach.repeats,
        first_repeat=part.number * PASS_REPEATS,
        seed=rig.seed,
        max_extra=1,
    )


def served_job(rig: Rig, reach: Reach, step: Step, folder: Path, learned: str) -> ServedJob:
    """The job of the part's engine; ``learned``: the learned policy. Raises WrongValue for too short a model."""
    load, part = reach.load, step.part
    needed_tokens = load.total_tokens + load.block_size
    _refuse_short(rig, step.title, needed_tokens, load.total_tokens)
    span = Span(DECODED_TOKENS, load.total_tokens, load.requests - 1, 0, needed_tokens)
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


def _refuse_states(rig: Rig) -> None:
    """The figures' lengths are whole blocks of the sizes that the study gives them."""
    if rig.keeps_states:
        raise WrongValue(
            "llm",
            f"is {rig.llm}, whose layers keep states: vLLM makes its blocks as large as a state, and the study needs "
            "blocks of its own sizes, of which the lengths in its figures are made up; should be a model without "
            "states, or be measured by profile",
        )


def _refuse_short(rig: Rig, title: str, needed_tokens: int, longest: int) -> None:
    if rig.model_tokens < needed_tokens:
        raise WrongValue(
            "llm", f"holds {rig.model_tokens} tokens, {title} needs {needed_tokens} for sequences of {longest}"
        )


def _report_of(out: Path, figures: tuple[str, ...], not_begun: tuple[str, ...]) -> CharacterizeReport:
    trace = traces.read(out)
    windows = trace.rows("windows", ("state_id", "arm", "discarded"))
    counted = Counter(row["state_id"] for row in windows if not row["discarded"])
    reasons = Counter(row["discarded"] for row in windows) - Counter(("", "warm-up", "noise") * len(windows))
    learned = load(str(out / MODEL)) if (out / MODEL).is_dir() else None
    headrooms = served_headrooms(trace, learned)
    return CharacterizeReport(out, figures, dict(sorted(counted.items())), dict(reasons), headrooms, not_begun)
