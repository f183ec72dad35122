"""The built-in simulator beside vLLM's own scheduler over cases drawn from seeds: whatever differs between them.

    python benchmarks/simulators_agree.py --seeds FROM TO [--requests N]
        [--closed-loops | --orders | --classes | --caches]

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
    displaced: int
    """Preemptions by which the order of service made room."""
    differences: list[str]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs=2, required=True, metavar=("FROM", "TO"), help="both included")
    parser.add_argument("--requests", type=int, default=60, help="of each case")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument(
        "--closed-loops", dest="kind", action="store_const", const="looped", default="drawn",
        help="with most requests of each case in closed loops",
    )  # fmt: skip
    kinds.add_argument(
        "--orders", dest="kind", action="store_const", const="ordered",
        help="with each case served by another of the orders than first come, first served",
    )  # fmt: skip
    kinds.add_argument(
        "--classes", dest="kind", action="store_const", const="classed",
        help="with drawn classes and deadlines, and each case served by another of the orders that heed them",
    )  # fmt: skip
    kinds.add_argument(
        "--caches", dest="kind", action="store_const", const="cached",
        help="with a cache in host memory, by another caching policy in turn, and prompts that come back",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    first, last = options.seeds
    if not 0 <= first <= last:
        parser.error(f"--seeds {first} {last}: should be 0 <= FROM <= TO")
    if options.requests < 1:
        parser.error(f"--requests {options.requests}: should be 1 or more")
    total: Counter[str] = Counter()
    for seed in track(range(first, last + 1), "cases", console=Console(stderr=True)):
        comparison = compare(seed, options.requests, options.kind)
        total.update(
            cases=1,
            steps=comparison.steps,
            preemptions=comparison.preemptions,
            displaced=comparison.displaced,
            differing=int(bool(comparison.differences)),
        )
        for difference in comparison.differences:
            print(f"seed {seed}: {difference}")
    print(
        f"vllm {vllm.__version__}, seeds {first} to {last}: {total['cases']} cases of {options.requests} requests, "
        f"{total['steps']} steps, {total['preemptions']} preemptions, {total['displaced']} of them displaced, "
        f"{total['differing']} cases differ"
    )
    return 1 if total["differing"] else 0


def compare(seed: int, requests: int, kind: str = "drawn") -> Comparison:
    """``kind``: the function of ``tests/vllm/agreement.py`` that draws the case."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from tests.vllm import agreement

    case = getattr(agreement, kind)(seed, requests)
    builtin = agreement.account("builtin", case)
    preempted, displaced = sum(builtin.run.summary.preemptions.values()), agreement.displaced(builtin)
    differences = agreement.differences(builtin, agreement.account("vllm", case))
    return Comparison(len(builtin.scheduled), preempted, displaced, differences)


if __name__ == "__main__":
    sys.exit(main())
