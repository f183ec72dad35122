"""`kvpolicy profile`: measures both options in the same states on a live engine, over block sizes and passes.

Every block size and pass has an engine of its own, a part. Passes over block sizes are interleaved, so that a machine
that becomes slower does not make one block size look expensive. Finished parts are kept: an interrupted profile is
resumed with the next one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from kvpolicy.errors import InputError
from kvpolicy.settings import Measurement
from kvpolicy_vllm.bench.engine_process import EngineProcess
from kvpolicy_vllm.bench.engine_run import WindowProgress, run_engine
from kvpolicy_vllm.bench.job import Job
from kvpolicy_vllm.bench.profile_parts import Extent, Rig, extent_of, model_length, parts_of
from kvpolicy_vllm.bench.profile_results import ProfileReport, finish_profile
from kvpolicy_vllm.bench.progress import Bar

ProgressCallback = Callable[[str, int, int], None]
"""Callback for progress: title of the part, windows done, windows in all; 0 in all while an engine starts."""

MEASURING = "kvpolicy_vllm.bench.measure_engine"
PLAN = "profile.json"
UNFINISHED = "unfinished"


def profile(
    out: Path, how: Measurement = Measurement(), progress: ProgressCallback | None = None, extent: Extent | None = None
) -> ProfileReport:
    """Measure, write a trace to ``out``, and return its report.

    ``extent``: overrides the one that ``how.quick`` selects. ``progress`` replaces the progress bar. Raises ValueError
    where ``out`` holds something else or was begun with other arguments, EngineFailed where an engine fails.
    """
    arguments = plan_arguments(how, extent=("quick" if how.quick else "full") if extent is None else asdict(extent))
    done = open_plan(out, arguments)
    with scratch_of(out) as scratch, progress_reporter(progress) as tell:
        rig = prepare(scratch, how, extent)
        parts = parts_of(rig.extent, rig.device)
        for number, part in enumerate(parts, start=1):
            if part.name in done:
                continue
            folder = scratch / part.name
            folder.mkdir()
            title = f"{part.name} ({number} of {len(parts)})"
            done[part.name] = measure_part(rig.job(part, folder), out, folder, part.name, partial(tell, title))
            write_plan(out, {"asked": arguments, "done": done})
    return finish_profile(out, list(done.values()))


def prepare(scratch: Path, how: Measurement, extent: Extent | None, shape: Mapping[str, Any] | None = None) -> Rig:
    """Find the settings that all parts share. ``shape``: shape of the model that is made where none is given."""
    llm = None if how.llm is None else str(how.llm)
    job = {"llm": llm, "make": str(scratch / "llm"), "seed": how.seed, "shape": shape or {}}
    with EngineProcess("kvpolicy_vllm.bench.inspect_model", scratch / "preparing.log") as process:
        answer = process.ask(job)
    device = bool(answer["device"])
    return Rig(
        Path(answer["llm"]), extent_of(how.quick, device) if extent is None else extent, how.link, how.seed, device
    )


def plan_arguments(how: Measurement, **amount: Any) -> dict[str, Any]:
    """A study's arguments as its plan file keeps them. Raises ValueError for a folder without a model."""
    if how.llm is not None:
        model_length(how.llm)
    llm, link = how.llm and str(how.llm.resolve()), how.link and how.link.text
    arguments = {"llm": llm, "link": link, "seed": how.seed} | amount
    return dict(json.loads(json.dumps(arguments)))


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
    for name, value in arguments.items():
        if recorded["asked"].get(name) != value:
            raise InputError(
                f"{out}: was begun with {name} {recorded['asked'].get(name)!r}, now asked for with {value!r}; "
                "give a new folder, or the same arguments to resume it"
            )
    return {name: core for name, core in recorded["done"].items() if (out / core / "header.json").exists()}


def _read_plan(plan: Path) -> dict[str, Any]:
    try:
        recorded = json.loads(plan.read_text())
    except ValueError as error:
        raise InputError(f"{plan}: not JSON, although a profile begins by writing it: {error}") from error
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


def measure_part(job: Job, out: Path, folder: Path, name: str, tell: WindowProgress) -> str:
    """Run one engine to completion; return the name of the core that was added to the trace."""

    def noise_entries(result: Mapping[str, Any]) -> dict[str, Any]:
        return {"repeats": result["repeats"], "asked_repeats": job.repeats, "discarded": result["discarded"]}

    return run_engine(MEASURING, job.to_dict(), out, folder, name, tell, noise_entries)
