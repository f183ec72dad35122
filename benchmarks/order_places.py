"""The places of the study of orders: a machine, a number of blocks, requests, and arms of an order and a policy.

Lengths are those of the shipped deepseek-r1 workload, in full. A place's capacity is the rate at which requests finish
in the middle half of a run in which all arrive at once, under stock vLLM, the mean over the seeds. Loads are shares of
it. Over capacity the queue grows as long as requests come, and so does what an order is worth: figures belong to a
number of requests.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from matrix_bars import Verdict
from matrix_places import HOST_GIB, LEARNED, LLAMA_3_1_8B, RECOMPUTE, SWAP
from matrix_poisson import served

from kvpolicy.simulator import MemorySink
from kvpolicy.study.cache import Result, default_folder
from kvpolicy.study.cell import Cell
from kvpolicy.study.config import Run, Serving
from kvpolicy.study.grid import sweep
from kvpolicy.study.inputs import workload_named
from kvpolicy.study.progress import bar
from kvpolicy.workload import Workload, open_workload
from kvpolicy.workload.near_capacity import arriving, middle_rate

FCFS, PRIORITY = "fcfs", "priority"
MACHINES = ("H100-SXM", "A100-SXM-80GB")
"""Both with Llama-3.1-8B."""
HOW: Mapping[str, str] = {"recompute": RECOMPUTE, "swap": SWAP, "learned": LEARNED}
WATERMARKS = (0.01, 0.05, 0.1)
LENGTHS = "deepseek-r1"
WRITTEN = (
    "requests", "e2e_per_token_s", "e2e_s", "ttft_s", "itl_s", "longest_gap_s", "longest_pause_s", "steady_tok_s",
    "throughput_tok_s", "preemptions", "recomputed_tokens", "moved_bytes", "makespan_s", "steps", "fairness",
)  # fmt: skip
"""Figures of a result that are written; with several classes also those of each class."""


@dataclass(frozen=True, slots=True)
class Arm:
    """An order, a policy (recompute or swap), and a watermark."""

    order: str = FCFS
    how: str = "recompute"
    watermark: float = 0.0

    def text(self) -> str:
        mark = f", watermark {self.watermark:g}" if self.watermark else ""
        return f"{self.order}, {self.how}{mark}"


STOCK = Arm()


@dataclass(frozen=True, slots=True)
class Place:
    """One machine and memory, at one load."""

    machine: str
    hardware: str
    kv_blocks: int
    requests: int
    load: float
    rate_per_s: float
    """Of the arrivals."""
    seeds: int
    host_gib: float = HOST_GIB

    def text(self) -> str:
        return f"{self.machine}, {self.kv_blocks:,} blocks, {self.requests} requests, load {self.load:g}"

    def cells(self, arm: Arm) -> list[Cell]:
        """One of each seed."""
        serving = serving_of(self.machine, arm, self.host_gib)
        return [
            cell(self.hardware, drawn(self.requests, seed, self.rate_per_s), arm, self.kv_blocks, seed, serving)
            for seed in range(self.seeds)
        ]


def serving_of(machine: str, arm: Arm, host_gib: float = HOST_GIB) -> Serving:
    """vLLM's own for the device, but with more host memory. The order ``priority`` is vLLM's scheduling policy."""
    order, scheduling = (FCFS, PRIORITY) if arm.order == PRIORITY else (arm.order, FCFS)
    return Serving(host_gib=host_gib, order=order, scheduling=scheduling, watermark=arm.watermark).on(machine)


def cell(hardware: str, workload: Workload, arm: Arm, kv_blocks: int, seed: int, serving: Serving) -> Cell:
    named = workload_named(workload)
    return Cell(
        named.label, HOW[arm.how], kv_blocks, "native", seed, hardware, "builtin", serving,
        workload_digest=named.digest, workload_object=named.value,
    )  # fmt: skip


def hardware_of(machine: str, folder: Path) -> str:
    """The machine with the model's configuration, which is written into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / f"{LLAMA_3_1_8B['_name_or_path']}.json"
    config.write_text(json.dumps(LLAMA_3_1_8B))
    return f"{machine}:{config}"


def drawn(requests: int, seed: int, rate_per_s: float | None = None) -> Workload:
    """Requests with Poisson arrivals; without a rate they are all there at once."""
    source = open_workload(f"{LENGTHS}?n={requests}&rate=1&seed={seed}")
    if rate_per_s is None:
        at_once = tuple(replace(request, arrival_s=0.0) for request in source)
        return Workload(f"{LENGTHS}, at once", at_once, seed)
    return arriving(source, rate_per_s, seed)


def capacity_of(machine: str, hardware: str, kv_blocks: int, requests: int, seeds: int) -> float:
    """Requests per second."""
    serving = serving_of(machine, STOCK)
    rates = []
    for seed in range(seeds):
        workload = drawn(requests, seed)
        trace = served(cell(hardware, workload, STOCK, kv_blocks, seed, serving), workload, MemorySink()).trace
        assert trace is not None
        rates.append(middle_rate([row["last_token_s"] for row in trace.rows("requests")]))
    return fmean(rates)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of every study of orders."""
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, help="processes; one per core without it, 0 for none but this one")
    parser.add_argument(
        "--cache", type=Path, default=default_folder(), help="folder of finished runs; else in the user's cache folder"
    )
    parser.add_argument("--fresh", action="store_true", help="simulate also what was finished before")
    parser.add_argument("--json", type=Path)


def write(
    path: Path, places: Sequence[Any], found: Sequence[Mapping[Arm, Sequence[Result]]], bars: Sequence[Verdict]
) -> None:
    """The figures of all results, by seed, and verdicts as JSON. ``places``: dataclasses, one for each of ``found``."""
    written = [
        {
            "place": {name: value for name, value in asdict(place).items() if name != "hardware"},  # a path
            "arms": [asdict(arm) | {"results": [*map(figures_of, results)]} for arm, results in runs.items()],
        }
        for place, runs in zip(places, found, strict=True)
    ]
    path.write_text(json.dumps({"places": written, "bars": [one.to_dict() for one in bars]}, indent=1))


def figures_of(result: Result) -> dict[str, Any]:
    """Those of :data:`WRITTEN`."""
    figures = {name: result[name] for name in WRITTEN}
    return figures | ({"classes": result["classes"]} if len(result["classes"]) > 1 else {})


def run_cells(
    wanted: Sequence[Mapping[Arm, Sequence[Cell]]], jobs: int | None, cache: Path, fresh: bool = False
) -> list[dict[Arm, list[Result]]]:
    """The results of each arm's cells. Raises SystemExit where one fails."""
    cells = list(dict.fromkeys(cell for place in wanted for arm_cells in place.values() for cell in arm_cells))
    with bar() as progress:
        report = sweep(cells, Run(jobs=jobs, cache=cache, fresh=fresh, progress=progress))
    if report.failed:
        raise SystemExit("\n".join(f"failed: {one.text()}" for one in report.failed))
    results = dict(zip(cells, report.results, strict=True))
    return [{arm: [results[cell] for cell in arm_cells] for arm, arm_cells in place.items()} for place in wanted]
