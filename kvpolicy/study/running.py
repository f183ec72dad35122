"""From a cell's words to a run, and from the run to the numbers that are kept."""

from __future__ import annotations

import hashlib
import warnings
from dataclasses import asdict
from functools import cache, lru_cache
from importlib import resources
from importlib.metadata import PackageNotFoundError, version
from math import isnan
from pathlib import Path
from typing import Any

from kvpolicy import __version__
from kvpolicy import policy as policies
from kvpolicy.cost import Engine, ModelWarning
from kvpolicy.policy import Policy
from kvpolicy.simulator import Link, Server, Sink, Summary, Times
from kvpolicy.simulator.oracle import Oracle
from kvpolicy.simulator.sinks import FolderSink
from kvpolicy.simulator.watched import Watched
from kvpolicy.study.cells import Cell, Serving
from kvpolicy.study.engine import rules_of, simulator_of
from kvpolicy.study.links import Behind, GivenLink
from kvpolicy.study.machine import Machine, open_machine
from kvpolicy.study.opening import opened
from kvpolicy.study.parts import Part
from kvpolicy.workload import Source

NATIVE = "native"
ORACLE = "oracle"
"""A policy by name in simulations alone: the cheaper option by the simulator's own times."""
KEEP_MODELS = 32
"""Opened cost models and machines that a process keeps: cells that follow each other use the same ones."""


def run(cell: Cell, out: Path | None = None) -> dict[str, Any]:
    """Simulate one cell. ``out``: folder for its trace. Raises ValueError for inputs that are wrong."""
    source = source_of(cell)
    if next(iter(source), None) is None:
        raise ValueError(f"workload {cell.workload} holds no request")
    machine = machine_of(cell)
    policy, told = policy_of(cell)
    watched = Watched(policy)
    sink: Sink | None = None if out is None else FolderSink(out)
    done = simulator_of(cell.engine).run(
        source, watched, server_of(cell, machine), times_of(cell, machine), seed=cell.seed, sink=sink
    )
    return {
        "inputs": cell.inputs(),
        **numbers(done.summary),
        "choices": watched.seen.choices,
        "extrapolated": watched.seen.extrapolated,
        "facts": list(machine.facts),
        "warnings": list(told),
        "unmeasured": list(machine.unmeasured),
    }


def numbers(summary: Summary) -> dict[str, Any]:
    """A summary as JSON has it, which knows no nan: what nobody had (single tokens have no time between) is None."""
    told = asdict(summary) | {"preemptions": dict(summary.preemptions)}
    return {name: _defined(value) for name, value in told.items()}


def _defined(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _defined(one) for name, one in value.items()}
    return None if isinstance(value, float) and isnan(value) else value


# ---- what a cell names ----


def source_of(cell: Cell) -> Source:
    """Its workload, drawn by the cell's seed unless the workload names one itself."""
    whole = opened(seeded(cell.workload, cell.seed), workload_digest(cell.workload))
    return whole if cell.parts == 1 else Part(whole, cell.part, cell.parts)


def seeded(workload: str, seed: int) -> str:
    """The workload's words with a seed, where they name none."""
    _, _, options = workload.partition("?")
    if any(option.startswith("seed=") for option in options.split("&")):
        return workload
    return f"{workload}{'&' if options else '?'}seed={seed}"


def machine_of(cell: Cell) -> Machine:
    return open_machine(cell.hardware)


def link_of(cell: Cell) -> GivenLink | None:
    """None: the hardware's own."""
    return None if cell.link == NATIVE else GivenLink.parse(cell.link)


def times_of(cell: Cell, machine: Machine) -> Times:
    link = link_of(cell)
    return machine.times if link is None else Behind(machine.times, link)


