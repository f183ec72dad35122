"""A node that only decodes: prompts come computed, and a step has no more tokens than requests may run. There a victim
is recomputed a few tokens a step, and a swap brings it back in one copy. In virtual time; on vLLM's CPU engine:
`decode_node_engine.py`.

    python benchmarks/decode_node.py [--repeats N] [--seats N] [--json FILE]

An H100 by its data sheet under the built-in engine, short of memory, with ``max_num_batched_tokens`` = ``max_num_seqs``
= seats and with vLLM's own budget. The prompts are computed there too, under both policies. Printed are always-swap's
figures over always-recompute's, with 95% intervals over the seeds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from matrix_places import LLAMA_3_1_8B, RECOMPUTE, SWAP

from kvpolicy.simulator import Builtin, MemorySink, Summary
from kvpolicy.stats import student_ratio
from kvpolicy.study.cell import Cell
from kvpolicy.study.config import Serving
from kvpolicy.study.report import aligned
from kvpolicy.study.run_cell import machine_of, policy_of, server_of, source_of, times_of

DEVICE, WORKLOAD = "H100-SXM", "deepseek-r1?n={requests}&context=8192"
REQUESTS_PER_SEAT, BLOCKS_PER_SEAT = 4, 80
"""Of 16 tokens: less than the requests of a full batch would take."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one simulated run."""

    summary: Summary
    victim_delay_s: float
    """Mean over the victims that came back, from getting blocks again to the token that they had reached."""


def simulated(policy: str, seats: int, budget: int | None, seed: int, config: Path) -> Figures:
    serving = Serving(host_gib=128.0, token_budget=budget, max_num_seqs=seats, prefix_caching=False)
    workload = WORKLOAD.format(requests=REQUESTS_PER_SEAT * seats)
    cell = Cell(workload, policy, BLOCKS_PER_SEAT * seats, "native", seed, f"{DEVICE}:{config}", "builtin", serving)
    machine, (served, _) = machine_of(cell), policy_of(cell)
    server, times = server_of(cell, machine), times_of(cell, machine)
    done = Builtin().run(source_of(cell), served, server, times, seed, MemorySink())
    assert done.trace is not None
    rows = [row for row in done.trace.rows("outcomes") if row["ended"] == "resumed"]
    return Figures(done.summary, fmean(float(row["victim_delay_s"]) for row in rows))


def in_virtual_time(seats: int, repeats: int) -> list[dict[str, Any]]:
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "Llama-3.1-8B.json"
        config.write_text(json.dumps(LLAMA_3_1_8B))
        for budget in (seats, None):
            runs = {
                policy: [simulated(policy, seats, budget, seed, config) for seed in range(1, repeats + 1)]
                for policy in (SWAP, RECOMPUTE)
            }
            for name, value_of in FIGURES.items():
                ratio = student_ratio(*([value_of(run) for run in runs[policy]] for policy in (SWAP, RECOMPUTE)))
                figures.append({"budget": budget, "figure": name, "ratio": ratio})
    return figures


FIGURES = {
    "throughput": lambda run: run.summary.throughput_tok_s,
    "steps": lambda run: float(run.summary.steps),
    "mean delay of victims": lambda run: run.victim_delay_s,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seats", type=int, default=32, help="max_num_seqs and max_num_batched_tokens")
    parser.add_argument("--repeats", type=int, default=5, help="seeds")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    figures = in_virtual_time(args.seats, args.repeats)
    rows = [["budget", "always-swap over always-recompute", "ratio"]]
    rows += [[str(one["budget"] or "vLLM's"), one["figure"], one["ratio"].text()] for one in figures]
    print("\n".join(aligned(rows)))
    if args.json:
        args.json.write_text(json.dumps([one | {"ratio": asdict(one["ratio"])} for one in figures], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
