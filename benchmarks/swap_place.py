"""What a swap does to few long requests that do not fit together: end-to-end time over that of recomputing.

    python benchmarks/swap_place.py [--engine ENGINE] [--cell CELL] [--machine MACHINE] [--bar RATIO] [--json FILE]

A swapped request that lost its place among the running would be the next victim again, and wait for all others. Every
cell is simulated on two machines by their data sheets, with synchronous and asynchronous scheduling, with and without
prefix caching, by both engines where vLLM is installed. Printed are mean end-to-end time and throughput of
``always-swap`` over ``always-recompute``, and who is preempted. Exits 1 where a ratio of end-to-end times is above
``--bar``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvpolicy.cost.analytic import ASSUMED
from kvpolicy.simulator import MemorySink, Run
from kvpolicy.study.cell import Cell
from kvpolicy.study.config import Serving
from kvpolicy.study.report import aligned
from kvpolicy.study.run_cell import machine_of, policy_of, server_of, simulator_of, times_of
from kvpolicy.workload import Request, Workload

RECOMPUTE, SWAP = "always-recompute", "always-swap"
ENGINES = ("builtin", "vllm")
HOST_GIB = 512.0


@dataclass(frozen=True, slots=True)
class Crowd:
    """Equal requests, all there at once."""

    requests: int
    tokens: int
    """Of each prompt, and of each output."""
    kv_blocks: int

    def workload(self) -> Workload:
        each = Request(0.0, self.tokens, self.tokens)
        return Workload(f"{self.requests} x {self.tokens}/{self.tokens}", (each,) * self.requests, 0)


CELLS = {"2k": Crowd(8, 2048, 358), "16k": Crowd(16, 16384, 4577)}


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one cell on one machine and server."""

    cell: str
    machine: str
    engine: str
    asynchronous: bool
    prefix_caching: bool
    e2e_ratio: float
    throughput_ratio: float
    preemptions: dict[str, int]
    victims: list[int]
    """The requests that ``always-swap`` preempts, in order."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=ENGINES, action="append", help="only that one")
    parser.add_argument("--cell", choices=CELLS, action="append", help="only that one")
    parser.add_argument("--machine", choices=machines(), action="append", help="only that one")
    parser.add_argument("--bar", type=float, default=1.005, help="highest end-to-end time over that of recomputing")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(arguments)
    found = []
    for cell, machine, engine, asynchronous, caching in itertools.product(
        asked.cell or CELLS, asked.machine or machines(), asked.engine or ENGINES, (False, True), (True, False)
    ):
        found.append(figures(cell, machine, engine, asynchronous, caching))
        print(f"{len(found)}: {found[-1].e2e_ratio:.4f}", file=sys.stderr)
    print("\n".join([*constants(), *table(found)]))
    if asked.json:
        asked.json.write_text(json.dumps([asdict(one) for one in found], indent=2, allow_nan=False) + "\n")
    missed = [one for one in found if one.e2e_ratio > asked.bar]
    for one in missed:
        print(f"bar missed: {' '.join(row_of(one)[:5])}: {one.e2e_ratio:.4f}, at most {asked.bar:g}")
    return 1 if missed else 0


def machines() -> list[str]:
    return list(matrix().MACHINES)


def matrix() -> Any:
    """The matrix, whose machines these are."""
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    import matrix_places

    return matrix_places


def figures(cell: str, machine: str, engine: str, asynchronous: bool, prefix_caching: bool) -> Figures:
    recomputed, swapped = (
        served(CELLS[cell], machine, engine, policy, asynchronous, prefix_caching) for policy in (RECOMPUTE, SWAP)
    )
    assert swapped.trace is not None
    decisions = sorted(swapped.trace.rows("decisions"), key=lambda row: int(row["preemption_id"].rsplit("-", 1)[1]))
    return Figures(
        cell,
        machine,
        engine,
        asynchronous,
        prefix_caching,
        swapped.summary.e2e_s.mean / recomputed.summary.e2e_s.mean,
        swapped.summary.throughput_tok_s / recomputed.summary.throughput_tok_s,
        dict(swapped.summary.preemptions),
        [int(row["request"]) for row in decisions],
    )


def served(crowd: Crowd, machine: str, engine: str, policy: str, asynchronous: bool, prefix_caching: bool) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "config.json")
        config.write_text(json.dumps(matrix().MACHINES[machine]))
        cell = Cell(
            crowd.workload().name,
            policy,
            crowd.kv_blocks,
            "native",
            0,
            f"{machine}:{config}",
            engine,
            Serving(host_gib=HOST_GIB, prefix_caching=prefix_caching, asynchronous=asynchronous),
        )
        simulated = machine_of(cell)
        how = policy_of(cell)[0], server_of(cell, simulated), times_of(cell, simulated)
        return simulator_of(engine).run(crowd.workload(), *how, sink=MemorySink())


def constants() -> list[str]:
    copies = (ASSUMED.pinned_share, ASSUMED.copy_s, ASSUMED.segment_s)
    return [
        "step times by data sheets; measured by nobody: copies between host and device "
        f"({', '.join(f'{constant.value:g} {constant.unit}' for constant in copies)})",
        "",
    ]


def table(found: Sequence[Figures]) -> list[str]:
    head = ["cell", "machine", "engine", "scheduling", "caching", "e2e", "tok/s", "swaps", "victims in order"]
    return aligned([head, *map(row_of, found)])


def row_of(one: Figures) -> list[str]:
    shown = ", ".join(map(str, one.victims[:8])) + (" ..." if len(one.victims) > 8 else "")
    return [
        one.cell,
        one.machine,
        one.engine,
        "asynchronous" if one.asynchronous else "synchronous",
        "on" if one.prefix_caching else "off",
        f"x{one.e2e_ratio:.4f}",
        f"x{one.throughput_ratio:.4f}",
        str(one.preemptions["swap"]),
        shown,
    ]


if __name__ == "__main__":
    sys.exit(main())
