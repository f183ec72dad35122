"""Running a cell: opens what it names, simulates it, and returns the numbers that are stored.

Simulators are the built-in one and those that installed packages register. Workloads are those of
:mod:`kvpolicy.workload`, recorded traces, and requests of measured runs.
"""

from __future__ import annotations

import warnings
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvpolicy import integrations
from kvpolicy import policy as policies
from kvpolicy.caching import spec as caching
from kvpolicy.code_digest import digest_of
from kvpolicy.cost import ModelWarning
from kvpolicy.errors import InputError
from kvpolicy.extensions import is_module_path
from kvpolicy.fields import WrongValue
from kvpolicy.hardware import EngineSpec
from kvpolicy.hardware.link import NATIVE, SimulatedLink, header_link
from kvpolicy.json_values import finite
from kvpolicy.latency import NO_SLO
from kvpolicy.policy import Policy
from kvpolicy.simulator import Link, Server, Simulator, Sink, Summary, Times
from kvpolicy.simulator.builtin import Builtin
from kvpolicy.simulator.choice_count import ChoiceCount
from kvpolicy.simulator.oracle import Oracle
from kvpolicy.simulator.requests_csv import ARRIVAL, COUNTS, measured_requests
from kvpolicy.simulator.sinks import FolderSink
from kvpolicy.simulator.trace_workload import TRACE_FORMATS
from kvpolicy.study.cache import path_digest, program_digest, workload_digest
from kvpolicy.study.cell import Cell
from kvpolicy.study.config import LONGEST, Serving
from kvpolicy.study.inputs import Named
from kvpolicy.study.machine import Behind, Machine, machine_named
from kvpolicy.study.workload_parts import Part
from kvpolicy.workload import Format, Granted, Source, Workload, counts_of, open_workload
from kvpolicy.workload.files import cells, lines
from kvpolicy.workload.join_text import with_seed
from kvpolicy.workload.options import Options

MAX_WORKLOADS = 16
"""Opened workloads that a process caches: opening one with a rate reads its whole file."""
MEASURED = "requests"


def _measured(path: Path, options: Options) -> Source:
    options.seed()  # every workload accepts a seed; these requests are not drawn
    return measured_requests(path)


def _is_measured(path: Path) -> bool:
    if path.is_dir():
        return False
    first = next((line for _, line in lines(path)), "")
    return {*COUNTS, ARRIVAL} <= {name.strip() for name in cells(first)}


FORMATS = {**TRACE_FORMATS, MEASURED: Format(f"CSV: {', '.join((*COUNTS, ARRIVAL))}", _measured, _is_measured)}


@lru_cache(maxsize=MAX_WORKLOADS)
def open_source(workload: str, digest: str) -> Source:
    """The workload of that name. ``digest``: of the files it is read from, so that changed files are opened again.

    Raises WorkloadError for an unknown name, listing the known ones.
    """
    return open_workload(workload, FORMATS)


BUILTIN_RULES = "0.32"
"""The version of vLLM whose scheduling rules the built-in simulator follows here."""


def simulator_of(name: str) -> Simulator:
    """The simulator of that name. Raises EngineMissing, which says what to install, where there is none."""
    if name == "builtin":
        return Builtin()
    return integrations.simulator(name)


def rules_of(name: str) -> str:
    """The ``rules`` of a server for that simulator; one built on vLLM's code has the rules of its version."""
    return str(getattr(simulator_of(name), "rules", BUILTIN_RULES))


ORACLE = "oracle"
"""Name of a policy that exists only in simulations: the cheaper option by the simulator's own times."""
NO_BOUND = (
    "oracle: knows the simulator's own times, but what survives in the prefix cache is expected from what survived "
    "before, and effects on later preemptions are not priced: other policies can do better"
)
MAX_POLICIES = 32
"""Loaded policies, with their cost models, that a process caches: successive cells often share them."""


def run(cell: Cell, out: Path | None = None) -> dict[str, Any]:
    """Simulate one cell. ``out``: folder for its trace. Raises KVPolicyError for invalid inputs."""
    source = source_of(cell)
    if next(iter(source), None) is None:
        raise InputError(f"workload {cell.workload} holds no request")
    machine = machine_of(cell)
    policy, warned = policy_of(cell)
    count = ChoiceCount()
    sink: Sink | None = None if out is None else FolderSink(out)
    result = simulator_of(cell.engine).run(
        source,
        policy,
        server_of(cell, machine),
        times_of(cell, machine),
        seed=cell.seed,
        sink=sink,
        on_decision=count,
        slo=cell.slo or NO_SLO,
    )
    return {
        "inputs": cell.inputs(),
        "device": machine.device,
        **numbers(result.summary),
        "rows": rows_of(source),
        "choices": count.choices,
        "extrapolated": count.extrapolated,
        "facts": list(machine.facts),
        "warnings": list(warned),
        "unmeasured": list(machine.unmeasured),
    }


def numbers(summary: Summary) -> dict[str, Any]:
    """A summary as JSON values: None for nan, which stands for undefined times (as between single tokens)."""
    fields = asdict(summary) | {"preemptions": dict(summary.preemptions)}
    return {name: finite(value) for name, value in fields.items()}


# ---- inputs of a cell ----


def source_of(cell: Cell) -> Source:
    """The cell's workload, or its part of it, as its server grants it."""
    named = Named(cell.workload, cell.workload_digest, cell.workload_object)
    whole = granted(source_named(named, cell.seed), cell.serving)
    return whole if cell.parts == 1 else Part(whole, cell.part, cell.parts)


def source_named(workload: Named[Workload], seed: int) -> Source:
    """The workload object, or the workload that the text names, drawn from ``seed`` unless the text has a seed."""
    if workload.value is not None:
        return workload.value
    return open_source(with_seed(workload.label, seed), workload_digest(workload.label))


