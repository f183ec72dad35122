"""The built-in simulator beside vLLM's own scheduler over cases drawn from seeds: whatever differs between them.

    python benchmarks/simulators_agree.py --seeds FROM TO [--requests N] [--closed-loops]

Cases and comparison are those of ``tests/vllm/agreement.py``, read from the same checkout; vLLM has to be installed.
Ends with 1 where a case differs.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import vllm
from rich.console import Console
from rich.progress import track


class Comparison(NamedTuple):
    """One case."""

    steps: int
    """That compute."""
    preemptions: int
    differences: list[str]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs=2, required=True, metavar=("FROM", "TO"), help="both included")
    parser.add_argument("--requests", type=int, default=60, help="of each case")
    parser.add_argument("--closed-loops", action="store_true", help="with most requests of each case in closed loops")
    options = parser.parse_args(arguments)
    first, last = options.seeds
    if not 0 <= first <= last:
        parser.error(f"--seeds {first} {last}: should be 0 <= FROM <= TO")
    if options.requests < 1:
        parser.error(f"--requests {options.requests}: should be 1 or more")
    total: Counter[str] = Counter()
    for seed in track(range(first, last + 1), "cases", console=Console(stderr=True)):
        comparison = compare(seed, options.requests, options.closed_loops)
        total.update(
            cases=1,
            steps=comparison.steps,
            preemptions=comparison.preemptions,
            differing=int(bool(comparison.differences)),
        )
        for difference in comparison.differences:
            print(f"seed {seed}: {difference}")
    print(
        f"vllm {vllm.__version__}, seeds {first} to {last}: {total['cases']} cases of {options.requests} requests, "
        f"{total['steps']} steps, {total['preemptions']} preemptions, {total['differing']} cases differ"
    )
    return 1 if total["differing"] else 0


def compare(seed: int, requests: int, closed_loops: bool = False) -> Comparison:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from tests.vllm.agreement import account, differences, drawn, looped

    case = looped(seed, requests) if closed_loops else drawn(seed, requests)
    builtin = account("builtin", case)
    preempted = sum(builtin.run.summary.preemptions.values())
    return Comparison(len(builtin.scheduled), preempted, differences(builtin, account("vllm", case)))


if __name__ == "__main__":
    sys.exit(main())