def server_of(cell: Cell, machine: Machine) -> Server:
    serving, block_bytes = cell.serving, machine.block_bytes(cell.serving.block_size)
    copies = Link(
        overlapped=cell.link != NATIVE or not machine.waits_for_copies,
        slowdown=machine.slowdown(times_of(cell, machine)),
        saves_wait=True,
    )
    return Server(
        block_size=serving.block_size,
        block_bytes=block_bytes,
        device_blocks=cell.kv_blocks,
        host_blocks=serving.host_blocks_of(block_bytes),
        token_budget=serving.token_budget,
        max_running=serving.max_num_seqs,
        prefix_caching=serving.prefix_caching,
        scheduling="priority" if serving.scheduling == "priority" else "fcfs",
        asynchronous=serving.asynchronous,
        watermark=serving.watermark,
        segment_bytes=machine.segment_bytes(serving.block_size),
        link=copies,
        rules=rules_of(cell.engine),
        hardware=machine.hardware,
        geometry=machine.geometry.to_dict(),
    )


def policy_of(cell: Cell) -> tuple[Policy, tuple[str, ...]]:
    """The cell's policy as a server would load it, and what its cost model warns of; or the simulator's own oracle.

    Raises ModelError for a cost model that does not fit the server.
    """
    if cell.policy == ORACLE:
        machine = machine_of(cell)
        return Oracle(times_of(cell, machine), server_of(cell, machine)), ()
    return _loaded(cell.policy, cell.hardware, cell.link, cell.serving)


@lru_cache(maxsize=KEEP_MODELS)
def _loaded(policy: str, hardware: str, link: str, serving: Serving) -> tuple[Policy, tuple[str, ...]]:
    machine = open_machine(hardware)
    told_link = machine.link if link == NATIVE else GivenLink.parse(link).to_dict()
    block_bytes = machine.block_bytes(serving.block_size)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ModelWarning)
        loader = machine.model_loader(
            Engine(
                block_size=serving.block_size,
                token_budget=serving.token_budget,
                block_bytes=block_bytes,
                geometry=machine.geometry,
                hardware=machine.hardware,
                link=told_link,
            )
        )
        loaded = policies.load(policy, loader)
        if loaded.cost_model is not None:
            loaded.cost_model.check_fit(
                serving.block_size, block_bytes, machine.geometry, machine.hardware, told_link, serving.token_budget
            )
    told = (str(one.message) for one in caught if issubclass(one.category, ModelWarning))
    return loaded, tuple(dict.fromkeys(told))


# ---- digests of what is named ----


def contents(cell: Cell) -> dict[str, str]:
    """Digests of all that the cell names but does not hold. Raises ValueError for what cannot be found or loaded."""
    model = policy_of(cell)[0].cost_model
    source_of(cell)
    return {
        "program": program_digest(cell.engine),
        "hardware": machine_of(cell).digest,
        "cost model": "" if model is None else model.digest,
        "workload": workload_digest(cell.workload),
    }


def workload_place(workload: str) -> Path | None:
    """The file, or folder of a trace, that a workload is read from; None where it is made up."""
    place, _, _ = workload.partition("?")
    found = (Path(one) for one in (place, place.partition(":")[2]) if one)
    return next((path for path in found if path.exists()), None)


def workload_digest(workload: str) -> str:
    """SHA-256 of the file, or of all files below the folder, that it is read from; empty where it is made up."""
    place = workload_place(workload)
    if place is None:
        return ""
    files = sorted(path for path in place.rglob("*") if path.is_file()) if place.is_dir() else [place]
    told = hashlib.sha256()
    for file in files:
        told.update(_file_digest(file, file.stat().st_mtime_ns, file.stat().st_size).encode())
    return told.hexdigest()


@cache
def _file_digest(path: Path, changed_ns: int, size_bytes: int) -> str:
    """Read once per process, unless it was changed since."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@cache
def program_digest(engine: str) -> str:
    """SHA-256 over this package's sources, and the version of the engine where that is another's: a result of an
    older program is not taken up by a newer one."""
    told = hashlib.sha256(__version__.encode())
    for path in sorted(_sources(Path(str(resources.files("kvpolicy"))))):
        told.update(path.name.encode() + path.read_bytes())
    if engine != "builtin":
        told.update(_installed(engine).encode())
    return told.hexdigest()


def _sources(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.suffix in (".py", ".json") and "shipped" not in path.parts]


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
