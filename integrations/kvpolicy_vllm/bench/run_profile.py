"""`kvpolicy profile`: measures both options in the same states on a live engine, over block sizes and passes.

Every block size and pass has an engine of its own, a part. Passes over block sizes are interleaved, so that a machine
that becomes slower does not make one block size look expensive. Finished parts are kept: an interrupted profile is
resumed with the next one.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvpolicy.errors import InputError, KVPolicyError
from kvpolicy.fields import WrongValue
from kvpolicy.settings import Measurement
from kvpolicy.stored_values import read_json
from kvpolicy.trace import Header
from kvpolicy_vllm import launch
from kvpolicy_vllm.bench.budget import Budget, after, in_turn, next_job
from kvpolicy_vllm.bench.engine_process import EngineProcess
from kvpolicy_vllm.bench.engine_run import WindowProgress, run_engine
from kvpolicy_vllm.bench.job import Job
from kvpolicy_vllm.bench.own_server import OwnServer, named_model
from kvpolicy_vllm.bench.profile_parts import Extent, Rig, extent_of, model_length, parts_of
from kvpolicy_vllm.bench.profile_results import LeftOut, ProfileReport, finish_profile
from kvpolicy_vllm.bench.progress import Bar

ProgressCallback = Callable[[str, int, int], None]
"""Callback for progress: title of the part, windows done, windows in all; 0 in all while an engine starts."""

MEASURING = "kvpolicy_vllm.bench.measure_engine"
PLAN = "profile.json"
UNFINISHED = "unfinished"


def profile(
    out: Path,
    how: Measurement = Measurement(),
    progress: ProgressCallback | None = None,
    extent: Extent | None = None,
    clock: Callable[[], float] = time.monotonic,
    is_made: bool = False,
) -> ProfileReport:
    """Measure, write a trace to ``out``, and return its report.

    ``extent``: overrides the one that ``how.quick`` selects. ``progress`` replaces the progress bar. ``is_made``:
    whether ``how.llm`` is a model that kvpolicy made, which is in float32 on a CPU. Raises InputError where ``out``
    holds something else or was begun with other arguments, and for flags that vLLM or the plugin refuses; EngineFailed
    where an engine fails; WrongValue where ``how.minutes`` are too few for a single state.
    """
    amount = ("quick" if how.quick else "full") if extent is None else asdict(extent)
    arguments = plan_arguments(how, is_made, extent=amount)
    budget = Budget.of(how.minutes, clock)
    done = open_plan(out, arguments)
    left_out = _read_plan(out / PLAN).get("left_out", {})
    with scratch_of(out) as scratch, progress_reporter(progress) as tell:
        rig = prepare(scratch, how, extent, is_made=is_made)
        parts = in_turn(parts_of(rig.extent, rig.device), budget)
        while turn := next_job(
            parts, rig.extent.passes, lambda part: rig.job(part, scratch / part.name), done, left_out, budget
        ):
            part, job = turn
            folder = scratch / part.name
            folder.mkdir()
            tell_part = partial(tell, f"{part.name} ({len(done) + 1} of {max(len(parts), len(done) + 1)})")
            try:
                measured = measure_in_time(job, out, folder, part.name, tell_part, budget)
            except NothingMeasured as nothing:
                if done:
                    break
                raise WrongValue("minutes", f"is {how.minutes:g}, but {nothing}: give more") from None
            done[part.name] = measured.core
            left_out = after(left_out, job, measured.left_out)
            missing = LeftOut(left_out, tuple(one.name for one in parts if one.name not in done))
            write_plan(out, {"asked": arguments, "done": done, **asdict(missing)})
    missing = LeftOut(left_out, tuple(part.name for part in parts if part.name not in done))
    return finish_profile(out, list(done.values()), missing)


def prepare(
    scratch: Path,
    how: Measurement,
    extent: Extent | None,
    shape: Mapping[str, Any] | None = None,
    is_made: bool = False,
) -> Rig:
    """Find the settings that all parts share. ``shape``: shape of the model that is made where none is given.
    ``is_made``: whether kvpolicy has made the one that is given.

    Raises InputError, with vLLM's or the plugin's reason, where a server with these flags would not start.
    """
    job: dict[str, Any] = {"llm": named_model(how), "make": str(scratch / "llm"), "seed": how.seed}
    job["shape"] = shape or {}
    own_server = bool(how.vllm_flags) or (how.llm is not None and how.llm_folder is None)
    if own_server:
        job["flags"] = [*launch.flags({"policy": "always-recompute"}), *how.vllm_flags]
    log = scratch / "preparing.log"
    with EngineProcess("kvpolicy_vllm.bench.inspect_model", log, measures=not own_server) as process:
        answer = process.ask(job)
    if answer["refused"]:
        raise InputError(f"{answer['llm']}: {answer['refused']}")
    device, llm = bool(answer["device"]), answer["llm"]
    server = OwnServer(llm=llm, flags=tuple(how.vllm_flags), **answer["server"]) if own_server else None
    extent = extent_of(how.quick, device) if extent is None else extent
    extent = extent if server is None else extent.of_server(server)
    return Rig(Path(llm), extent, how.link, how.seed, device, server, is_made or how.llm is None)


def plan_arguments(how: Measurement, is_made: bool = False, **amount: Any) -> dict[str, Any]:
    """A study's arguments as its plan file keeps them; the time that a call may take is none of them.

    Raises WrongValue for a model that cannot be one, InputError for a flag that kvpolicy sets itself.
    """
    launch.refuse_measured(how.vllm_flags, has_model=how.llm is not None)
    if how.llm_folder is not None and not how.vllm_flags:
        model_length(how.llm_folder)
    arguments = {
        "llm": named_model(how),
        "link": how.link and how.link.text,
        "seed": how.seed,
        "vllm_flags": list(how.vllm_flags) or None,
        # Of a folder alone it is vLLM's choice. On a CPU earlier versions measured these in float32, and did not write
        # it down: see :func:`_refuse_other`.
        "dtype": "auto" if how.llm_folder is not None and not how.vllm_flags and not is_made else None,
    }
    return dict(json.loads(json.dumps(arguments | amount)))


def open_plan(out: Path, arguments: dict[str, Any]) -> dict[str, str]:
    """Read the finished parts, core by name, from the plan file; write a new plan where there is none.

    Raises InputError where ``out`` holds something else or was begun with other arguments.
    """
    plan = out / PLAN
    if not plan.exists():
        if out.exists() and any(out.iterdir()):
            raise InputError(f"{out}: holds something other than a profile; give a new folder")
        write_plan(out, {"asked": arguments, "done": {}})
        return {}
    recorded = _read_plan(plan)
    if not any(out.glob("*/header.json")):  # nothing is measured yet: the flags may have been wrong
        write_plan(out, {"asked": arguments, "done": {}})
        return {}
    for name, value in arguments.items():
        if recorded["asked"].get(name) != value:
            _refuse_other(out, name, recorded["asked"].get(name), value)
    return {name: core for name, core in recorded["done"].items() if (out / core / "header.json").exists()}


def _refuse_other(out: Path, name: str, before: object, now: object) -> None:
    """Raise InputError for an argument that is not what it was; but not for the data type on an accelerator, where
    every version has computed in the model's own."""
    if name == "dtype":
        headers = (Header.read(header) for header in sorted(out.glob("*/header.json")))
        if all(header.hardware["device"] != "cpu" for header in headers):
            return
        if before is None:
            raise InputError(
                f"{out}: was computed in float32, as by an earlier kvpolicy; now it is what `vllm serve` takes for the "
                "model's folder: give another --out, and `-- --dtype float32` with it to measure float32 again"
            )
    raise InputError(
        f"{out}: was begun with {name} {before!r}, now asked for with {now!r}; "
        "give a new folder, or the same arguments to resume it"
    )


