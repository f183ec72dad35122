"""Time to first token and throughput by caching policy of host memory, in simulation: recorded prompts on an H100.

    python benchmarks/caching_study.py --data DIR [--host-gib G,G,...] [--only NAME] [--json FILE]

Llama-3.1-8B on an H100 by its data sheet, blocks of 64 tokens, 7,000 of them on the device. Requests are those of
Mooncake's conversations, of agentic sessions and of ShareGPT's conversations (``benchmarks/caching_policies.py`` says
what of them is drawn), at rates that the server carries without a cache. Preemptions and hits are decided by
``cheapest:analytic``, whose prices ``cost`` goes by, too. ``none``: host memory is for preempted requests only.
``hindsight``: Belady's rule over the trees of blocks, told the prompts in the order of their earliest arrivals; a
reference, which no server has. The same at every run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from matrix_places import LLAMA_3_1_8B

from kvpolicy.caching import Foreseen
from kvpolicy.caching import spec as caching
from kvpolicy.json_values import finite
from kvpolicy.simulator import Builtin, Summary
from kvpolicy.simulator.builtin.blocks import shared_keys
from kvpolicy.study.cell import Cell
from kvpolicy.study.config import Serving
from kvpolicy.study.report import aligned
from kvpolicy.study.run_cell import machine_of, policy_of, server_of, times_of
from kvpolicy.workload import Workload, open_workload

DEVICE, BLOCK, KV_BLOCKS = "H100-SXM", 64, 7000
POLICY = "cheapest:analytic"
POLICIES = ("lru", "lfu", "arc", "s3fifo", "cost")
NONE, HINDSIGHT = "none", "hindsight"
CONTEXT = 131072
FILES: Mapping[str, tuple[str, str]] = {
    "Mooncake, conversations": ("traces/mooncake_conversation*.jsonl.gz", "mooncake:{file}?n=1000&rate=0.5"),
    "agentic sessions": (
        "traces/agentic_*.jsonl.gz", "agentic:{file}?closed=false&arrivals=poisson&rate=0.005&seed=0&n=400"
    ),
    "ShareGPT, conversations": (
        "lengths/sharegpt_*.csv.gz", f"lengths:{{file}}?think=60&arrivals=poisson&rate=2&seed=0&block={BLOCK}&n=2000"
    ),
}  # fmt: skip
"""Files below the folder of data and the workload made of one, by name."""


def workloads(data: Path, only: str | None) -> dict[str, Workload]:
    found = {}
    for name, (pattern, text) in FILES.items():
        files = sorted(data.glob(pattern))
        if files and only in (None, name):
            requests = tuple(open_workload(text.format(file=files[0])))
            found[name] = Workload(name, requests, 0)
    return found


def summary(work: Workload, config: Path, host_gib: float, cache: str) -> Summary:
    """The run with that cache, which is a caching policy, :data:`NONE` or :data:`HINDSIGHT`."""
    named = {NONE: caching.OFF, HINDSIGHT: "lru"}.get(cache, cache)
    serving = Serving(block_size=BLOCK, host_gib=host_gib, host_cache=named).on(DEVICE)
    cell = Cell(work.name, POLICY, KV_BLOCKS, "native", 0, f"{DEVICE}:{config}", serving=serving)
    machine = machine_of(cell)
    policy, _ = policy_of(cell)
    simulator = Builtin()
    if cache == HINDSIGHT:
        chains = [
            shared_keys(request, BLOCK)[: request.prompt_tokens // BLOCK]
            for request in sorted(work, key=lambda request: request.arrival_s)
        ]
        simulator = replace(simulator, caching=lambda capacity: Foreseen(capacity, chains))
    return simulator.run(work, policy, server_of(cell, machine), times_of(cell, machine)).summary


def row(name: str, host_gib: float, cache: str, one: Summary, none: Summary) -> list[str]:
    hits = one.prefix_hits
    return [
        name, f"{host_gib:g}", cache, f"{one.ttft_s.mean:.3g}", f"{one.ttft_s.mean / none.ttft_s.mean:.3f}",
        f"{one.ttft_s.p99:.3g}", f"{one.e2e_s.mean:.3g}", f"{one.throughput_tok_s:.1f}",
        f"{hits.device_tokens / hits.prompt_tokens:.1%}", f"{hits.host_tokens / hits.prompt_tokens:.1%}",
        f"{hits.loaded_tokens / hits.prompt_tokens:.1%}", f"{one.moved_bytes / 1e9:.0f}",
    ]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--host-gib", default="64,256", help="host memory, GiB")
    parser.add_argument("--only", choices=FILES, help="only that workload")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    works = workloads(options.data, options.only)
    if not works:
        parser.error(f"{options.data}: holds none of {', '.join(pattern for pattern, _ in FILES.values())}")
    heads = [
        "requests of", "host GiB", "cache", "ttft s", "of none", "ttft p99", "e2e s", "tok/s", "device", "host",
        "loaded", "moved GB",
    ]  # fmt: skip
    rows, found = [heads], []
    with TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(LLAMA_3_1_8B))
        for name, work in works.items():
            prompts = sum(request.prompt_tokens for request in work)
            print(f"{name}: {len(work)} requests, {prompts / 1e6:.1f} M tokens of prompts", file=sys.stderr)
            for host_gib in map(float, options.host_gib.split(",")):
                none = summary(work, config, host_gib, NONE)
                for cache in (NONE, *POLICIES, HINDSIGHT):
                    one = none if cache == NONE else summary(work, config, host_gib, cache)
                    rows.append(row(name, host_gib, cache, one, none))
                    found.append(recorded(name, host_gib, cache, one))
                    print("  ".join(rows[-1]), file=sys.stderr)
    print("\n".join(aligned(rows)))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))
    return 0


def recorded(name: str, host_gib: float, cache: str, one: Summary) -> dict[str, Any]:
    figures: dict[str, Any] = finite(asdict(one))
    del figures["simulator_wall_s"]
    return {"requests": name, "host_gib": host_gib, "cache": cache, **figures}


if __name__ == "__main__":
    sys.exit(main())
