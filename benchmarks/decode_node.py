"""A node that only decodes: prompts come computed, and a step has no more tokens than requests may run. There a victim
is recomputed a few tokens a step, and a swap brings it back in one copy. In virtual time; on vLLM's CPU engine:
`decode_node_engine.py`.

    python benchmarks/decode_node.py [--repeats N] [--seats N] [--json FILE]

An H100 by its data sheet under the built-in engine, short of memory, with ``max_num_batched_tokens`` = ``max_num_seqs``
= seats and with vLLM's own budget. The prompts are computed there too, under both policies. Printed are always-swap's
figures over always-recompute's, with 95% intervals over the seeds; ``--json`` has these and the figures of every run.
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

from kvpolicy import __version__
from kvpolicy.simulator import Builtin, MemorySink
from kvpolicy.stats import student_ratio
from kvpolicy.study.cell import Cell
from kvpolicy.study.config import Serving
from kvpolicy.study.report import aligned
from kvpolicy.study.run_cell import machine_of, policy_of, server_of, source_of, times_of

DEVICE, WORKLOAD = "H100-SXM", "deepseek-r1?n={requests}&context=8192"
REQUESTS_PER_SEAT, BLOCKS_PER_SEAT = 4, 80
"""Of 16 tokens: less than the requests of a full batch would take."""


FIGURES = ("throughput", "steps", "mean delay of victims")
"""In tokens/s and s; a delay is from getting blocks again to the token that the victim had reached, of those that came
back."""
POLICIES = (SWAP, RECOMPUTE)


@dataclass(frozen=True, slots=True)
class Run:
    """One that was simulated."""

    budget: int | None
    """Tokens of a step; None for vLLM's own."""
    policy: str
    seed: int
    figures: dict[str, float]


def simulated(policy: str, seats: int, budget: int | None, seed: int, config: Path) -> dict[str, float]:
    serving = Serving(host_gib=128.0, token_budget=budget, max_num_seqs=seats, prefix_caching=False)
    workload = WORKLOAD.format(requests=REQUESTS_PER_SEAT * seats)
    cell = Cell(workload, policy, BLOCKS_PER_SEAT * seats, "native", seed, f"{DEVICE}:{config}", "builtin", serving)
    machine, (served, _) = machine_of(cell), policy_of(cell)
    server, times = server_of(cell, machine), times_of(cell, machine)
    done = Builtin().run(source_of(cell), served, server, times, seed, MemorySink())
    assert done.trace is not None
    rows = [row for row in done.trace.rows("outcomes") if row["ended"] == "resumed"]
    delay_s = fmean(float(row["victim_delay_s"]) for row in rows)
    return dict(zip(FIGURES, (done.summary.throughput_tok_s, float(done.summary.steps), delay_s), strict=True))


def in_virtual_time(seats: int, repeats: int) -> list[Run]:
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "Llama-3.1-8B.json"
        config.write_text(json.dumps(LLAMA_3_1_8B))
        return [
            Run(budget, policy, seed, simulated(policy, seats, budget, seed, config))
            for budget in (seats, None)
            for policy in POLICIES
            for seed in range(1, repeats + 1)
        ]


def ratios(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Of each figure, always-swap over always-recompute, by the budget."""

    def values(budget: int | None, policy: str, figure: str) -> list[float]:
        return [run.figures[figure] for run in runs if (run.budget, run.policy) == (budget, policy)]

    return [
        {"budget": budget, "figure": figure, "ratio": student_ratio(*(values(budget, p, figure) for p in POLICIES))}
        for budget in dict.fromkeys(run.budget for run in runs)
        for figure in FIGURES
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seats", type=int, default=32, help="max_num_seqs and max_num_batched_tokens")
    parser.add_argument("--repeats", type=int, default=5, help="seeds")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    runs = in_virtual_time(args.seats, args.repeats)
    figures = ratios(runs)
    rows = [["budget", "always-swap over always-recompute", "ratio"]]
    rows += [[str(one["budget"] or "vLLM's"), one["figure"], one["ratio"].text()] for one in figures]
    print("\n".join(aligned(rows)))
    if args.json:
        written = {
            "asked": {"seats": args.seats, "repeats": args.repeats},
            "kvpolicy": __version__,
            "runs": [asdict(one) for one in runs],
            "ratios": [one | {"ratio": asdict(one["ratio"])} for one in figures],
        }
        args.json.write_text(json.dumps(written, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