def _read_plan(plan: Path) -> dict[str, Any]:
    try:
        recorded = read_json(plan)
    except InputError as error:
        raise InputError(f"{plan}: {error}, although a profile begins by writing it; give a new folder") from error
    if not isinstance(recorded, dict) or not all(isinstance(recorded.get(name), dict) for name in ("asked", "done")):
        raise InputError(f"{plan}: should hold the objects 'asked' and 'done'; give a new folder")
    return recorded


def write_plan(out: Path, plan: dict[str, Any]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    scratch = out / f".{PLAN}"
    scratch.write_text(json.dumps(plan, indent=1) + "\n")
    scratch.replace(out / PLAN)


@contextmanager
def scratch_of(out: Path) -> Iterator[Path]:
    """A folder for unfinished parts, emptied before and removed after: an interrupted part is measured anew."""
    scratch = out / UNFINISHED
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def progress_reporter(progress: ProgressCallback | None, title: str = "profile") -> Iterator[ProgressCallback]:
    if progress is not None:
        yield progress
    else:
        with Bar(title) as bar:
            yield bar.tell


class NothingMeasured(KVPolicyError):
    """An engine's time was over before it measured a state; the message says what took it."""


@dataclass(frozen=True, slots=True)
class MeasuredPart:
    """What one engine has measured."""

    core: str
    """Of the trace."""
    left_out: Mapping[str, int]
    """Repeats or pairs that time was too short for, by state."""


def measure_in_time(job: Job, out: Path, folder: Path, name: str, tell: WindowProgress, budget: Budget) -> MeasuredPart:
    """Run one engine until it has measured everything, or its time is over. ``budget`` learns what an engine takes
    besides. Raises NothingMeasured, and adds nothing to the trace, where no state was measured."""
    found: dict[str, Any] = {}
    start_s = budget.clock()

    def noise_entries(result: Mapping[str, Any]) -> dict[str, Any]:
        found.update(result)
        if result["left_out"] == job.requested:
            raise NothingMeasured(f"an engine took {budget.clock() - start_s:.0f} s to start and to warm up")
        entries = {"repeats": result["repeats"], "asked_repeats": job.repeats, "discarded": result["discarded"]}
        return entries | ({"left_out": result["left_out"]} if result["left_out"] else {})

    core = run_engine(MEASURING, job.to_dict(), out, folder, name, tell, noise_entries)
    budget.learn(start_s, found["measured_s"])
    return MeasuredPart(core, found["left_out"])


def measure_part(job: Job, out: Path, folder: Path, name: str, tell: WindowProgress) -> str:
    """Run one engine to completion; return the name of the core that was added to the trace."""
    return measure_in_time(job, out, folder, name, tell, Budget.of(None, time.monotonic)).core
