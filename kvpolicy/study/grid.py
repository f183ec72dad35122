"""A grid of simulations: made of lists, run on processes or on Ray, taken up again where it was cut off."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from kvpolicy.hardware.link import NATIVE
from kvpolicy.study.cache import Kept, Result, usual_folder
from kvpolicy.study.cell import DEFAULT_HOST_GIB, Cell, Serving, server_defaults
from kvpolicy.study.machine import open_machine
from kvpolicy.study.report import Failed, SweepReport
from kvpolicy.study.run_cell import MEASURED, contents, run
from kvpolicy.study.workers import in_processes
from kvpolicy.version import __version__

Progress = Callable[[int, int, str], None]
"""Told the cells that are done, the cells in all, and the latest one in words."""


@dataclass(frozen=True, slots=True)
class Workers:
    """Who runs the cells, and where results go."""

    jobs: int | None = None
    """Processes; None: one per core; 0: this process itself."""
    ray: str | None = None
    """Address of a Ray cluster, or ``auto``."""
    out: Path | None = None
    """Folder for traces, one sub-folder per cell."""
    kept: Kept = field(default_factory=lambda: Kept(usual_folder()))
    fresh: bool = False
    """Whether to simulate also what is kept."""

    def __post_init__(self) -> None:
        if self.jobs is not None and self.jobs < 0:
            raise ValueError(f"jobs is {self.jobs}: should be 1 or more, or 0 for none but this process")


def simulate(
    workloads: Sequence[str],
    policies: Sequence[str],
    kv_blocks: Sequence[int],
    hardware: str,
    links: Sequence[str] = (NATIVE,),
    engine: str = "builtin",
    block_size: int = 16,
    host_gib: float | None = None,
    host_blocks: int | None = None,
    token_budget: int | None = None,
    max_num_seqs: int | None = None,
    prefix_caching: bool = True,
    scheduling: str = "fcfs",
    asynchronous: bool | None = None,
    watermark: float = 0.0,
    seeds: int = 1,
    parts: int = 1,
    jobs: int | None = None,
    ray: str | None = None,
    out: Path | None = None,
    cache: Path | None = None,
    fresh: bool = False,
    requests: Sequence[Path] = (),
    progress: Progress | None = None,
) -> SweepReport:
    """Simulate every workload under every policy, memory and link, ``seeds`` times.

    Workloads as :func:`kvpolicy.workload.open_workload` takes them, drawn by the seed where they draw at all; cut
    into ``parts``, each a run of its own. ``requests``: files of measured runs, whose requests are replayed.
    ``hardware``: :data:`kvpolicy.study.machine.FORMS`. ``links``: ``native`` or ``BYTES_PER_S[,LATENCY_S]``.
    ``token_budget``, ``max_num_seqs``, ``asynchronous``: None for what vLLM takes on that device. What is kept of an
    earlier call with the same inputs is taken up (``cache``: where; ``fresh``: simulate it again). Cells that fail are
    in the report, and the others are finished; raises ValueError where none can even begin.
    """
    if host_gib is None and host_blocks is None:
        host_gib = DEFAULT_HOST_GIB
    usual = server_defaults(str(open_machine(hardware).hardware.get("device")))
    serving = Serving(
        block_size,
        host_gib,
        host_blocks,
        usual.token_budget if token_budget is None else token_budget,
        usual.max_num_seqs if max_num_seqs is None else max_num_seqs,
        prefix_caching,
        scheduling,
        usual.asynchronous if asynchronous is None else asynchronous,
        watermark,
    )
    for name, number in (("seeds", seeds), ("parts", parts)):
        if number < 1:
            raise ValueError(f"{name} is {number}: should be 1 or more")
    workloads = [*workloads, *(f"{MEASURED}:{file}" for file in requests)]
    if not workloads:
        raise ValueError("no workload: give --workload or --requests")
    cells = [
        Cell(workload, policy, blocks, link, seed, hardware, engine, serving, part, parts)
        for workload, blocks, link, policy in itertools.product(workloads, kv_blocks, links, policies)
        for seed in range(seeds)
        for part in range(parts)
    ]
    kept = Kept(usual_folder() if cache is None else cache)
    return sweep(cells, Workers(jobs, ray, out, kept, fresh), progress)


def sweep(cells: Sequence[Cell], workers: Workers, progress: Progress | None = None) -> SweepReport:
    """Run all of them; see :func:`simulate`."""
    digests, failed = _digests(cells)
    results = {} if workers.fresh else _taken_up(digests, workers)
    taken_up, tell = len(results), progress or _silent
    tell(taken_up, len(digests), f"{taken_up} taken up")
    todo = [cell for cell in digests if cell not in results]
    tasks = [Task(cell, digests[cell], _folder(workers, digests[cell])) for cell in todo]
    for done, (number, outcome) in enumerate(_run_all(tasks, workers), taken_up + 1):
        cell = todo[number]
        if isinstance(outcome, BaseException):
            failed.append(Failed(cell, _words(outcome)))
        else:
            results[cell] = {"digest": digests[cell], "kvpolicy": __version__, **outcome}
            workers.kept.keep(digests[cell], results[cell])
        tell(done, len(digests), cell.words())
    return SweepReport(tuple(results[cell] for cell in digests if cell in results), tuple(failed), taken_up)


@dataclass(frozen=True, slots=True)
class Task:
    """What travels to a worker."""

    cell: Cell
    digest: str
    out: Path | None


def work(task: Task) -> Result:
    """One cell, its trace put in place by rename once it is whole. Raises ValueError where what it names is not what
    it was when the grid began: its result would be kept for what was there before."""
    if task.cell.digest(contents(task.cell)) != task.digest:
        raise ValueError("its workload, hardware or cost model changed while the grid ran; run it again")
    if task.out is None:
        return run(task.cell)
    scratch = task.out.with_name(f".{task.out.name}.{os.getpid()}")
    shutil.rmtree(scratch, ignore_errors=True)
    result = run(task.cell, scratch)
    shutil.rmtree(task.out, ignore_errors=True)
    scratch.replace(task.out)
    return result


def _run_all(tasks: Sequence[Task], workers: Workers) -> Iterator[tuple[int, Any]]:
    if not tasks:
        return iter(())
    if workers.ray is None:
        jobs = len(os.sched_getaffinity(0)) if workers.jobs is None else workers.jobs
        return in_processes(work, tasks, jobs)
    try:
        on_ray = import_module("kvpolicy.study.on_ray")
    except ModuleNotFoundError as error:
        raise ValueError(f"--ray needs Ray, which is not installed ({error}): pip install 'kvpolicy[ray]'") from error
    found: Iterator[tuple[int, Any]] = on_ray.on_ray(work, tasks, workers.ray)
    return found


def _digests(cells: Sequence[Cell]) -> tuple[dict[Cell, str], list[Failed]]:
    """Digest by cell, and the cells whose inputs are wrong. Raises the first one's error where all are."""
    found: dict[Cell, str] = {}
    failed: list[Failed] = []
    first: ValueError | OSError | None = None
    for cell in cells:
        try:
            found[cell] = cell.digest(contents(cell))
        except (ValueError, OSError) as error:
            failed.append(Failed(cell, _words(error)))
            first = first or error
    if first is not None and not found:
        raise first
    return found, failed


def _taken_up(digests: Mapping[Cell, str], workers: Workers) -> dict[Cell, Result]:
    found = {cell: workers.kept.find(digest) for cell, digest in digests.items() if _has_trace(workers, digest)}
    return {cell: result for cell, result in found.items() if result is not None}


def _folder(workers: Workers, digest: str) -> Path | None:
    return None if workers.out is None else workers.out / digest[:16]


def _has_trace(workers: Workers, digest: str) -> bool:
    """Whether the trace that is asked for is there; True where none is asked for."""
    folder = _folder(workers, digest)
    return folder is None or folder.is_dir()


def _words(error: BaseException) -> str:
    said = " ".join(str(error).split())
    return said if isinstance(error, ValueError | OSError) and said else f"{type(error).__name__}: {said}"


def _silent(done: int, total: int, words: str) -> None:
    pass
