"""The host memory that orders of service take at most: that of the copies of all displaced requests at one time.

    python benchmarks/orders_host.py [--load L] [--requests N] [--kv-blocks N] [--seeds N] [--json FILE]

The places of ``orders_study.py`` on the H100, with the learned policy. Printed is, for each order, the largest number
of host blocks in use at a time in any seed, and its ratio to the device's blocks. Host memory is 128 GiB: an order that
took all of it would take more if it had more.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from matrix_poisson import served
from order_places import MACHINES, Arm, capacity_of, cell, drawn, hardware_of, serving_of

from kvpolicy.simulator.builtin.engine import Engine
from kvpolicy.study.cache import default_folder

ORDERS = ("fcfs", "mlfq:base=256", "mlfq:base=256,promote=30", "gittins:quantum=64", "las:quantum=256")


@contextmanager
def watched() -> Iterator[list[int]]:
    """Host blocks in use after each step that was not taken in bulk (no copy begins in those), and those there are."""
    used = [0, 0]
    launch = Engine.launch

    def noting(self: Engine, step: Any) -> None:
        launch(self, step)
        used[:] = max(used[0], self.copies.total - self.copies.free), self.copies.total

    Engine.launch = noting  # type: ignore[method-assign]
    try:
        yield used
    finally:
        Engine.launch = launch  # type: ignore[method-assign]


def peak(order: str, hardware: str, options: argparse.Namespace, rate_per_s: float) -> dict[str, Any]:
    """Host blocks in use at most under one order, by seed."""
    machine, peaks, total = MACHINES[0], [], 0
    arm = Arm(order, "learned")
    for seed in range(options.seeds):
        workload = drawn(options.requests, seed, rate_per_s)
        with watched() as used:
            served(cell(hardware, workload, arm, options.kv_blocks, seed, serving_of(machine, arm)), workload)
        peaks.append(used[0])
        total = used[1]
    return {"order": order, "peak_host_blocks": peaks, "host_blocks": total}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--load", type=float, default=1.5, help="share of capacity")
    parser.add_argument("--requests", type=int, default=800)
    parser.add_argument("--kv-blocks", type=int, default=26_000)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--order", action="append", help="only these orders")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    for name in ("requests", "kv_blocks", "seeds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}: should be 1 or more")
    hardware = hardware_of(MACHINES[0], default_folder() / "configs")
    capacity = capacity_of(MACHINES[0], hardware, options.kv_blocks, options.requests, options.seeds)
    rows = []
    asked = f"{options.kv_blocks:,} blocks, {options.requests} requests"
    print(f"{MACHINES[0]}, {asked}, load {options.load:g} of {capacity:.3f}/s")
    for order in options.order or ORDERS:
        row = peak(order, hardware, options, options.load * capacity)
        most = max(row["peak_host_blocks"])
        share = f"{most / options.kv_blocks:.2f} of the device's"
        print(f"{order:28} {most:7,} of {row['host_blocks']:,} host blocks, {share}", flush=True)
        rows.append(row)
    if options.json:
        place = {name: getattr(options, name) for name in ("kv_blocks", "requests", "load", "seeds")}
        options.json.write_text(json.dumps({"place": place, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
