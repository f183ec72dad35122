"""A grid of simulations: made of lists, run on processes or on Ray, taken up again where it was cut off."""

from __future__ import annotations

import itertools
import os
import shutil
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from kvpolicy.errors import InputError, KVPolicyError
from kvpolicy.fields import WrongValue
from kvpolicy.hardware.link import NATIVE
from kvpolicy.policy import Policy
from kvpolicy.study.cache import Kept, Result, usual_folder
from kvpolicy.study.cell import Cell
from kvpolicy.study.config import Run, Serving
from kvpolicy.study.contender import contenders, packed, unpacked
from kvpolicy.study.inputs import HardwareObject, hardware_named, workload_named
from kvpolicy.study.machine import machine_named
from kvpolicy.study.report import Failed, SweepReport
from kvpolicy.study.run_cell import contents
from kvpolicy.study.run_cell import run as run_cell
from kvpolicy.study.workers import in_processes
from kvpolicy.version import __version__
from kvpolicy.workload import Workload


def simulate(
    workloads: Sequence[str | Workload],
    policies: Sequence[str | Policy],
    kv_blocks: Sequence[int],
    hardware: str | HardwareObject,
    links: Sequence[str] = (NATIVE,),
    serving: Serving = Serving(),
    run: Run = Run(),
) -> SweepReport:
    """Simulate every workload under every policy, memory and link, as often as ``run`` says.

    Workloads as :func:`kvpolicy.workload.open_workload` takes them, drawn by the seed where they draw at all;
    ``requests:FILE`` replays a measured run. A :class:`~kvpolicy.workload.Workload` itself is the same under every
    seed. ``policies``: each by its name or itself; an object has to be picklable where other processes run its cells.
    ``kv_blocks``: usable ones of the device. ``hardware``: :data:`~kvpolicy.study.config.HARDWARE_FORMS`; or what such
    a folder holds, a hardware model or a trained cost model itself. ``links``: ``native`` or
    ``BYTES_PER_S[,LATENCY_S]``. What is kept of an earlier call with the same inputs is taken up. Cells that fail are
    in the report, and the others are finished; raises ValueError where none can even begin.
    """
    place = hardware_named(hardware)
    serving = serving.on(machine_named(place).device)
    if not workloads:
        raise WrongValue("workloads", "are none, should be one at least")
    cells = [
        Cell(
            workload=workload.label,
            policy=policy.label,
            kv_blocks=blocks,
            link=link,
            seed=seed,
            hardware=place.label,
            engine=run.engine,
            serving=serving,
            part=part,
            parts=run.parts,
            module=policy.module,
            policy_digest=policy.digest,
            given=policy.given,
            workload_digest=workload.digest,
            requests=workload.given,
            hardware_digest=place.digest,
            hardware_object=place.given,
        )
        for workload, blocks, link, policy in itertools.product(
            [workload_named(one) for one in workloads], kv_blocks, links, contenders(policies)
        )
        for seed in range(run.seeds)
        for part in range(run.parts)
    ]
    return sweep(cells, run)


def sweep(cells: Sequence[Cell], run: Run) -> SweepReport:
    """Run all of them, by ``run.jobs`` or ``run.ray``; see :func:`simulate`."""
    kept = Kept(usual_folder() if run.cache is None else run.cache)
    digests, failed = _digests(cells)
    results = {} if run.fresh else _taken_up(digests, kept, run.out)
    taken_up = len(results)
    run.progress(taken_up, len(digests), f"{taken_up} taken up")
    todo = [cell for cell in digests if cell not in results]
    tasks = [Task(cell, digests[cell], _folder(run.out, digests[cell])) for cell in todo]
    for done, (number, outcome) in enumerate(_run_all(tasks, run), taken_up + 1):
        cell = todo[number]
        if isinstance(outcome, BaseException):
            failed.append(Failed(cell, _words(outcome)))
            if not isinstance(outcome, KVPolicyError | OSError):
                traceback.print_exception(outcome)  # a fault of the program: the others go on, and this one is seen
        else:
            results[cell] = {"digest": digests[cell], "kvpolicy": __version__, **outcome}
            kept.keep(digests[cell], results[cell])
        run.progress(done, len(digests), cell.words())
    return SweepReport(tuple(results[cell] for cell in digests if cell in results), tuple(failed), taken_up)


