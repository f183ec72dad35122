"""What deciding at resume wins, and what a split would: load everything, ask the policy again, or load only a part.

    python benchmarks/at_resume.py [--repeats N] [--json FILE]

Places of the overflow matrix, simulated by the built-in engine with prefix caching: 300 requests at once on two
machines by their data sheets, over their own link and over slower ones. Every arm meets the same requests, seed by
seed. ``always-swap`` loads everything that the prefix cache lacks; ``cheapest:analytic`` decides anew when its victim
comes back, or not; the shares load so many of the lacking blocks, from the front, and compute the rest. Printed are
throughput and mean end-to-end time over always-recompute, with 95% intervals over the seeds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from matrix_places import CONTEXT_TOKENS, MACHINES, kv_blocks_of, serving_of

from kvpolicy.events import Option, Preemption
from kvpolicy.policy.base import NoState
from kvpolicy.policy.cheapest import Cheapest
from kvpolicy.simulator import Builtin, Summary
from kvpolicy.stats import Ratio, student_ratio
from kvpolicy.study.cell import Cell
from kvpolicy.study.progress import bar
from kvpolicy.study.report import aligned
from kvpolicy.study.run_cell import machine_of, policy_of, server_of, source_of, times_of

REQUESTS = 300
PLACES = (
    ("H100-SXM", "sharegpt-8k", 0.2),
    ("H100-SXM", "deepseek-r1", 0.2),
    ("A100-SXM-80GB", "deepseek-r1", 0.2),
)
LINKS = ("native", "2e9,1e-4", "3e8,1e-4")
RECOMPUTE, LEARNED = "always-recompute", "cheapest:analytic"
SHARES = (0.75, 0.5, 0.25)


@dataclass(frozen=True, slots=True)
class Arm:
    name: str
    policy: str
    load_share: float = 1.0
    decides_anew: bool = True


class Once(Cheapest[NoState]):
    """Decides at the preemption, once and for all."""

    def loads(self, situation: Preemption, options: Sequence[Option], state: NoState) -> bool:
        return True


BASE = Arm("recompute", RECOMPUTE)
ARMS = (
    Arm("load everything", "always-swap"),
    Arm("cheapest", LEARNED),
    Arm("cheapest, at the preemption alone", LEARNED, decides_anew=False),
    *(Arm(f"load {share:.0%}", "always-swap", share) for share in SHARES),
)


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one arm in one place, over always-recompute."""

    place: str
    link: str
    arm: str
    throughput: Ratio
    e2e: Ratio


def simulated(arm: Arm, machine: str, workload: str, share: float, link: str, seed: int, configs: Path) -> Summary:
    config = configs / f"{MACHINES[machine]['_name_or_path']}.json"
    config.write_text(json.dumps(MACHINES[machine]))
    serving = serving_of(machine, True)
    spec = f"{workload}?n={REQUESTS}&context={CONTEXT_TOKENS}"
    blocks = kv_blocks_of(spec, REQUESTS, share, serving)
    cell = Cell(spec, arm.policy, blocks, link, seed, f"{machine}:{config}", "builtin", serving)
    hardware, (policy, _) = machine_of(cell), policy_of(cell)
    if not arm.decides_anew:
        assert isinstance(policy, Cheapest)
        policy = Once(policy.name, policy.cost_model, policy.objective)
    engine = Builtin(load_share=arm.load_share)
    return engine.run(source_of(cell), policy, server_of(cell, hardware), times_of(cell, hardware), seed).summary


def measure(repeats: int) -> list[Figures]:
    figures = []
    wheres = [(*place, link) for place in PLACES for link in LINKS]
    with tempfile.TemporaryDirectory() as folder, bar() as update:
        for number, where in enumerate(wheres):
            machine, workload, share, link = where
            place = f"{machine} {workload} {share:g}"
            update(number, len(wheres), place)
            runs = {
                arm.name: [simulated(arm, *where, seed, Path(folder)) for seed in range(1, repeats + 1)]
                for arm in (BASE, *ARMS)
            }
            tokens_s = {name: [run.throughput_tok_s for run in of_arm] for name, of_arm in runs.items()}
            e2e_s = {name: [run.e2e_s.mean for run in of_arm] for name, of_arm in runs.items()}
            figures += [
                Figures(
                    place,
                    link,
                    arm.name,
                    student_ratio(tokens_s[arm.name], tokens_s[BASE.name]),
                    student_ratio(e2e_s[arm.name], e2e_s[BASE.name]),
                )
                for arm in ARMS
            ]
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    figures = measure(args.repeats)
    rows = [["place", "link", "arm", "throughput", "mean e2e"]]
    rows += [[f.place, f.link, f.arm, _text(f.throughput), _text(f.e2e)] for f in figures]
    print("\n".join(aligned(rows)))
    if args.json:
        args.json.write_text(json.dumps([asdict(one) for one in figures], indent=1) + "\n")
    return 0


def _text(ratio: Ratio) -> str:
    return f"{ratio.value:.4f} ({ratio.low:.4f} to {ratio.high:.4f})"


if __name__ == "__main__":
    sys.exit(main())