def granted(source: Source, serving: Serving) -> Source:
    """The requests as this server grants them: as they are, where it lists no classes."""
    return source if serving.classes is None else Granted(source, serving.classes)


def rows_of(source: Source) -> dict[str, int] | None:
    """Counts of the rows of the workload's files, after they were read; None where there is no file."""
    counts = counts_of(source.whole if isinstance(source, Part) else source)
    return None if counts is None else {"read": counts.rows, "damaged": counts.damaged, "empty": counts.empty}


def machine_of(cell: Cell) -> Machine:
    return machine_named(Named(cell.hardware, cell.hardware_digest, cell.hardware_object))


def link_of(text: str) -> SimulatedLink | None:
    """The simulated link; None for the hardware's own. Raises WrongValue for any other text."""
    try:
        return None if text == NATIVE else SimulatedLink.parse(text)
    except WrongValue as wrong:
        raise WrongValue(wrong.field, f"{wrong.message}, or {NATIVE}") from None


def times_of(cell: Cell, machine: Machine) -> Times:
    link = link_of(cell.link)
    return machine.times if link is None else Behind(machine.times, link)


def server_of(cell: Cell, machine: Machine) -> Server:
    serving, block_bytes = cell.serving, machine.block_bytes(cell.serving.block_size)
    limits = serving.limits(machine.device)
    copies = Link(
        overlapped=cell.link != NATIVE or not machine.waits_for_copies,
        slowdown=machine.slowdown(times_of(cell, machine)),
    )
    return Server(
        block_size=serving.block_size,
        block_bytes=block_bytes,
        device_blocks=cell.kv_blocks,
        host_blocks=serving.host_blocks_of(block_bytes),
        token_budget=limits.token_budget,
        max_running=limits.max_num_seqs,
        max_model_len=serving.max_model_len or LONGEST,
        prefix_caching=serving.prefix_caching,
        scheduling="priority" if "priority" in (serving.scheduling, serving.order) else "fcfs",
        order=serving.loaded_order(),
        asynchronous=limits.asynchronous,
        watermark=serving.watermark,
        segment_bytes=machine.segment_bytes(serving.block_size),
        link=copies,
        rules=rules_of(cell.engine),
        hardware=machine.hardware,
        geometry=machine.geometry.to_dict(),
        cache=serving.prompt_cache(block_bytes),
    )


def policy_of(cell: Cell) -> tuple[Policy, tuple[str, ...]]:
    """The cell's policy as a server would load it, or the oracle; and the warnings of its cost model.

    Raises ModelError for a cost model that does not fit the server.
    """
    if cell.policy == ORACLE:
        machine = machine_of(cell)
        return Oracle(times_of(cell, machine), server_of(cell, machine)), (NO_BOUND,)
    if cell.policy_object is not None:
        return _fitting(cell.policy_object, machine_of(cell), cell.link, cell.serving)
    if cell.module:
        return _fitting(policies.load_policy(cell.module), machine_of(cell), cell.link, cell.serving)
    return _loaded(cell.policy, model_digest(cell.policy), machine_of(cell), cell.link, cell.serving)


def model_digest(policy: str) -> str:
    """Digest of the folder of a policy's cost model; empty for a shipped model or none."""
    folder = Path(policy.partition(":")[2].partition(",")[0] or "analytic")
    return path_digest(folder) if folder.is_dir() else ""


@lru_cache(maxsize=MAX_POLICIES)
def _loaded(policy: str, digest: str, machine: Machine, link: str, serving: Serving) -> tuple[Policy, tuple[str, ...]]:
    """``digest``: of its cost model's folder, so that a changed model is loaded again."""
    return _fitting(policy, machine, link, serving)


def _fitting(policy: str | Policy, machine: Machine, link: str, serving: Serving) -> tuple[Policy, tuple[str, ...]]:
    """The policy, loaded where it is a name, and the warnings of its cost model about this server."""
    simulated_link = link_of(link)
    engine = EngineSpec(
        block_size=serving.block_size,
        token_budget=serving.limits(machine.device).token_budget,
        pinned=None,  # a simulated link has no kind of host memory
        block_bytes=machine.block_bytes(serving.block_size),
        geometry=machine.geometry.to_dict(),
        hardware=machine.hardware,
        link=machine.link if simulated_link is None else header_link(simulated_link),
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ModelWarning)
        loaded = policy if isinstance(policy, Policy) else policies.load(policy, machine.model_loader(engine))
        if loaded.cost_model is not None:
            loaded.cost_model.check_fit(engine)
    messages = (str(warning.message) for warning in caught if issubclass(warning.category, ModelWarning))
    return loaded, tuple(dict.fromkeys(messages))


# ---- digests of the inputs ----


def contents(cell: Cell) -> dict[str, str]:
    """Digests of everything that the cell names but does not contain. Raises KVPolicyError for unloadable inputs."""
    policy, _ = policy_of(cell)
    source_of(cell)
    return {
        "program": program_digest(cell.engine),
        "hardware": machine_of(cell).digest,
        "policy": policy.digest if cell.module else cell.policy_digest,
        "order": cell.serving.loaded_order().digest,
        "cost model": "" if policy.cost_model is None else policy.cost_model.digest,
        "cache": _caching_digest(cell.serving.host_cache),
        "workload": cell.workload_digest or workload_digest(cell.workload),
    }


def _caching_digest(cache: str) -> str:
    """Digest of the code of a caching policy of one's own; empty for one that ships."""
    return digest_of(caching.load(cache, 1, allow_python=True)) if is_module_path(cache) else ""
