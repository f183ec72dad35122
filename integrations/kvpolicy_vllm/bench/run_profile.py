"""`kvpolicy profile`: both options in the same states, on a live engine, over block sizes and passes.

A block size needs an engine of its own, and so does every pass over it; passes over block sizes are interleaved, so
that a machine that grows slower does not make one of them look expensive. What is finished stays: an interrupted
profile is taken up again where it was.
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
from kvpolicy_vllm.bench.engine_run import Counted, run_to_its_end
from kvpolicy_vllm.bench.job import Job
from kvpolicy_vllm.bench.profile_parts import Extent, Rig, extent_of, model_length, parts_of
from kvpolicy_vllm.bench.profile_results import ProfileReport, finish_profile
from kvpolicy_vllm.bench.progress import Bar

Tell = Callable[[str, int, int], None]
"""Told what is being measured, windows done, windows in all; 0 in all while an engine starts."""

MEASURING = "kvpolicy_vllm.bench.measure_engine"
PLAN = "profile.json"
UNFINISHED = "unfinished"


def profile(
    out: Path, how: Measurement = Measurement(), progress: Tell | None = None, extent: Extent | None = None
) -> ProfileReport:
    """Measure and write a trace to ``out``; returns what it says about itself.

    ``extent``: instead of what ``how.quick`` says. ``progress`` replaces the progress bar. Raises ValueError for an
    ``out`` that holds something else and for one begun with other arguments, EngineFailed where an engine ends badly.
    """
    asked = asked_for(how, extent=("quick" if how.quick else "full") if extent is None else asdict(extent))
    done = take_up(out, asked)
    with scratch_of(out) as scratch, telling(progress) as tell:
        rig = prepare(scratch, how, extent)
        parts = parts_of(rig.extent, rig.device)
        for number, part in enumerate(parts, start=1):
            if part.name in done:
                continue
            folder = scratch / part.name
            folder.mkdir()
            what = f"{part.name} ({number} of {len(parts)})"
            done[part.name] = measure_part(rig.job(part, folder), out, folder, part.name, partial(tell, what))
            write_plan(out, {"asked": asked, "done": done})
    return finish_profile(out, list(done.values()))


def prepare(scratch: Path, how: Measurement, extent: Extent | None, shape: Mapping[str, Any] | None = None) -> Rig:
    """What all parts share. ``shape``: of the model that is made where none is given."""
    llm = None if how.llm is None else str(how.llm)
    job = {"llm": llm, "make": str(scratch / "llm"), "seed": how.seed, "shape": shape or {}}
    with EngineProcess("kvpolicy_vllm.bench.inspect_model", scratch / "preparing.log") as process:
        found = process.ask(job)
    device = bool(found["device"])
    return Rig(
        Path(found["llm"]), extent_of(how.quick, device) if extent is None else extent, how.link, how.seed, device
    )


def asked_for(how: Measurement, **how_much: Any) -> dict[str, Any]:
    """What a study was asked for, as its plan keeps it. Raises ValueError for what is no model."""
    if how.llm is not None:
        model_length(how.llm)
    llm, link = how.llm and str(how.llm.resolve()), how.link and how.link.text
    asked = {"llm": llm, "link": link, "seed": how.seed} | how_much
    return dict(json.loads(json.dumps(asked)))


def take_up(out: Path, asked: dict[str, Any]) -> dict[str, str]:
    """The parts that are done: core by name. Begins the profile where there is none."""
    plan = out / PLAN
    if not plan.exists():
        if out.exists() and any(out.iterdir()):
            raise InputError(f"{out}: holds something that is no profile; give a new folder")
        write_plan(out, {"asked": asked, "done": {}})
        return {}
    begun = _begun(plan)
    for name, value in asked.items():
        if begun["asked"].get(name) != value:
            raise InputError(
                f"{out}: was begun with {name} {begun['asked'].get(name)!r}, now asked for with {value!r}; "
                "give a new folder, or the same arguments to take it up again"
            )
    return {name: core for name, core in begun["done"].items() if (out / core / "header.json").exists()}


def _begun(plan: Path) -> dict[str, Any]:
    try:
        begun = json.loads(plan.read_text())
    except ValueError as error:
        raise InputError(f"{plan}: not JSON, though a profile begins by writing it: {error}") from error
    if not isinstance(begun, dict) or not all(isinstance(begun.get(name), dict) for name in ("asked", "done")):
        raise InputError(f"{plan}: should hold the objects 'asked' and 'done'; give a new folder")
    return begun


def write_plan(out: Path, plan: dict[str, Any]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    scratch = out / f".{PLAN}"
    scratch.write_text(json.dumps(plan, indent=1) + "\n")
    scratch.replace(out / PLAN)


@contextmanager
def scratch_of(out: Path) -> Iterator[Path]:
    """Where unfinished parts are; a part that was interrupted is measured anew."""
    scratch = out / UNFINISHED
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def telling(progress: Tell | None, what: str = "profile") -> Iterator[Tell]:
    if progress is not None:
        yield progress
    else:
        with Bar(what) as bar:
            yield bar.tell


def measure_part(job: Job, out: Path, folder: Path, name: str, tell: Counted) -> str:
    """Run one engine to its end; returns the name of the core that is now in the trace."""

    def more(result: Mapping[str, Any]) -> dict[str, Any]:
        return {"repeats": result["repeats"], "asked_repeats": job.repeats, "discarded": result["discarded"]}

    return run_to_its_end(MEASURING, job.to_dict(), out, folder, name, tell, more)
