"""How much faster than real time the built-in simulator is, and how much memory many requests take.

    python benchmarks/simulator_speed.py [--requests N] [--workload W] [--flat N] [--repeats N]

Llama-3.1-8B on an H100 by its data sheet, lengths of a public trace (first 30 minutes of Azure's conversations of 2023)
with Poisson arrivals, or another workload, as `kvpolicy simulate` takes it; memory enough and too little, prefix
caching and asynchronous scheduling on and off. ``--flat``
serves that many requests from a stream, without a sink, and prints the process's memory as it goes. The bar is 200
times real time, the aim 1000; exits 1 where a case is below the bar. Times are the process's CPU time, which other work
on the machine changes less than the clock's time; that is printed beside it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from matrix_places import LLAMA_3_1_8B

from kvpolicy import policy
from kvpolicy.errors import InputError, KVPolicyError
from kvpolicy.simulator import Server, Summary
from kvpolicy.simulator.builtin import Builtin
from kvpolicy.study.machine import Machine, open_machine
from kvpolicy.workload import Request, Source, open_workload

BAR, AIM = 200, 1000
RATE_PER_S, FLAT_RATE_PER_S, BLOCK_SIZE = 25.0, 12.0, 16
"""The second is one that the machine keeps up with: what waits takes memory as well."""
AMPLE, TIGHT = 30_000, 6_000
PRINT_EVERY = 100_000


@dataclass(frozen=True)
class MeteredSource:
    """A stream that prints the process's memory as it is read."""

    given: Source

    @property
    def name(self) -> str:
        return self.given.name

    @property
    def source(self) -> str:
        return self.given.source

    @property
    def seed(self) -> int:
        return self.given.seed

    def __iter__(self) -> Iterator[Request]:
        for number, request in enumerate(self.given):
            if number % PRINT_EVERY == 0:
                print(f"request {number}: {_peak_mb():.0f} MB at the most so far", flush=True)
            yield request


def server_of(machine: Machine, blocks: int, caching: bool, asynchronous: bool) -> Server:
    block_bytes = machine.block_bytes(BLOCK_SIZE)
    return Server(
        block_size=BLOCK_SIZE,
        block_bytes=block_bytes,
        device_blocks=blocks,
        host_blocks=4 * blocks,
        prefix_caching=caching,
        asynchronous=asynchronous,
        hardware=machine.hardware,
        geometry=machine.geometry.to_dict(),
    )


def requests(count: int, rate_per_s: float) -> Source:
    return open_workload(f"azure-conversation-2023?n={count}&rate={rate_per_s:g}")


def case(machine: Machine, source: Source, server: Server, repeats: int) -> tuple[float, str]:
    """(times real time, in words); the best of the repeats, since others use the machine."""
    runs = [_timed(source, server, machine) for _ in range(repeats)]
    best, clock_s = min(runs, key=lambda run: run[0].simulator_wall_s)
    speed = best.makespan_s / best.simulator_wall_s
    return speed, (
        f"{speed:7.0f}x ({best.makespan_s / clock_s:.0f}x by the clock), "
        f"{best.simulator_wall_s / best.steps * 1e6:5.1f} us a step, {best.steps} steps of "
        f"{best.makespan_s / best.steps * 1e3:.1f} ms, {sum(best.preemptions.values())} preemptions"
    )


def _timed(source: Source, server: Server, machine: Machine) -> tuple[Summary, float]:
    """The summary of a run, timed by CPU time, and how long it took by the clock, seconds."""
    began = time.perf_counter()
    simulator = Builtin(wall=time.process_time)
    summary = simulator.run(source, policy.load("threshold:1000"), server, machine.times).summary
    return summary, time.perf_counter() - began


def workload(name: str) -> Source:
    """Another workload than the usual one. Raises InputError where there is none of that name, and where it has a
    request that the smaller memory cannot hold."""
    source = open_workload(name)
    longest = max((request.total_tokens for request in source), default=0)
    if longest > TIGHT * BLOCK_SIZE:
        raise InputError(
            f"--workload {name}: its longest request has {longest} tokens, prompt and output; should be at most "
            f"{TIGHT * BLOCK_SIZE}, which {TIGHT} blocks hold; limit it, as by context={TIGHT * BLOCK_SIZE}"
        )
    return source


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--workload", help="another one instead, as for `kvpolicy simulate`")
    parser.add_argument(
        "--flat", type=int, default=0, metavar="N", help="serve that many requests, and print the memory instead"
    )
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(LLAMA_3_1_8B))
        machine = open_machine(f"H100-SXM:{config}")
    if options.flat:
        _, words = case(
            machine, MeteredSource(requests(options.flat, FLAT_RATE_PER_S)), server_of(machine, AMPLE, False, False), 1
        )
        print(f"{options.flat} requests: {words}; {_peak_mb():.0f} MB at the most")
        return 0
    try:
        source = workload(options.workload) if options.workload else requests(options.requests, RATE_PER_S)
    except (KVPolicyError, OSError) as error:
        parser.exit(2, f"simulator_speed.py: error: {error}\n")
    below = 0
    for blocks, caching, asynchronous in itertools.product((AMPLE, TIGHT), (False, True), (False, True)):
        speed, words = case(machine, source, server_of(machine, blocks, caching, asynchronous), options.repeats)
        below += speed < BAR
        case_text = f"{blocks} blocks, caching {'on' if caching else 'off'}, {'a' if asynchronous else ''}synchronous"
        print(f"{case_text:40} {words}")
    print(f"bar {BAR}x, aim {AIM}x: {below} of 8 below the bar")
    return 1 if below else 0


if __name__ == "__main__":
    sys.exit(main())