@dataclass(frozen=True, slots=True)
class Task:
    """What travels to a worker."""

    cell: Cell
    digest: str
    out: Path | None
    packed: bytes = b""
    """The cell's policy, where that is an object."""

    def to_travel(self) -> Task:
        """The same for another process. Raises InputError for a policy that cannot go there."""
        policy = self.cell.given
        return self if policy is None else replace(self, cell=replace(self.cell, given=None), packed=packed(policy))

    def arrived(self) -> Task:
        """The same where it is worked on. Raises InputError for a policy whose class is not found there."""
        if not self.packed:
            return self
        return replace(self, cell=replace(self.cell, given=unpacked(self.packed, self.cell.policy)))


def work(task: Task) -> Result:
    """One cell, its trace put in place by rename once it is whole. Raises ValueError where what it names is not what
    it was when the grid began: its result would be kept for what was there before."""
    task = task.arrived()
    if task.cell.digest(contents(task.cell)) != task.digest:
        raise InputError("its workload, hardware, policy or cost model changed while the grid ran; run it again")
    if task.out is None:
        return run_cell(task.cell)
    scratch = task.out.with_name(f".{task.out.name}.{os.getpid()}")
    shutil.rmtree(scratch, ignore_errors=True)
    result = run_cell(task.cell, scratch)
    shutil.rmtree(task.out, ignore_errors=True)
    scratch.replace(task.out)
    return result


def _run_all(tasks: Sequence[Task], run: Run) -> Iterator[tuple[int, Any]]:
    if not tasks:
        return iter(())
    jobs = len(os.sched_getaffinity(0)) if run.jobs is None else run.jobs
    if run.ray is not None or jobs:
        tasks = [task.to_travel() for task in tasks]
    if run.ray is None:
        return in_processes(work, tasks, jobs)
    try:
        on_ray = import_module("kvpolicy.study.on_ray")
    except ModuleNotFoundError as error:
        needs = f"needs Ray, which is not installed ({error}): pip install 'kvpolicy[ray]'"
        raise WrongValue("ray", needs) from error
    found: Iterator[tuple[int, Any]] = on_ray.on_ray(work, tasks, run.ray)
    return found


def _digests(cells: Sequence[Cell]) -> tuple[dict[Cell, str], list[Failed]]:
    """Digest by cell, and the cells whose inputs are wrong. Raises the first one's error where all are."""
    found: dict[Cell, str] = {}
    failed: list[Failed] = []
    first: KVPolicyError | OSError | None = None
    for cell in cells:
        try:
            found[cell] = cell.digest(contents(cell))
        except (KVPolicyError, OSError) as error:
            failed.append(Failed(cell, _words(error)))
            first = first or error
    if first is not None and not found:
        raise first
    return found, failed


def _taken_up(digests: Mapping[Cell, str], kept: Kept, out: Path | None) -> dict[Cell, Result]:
    """What is kept, but for cells whose trace is asked for and is not there."""
    folders = {cell: _folder(out, digest) for cell, digest in digests.items()}
    there = [cell for cell, folder in folders.items() if folder is None or folder.is_dir()]
    return {cell: result for cell in there if (result := kept.find(digests[cell])) is not None}


def _folder(out: Path | None, digest: str) -> Path | None:
    return None if out is None else out / digest[:16]


def _words(error: BaseException) -> str:
    said = " ".join(str(error).split())
    return said if isinstance(error, KVPolicyError | OSError) and said else f"{type(error).__name__}: {said}"
