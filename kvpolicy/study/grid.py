"""Grids of simulations: built from lists, run on processes or on Ray, and resumable from cached results."""

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

from kvpolicy.code_digest import call_of
from kvpolicy.errors import InputError, KVPolicyError
from kvpolicy.fields import WrongValue, refuse_non_integer, refuse_other, refuse_single
from kvpolicy.hardware.link import NATIVE
from kvpolicy.order import Order
from kvpolicy.policy import Policy, specs_by_label
from kvpolicy.study.cache import Result, ResultCache, default_folder
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
    orders: Sequence[str | Order] = (),
) -> SweepReport:
    """Simulate every workload under every policy, order, memory and link, as often as ``run`` says.

    ``workloads``: texts as for :func:`kvpolicy.workload.open_workload`, where random ones are drawn from the seed;
    ``requests:FILE`` replays a measured run. A :class:`~kvpolicy.workload.Workload` object is the same under every
    seed. ``policies``: names or objects; an object, as the order of ``serving`` may be one, must be picklable
    where other processes run its cells.
    ``kv_blocks``: usable blocks of the device. ``hardware``: :data:`~kvpolicy.study.config.HARDWARE_FORMS`; or an
    object, a hardware model or a trained cost model. ``links``: ``native`` or ``BYTES_PER_S[,LATENCY_S]``.
    ``orders``: orders of service, in place of that of ``serving``, with which every policy is simulated. Cached
    results of earlier calls with the same inputs are reused. Failed cells are in the report, and the others are
    finished; raises KVPolicyError, the first cell's, where no cell can begin.
    """
    refuse_single(workloads=workloads, policies=policies, kv_blocks=kv_blocks, links=links, orders=orders)
    for name, values in (("workloads", workloads), ("policies", policies), ("kv_blocks", kv_blocks), ("links", links)):
        if not values:
            raise WrongValue(name, "are none, should be at least one")
    for number, link in enumerate(links):
        refuse_other(f"links[{number}]", link, str, "a text, as in native")
    for number, blocks in enumerate(kv_blocks):
        refuse_non_integer(f"kv_blocks[{number}]", blocks)
    refuse_other("serving", serving, Serving, "a Serving")
    refuse_other("run", run, Run, "a Run")
    named_hardware = hardware_named(hardware)
    serving = serving.on(machine_named(named_hardware).device)
    servers = list(dict.fromkeys(replace(serving, order=order) for order in orders)) or [serving]
    cells = [
        Cell(
            workload=workload.label,
            policy=policy.label,
            kv_blocks=blocks,
            link=link,
            seed=seed,
            hardware=named_hardware.label,
            engine=run.engine,
            serving=server,
            part=part,
            parts=run.parts,
            module=policy.module,
            policy_digest=policy.digest,
            policy_object=policy.policy_object,
            workload_digest=workload.digest,
            workload_object=workload.value,
            hardware_digest=named_hardware.digest,
            hardware_object=named_hardware.value,
            slo=run.slo,
        )
        for workload, blocks, link, server, policy in itertools.product(
            [workload_named(item) for item in workloads], kv_blocks, links, servers, contenders(policies)
        )
        for seed in range(run.seeds)
        for part in range(run.parts)
    ]
    return sweep(cells, run)


def sweep(cells: Sequence[Cell], run: Run) -> SweepReport:
    """Run all cells, on processes or on Ray as ``run`` says; see :func:`simulate`."""
    cache = ResultCache(default_folder() if run.cache is None else run.cache)
    digests, failed = _digests(cells)
    results = {} if run.fresh else _cached_results(digests, cache, run.out)
    taken_up = len(results)
    run.progress(taken_up, len(digests), f"{taken_up} from the cache")
    pending = [cell for cell in digests if cell not in results]
    tasks = [Task(cell, digests[cell], _folder(run.out, digests[cell])) for cell in pending]
    for finished, (number, outcome) in enumerate(_run_all(tasks, run), taken_up + 1):
        cell = pending[number]
        if isinstance(outcome, BaseException):
            failed.append(Failed(cell, _words(outcome)))
            if not isinstance(outcome, KVPolicyError | OSError):
                traceback.print_exception(outcome)  # a bug: show it, and go on with the other cells
        else:
            results[cell] = {"digest": digests[cell], "kvpolicy": __version__, **outcome}
            cache.store(digests[cell], results[cell])
        run.progress(finished, len(digests), cell.words())
    return SweepReport(
        tuple(results[cell] for cell in digests if cell in results), tuple(failed), taken_up, _specs(cells)
    )


def _specs(cells: Sequence[Cell]) -> dict[str, str]:
    """What was given for the policies, and for an order that is an object, where labels do not say it."""
    by_label = {cell.policy: cell.policy_object or cell.module or cell.policy for cell in cells}
    orders = {order.label: call_of(order) for cell in cells if (order := cell.serving.order_object) is not None}
    specs = specs_by_label(list(by_label.values()), list(by_label))
    return specs | {label: call for label, call in orders.items() if call}


@dataclass(frozen=True, slots=True)
class Task:
    """What is sent to a worker."""

    cell: Cell
    digest: str
    out: Path | None
    packed_policy: bytes = b""
    """The cell's policy, pickled, where it is an object."""
    packed_order: bytes = b""
    """The same of its order."""
    order: str = ""
    """The order's label, where it is an object."""

    def packed(self) -> Task:
        """The task with its policy and order pickled, where they are objects. Raises InputError for one that cannot be
        pickled."""
        task, policy, order = self, self.cell.policy_object, self.cell.serving.order_object
        if policy is not None:
            task = replace(task, cell=replace(task.cell, policy_object=None), packed_policy=packed("policy", policy))
        if order is not None:
            serving = replace(task.cell.serving, order="fcfs")
            task = replace(task, cell=replace(task.cell, serving=serving), packed_order=packed("order", order))
            task = replace(task, order=str(self.cell.serving.order))
        return task

    def unpacked(self) -> Task:
        """The task with its policy and order unpickled. Raises InputError for one whose class is not found."""
        cell = self.cell
        if self.packed_policy:
            cell = replace(cell, policy_object=unpacked("policy", self.packed_policy, cell.policy))
        if self.packed_order:
            order = unpacked("order", self.packed_order, self.order)
            cell = replace(cell, serving=replace(cell.serving, order=order))
        return replace(self, cell=cell)


def work(task: Task) -> Result:
    """Simulate one cell; a trace is put in place by rename once it is complete. Raises InputError where the cell's
    inputs changed since the grid began: the result would be cached under the old inputs."""
    task = task.unpacked()
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
        tasks = [task.packed() for task in tasks]
    if run.ray is None:
        return in_processes(work, tasks, jobs)
    try:
        on_ray = import_module("kvpolicy.study.on_ray")
    except ModuleNotFoundError as error:
        needs = f"needs Ray, which is not installed ({error}): pip install 'kvpolicy[ray]'"
        raise WrongValue("ray", needs) from error
    outcomes: Iterator[tuple[int, Any]] = on_ray.on_ray(work, tasks, run.ray)
    return outcomes


def _digests(cells: Sequence[Cell]) -> tuple[dict[Cell, str], list[Failed]]:
    """Digest by cell, and the cells with invalid inputs. Raises the first error where all are invalid."""
    digests: dict[Cell, str] = {}
    failed: list[Failed] = []
    first_error: KVPolicyError | OSError | None = None
    for cell in cells:
        try:
            digests[cell] = cell.digest(contents(cell))
        except (KVPolicyError, OSError) as error:
            failed.append(Failed(cell, _words(error)))
            first_error = first_error or error
    if first_error is not None and not digests:
        raise first_error
    return digests, failed


def _cached_results(digests: Mapping[Cell, str], cache: ResultCache, out: Path | None) -> dict[Cell, Result]:
    """Cached results, except for cells whose trace is wanted and missing."""
    folders = {cell: _folder(out, digest) for cell, digest in digests.items()}
    reusable = [cell for cell, folder in folders.items() if folder is None or folder.is_dir()]
    return {cell: result for cell in reusable if (result := cache.find(digests[cell])) is not None}


def _folder(out: Path | None, digest: str) -> Path | None:
    return None if out is None else out / digest[:16]


def _words(error: BaseException) -> str:
    message = " ".join(str(error).split())
    return message if isinstance(error, KVPolicyError | OSError) and message else f"{type(error).__name__}: {message}"
