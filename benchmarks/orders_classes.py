"""Urgent requests beside batch work: orders that displace, against vLLM's priority scheduling with its best watermark.

    python benchmarks/orders_classes.py [--kv-blocks N] [--seeds N] [--urgent N] [--batch N] [--jobs N] [--json FILE]

On an H100 with Llama-3.1-8B by its data sheet, in the built-in simulator. The batch, 400 requests with the lengths of
deepseek-r1, is there from the beginning; urgent requests, 2,400 with the lengths of Azure's conversations, come at 4 a
second on average, by a Poisson process or twelve at a time, and are of priority -1. In 8,000 blocks the batch fills
memory; in 60,000 it does not. Printed for each arm: the urgent ones' time to first token, and the output tokens per
second of the batch between the times at which a quarter and three quarters of them were out. The best watermark is that
of the lowest 99th percentile of the urgent ones' time to first token, chosen with hindsight.

Exits 1 where a bar is missed: the 99th percentile at least 4 times lower than the best watermark's, at no loss of the
batch's tokens per second against it, nor against no watermark, which holds no memory back from the batch; where the
batch does not fill memory, neither worse.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from matrix_bars import MET, Verdict
from order_places import PRIORITY, WATERMARKS, Arm, add_arguments, cell, hardware_of, run_cells, serving_of, write

from kvpolicy.stats import student_ratio
from kvpolicy.study.cache import Result
from kvpolicy.study.cell import Cell
from kvpolicy.study.report import aligned
from kvpolicy.workload import Workload, open_workload

MACHINE = "H100-SXM"
URGENT, BATCH = "urgent", "batch"
ARRIVALS: Mapping[str, str] = {"Poisson": "", "twelve at a time": "&arrivals=groups&size=12"}
FULL_BLOCKS, AMPLE_BLOCKS = 8_000, 60_000
MIN_TIMES, MIN_BATCH, NO_WORSE = 4.0, 1.0, 1.01
STOCK = Arm(PRIORITY)
MARKED = tuple(Arm(PRIORITY, watermark=share) for share in WATERMARKS)
JUDGED = Arm("urgent", "learned")
ARMS = (
    STOCK, *MARKED, Arm(PRIORITY, "swap"), Arm("urgent"), Arm("urgent", "swap"), JUDGED, Arm("reserve:0.1", "learned"),
    Arm("urgent/mlfq:base=256", "learned"),
)  # fmt: skip
Runs = Mapping[Arm, Sequence[Result]]


@dataclass(frozen=True, slots=True)
class Place:
    arrivals: str
    kv_blocks: int
    seeds: int
    urgent: int
    """Urgent requests, and those of the batch."""
    batch: int

    def text(self) -> str:
        return f"{self.kv_blocks:,} blocks, urgent ones {self.arrivals}"

    def cells(self, arm: Arm, hardware: str) -> list[Cell]:
        """One of each seed."""
        return [
            cell(hardware, drawn(self, seed), arm, self.kv_blocks, seed, serving_of(MACHINE, arm))
            for seed in range(self.seeds)
        ]


def drawn(place: Place, seed: int) -> Workload:
    urgent = f"azure-conversation-2023?n={place.urgent}&rate=4&class={URGENT}&priority=-1{ARRIVALS[place.arrivals]}"
    batch = f"deepseek-r1?n={place.batch}&rate=1000000&class={BATCH}"
    requests = open_workload(f"{urgent}&seed={seed} + {batch}&seed={seed}")
    return Workload(f"urgent {place.arrivals}, batch", tuple(requests), seed)


def ttft_p99(result: Result) -> float:
    return float(result["classes"][URGENT]["ttft_s"]["p99"])


def batch_tok_s(result: Result) -> float:
    return float(result["classes"][BATCH]["steady_tok_s"])


def best_watermark(runs: Runs) -> Arm:
    return min((STOCK, *MARKED), key=lambda arm: fmean(map(ttft_p99, runs[arm])))


def rows(runs: Runs) -> list[list[str]]:
    return [
        [
            arm.text(),
            f"{fmean(result['classes'][URGENT]['ttft_s']['mean'] for result in results):.2f}",
            f"{fmean(map(ttft_p99, results)):.2f}",
            f"{fmean(result['classes'][URGENT]['e2e_s']['mean'] for result in results):.2f}",
            f"{fmean(map(batch_tok_s, results)):.0f}",
            f"{fmean(result['classes'][BATCH]['e2e_s']['mean'] for result in results):.0f}",
            f"{fmean(result['classes'][BATCH]['longest_gap_s']['p99'] for result in results):.0f}",
            f"{fmean(sum(result['preemptions'].values()) for result in results):.0f}",
            f"{fmean(result['moved_bytes'] for result in results) / 1e9:.0f}",
        ]
        for arm, results in runs.items()
    ]


def verdicts(place: Place, runs: Runs) -> list[Verdict]:
    best = best_watermark(runs)
    full = place.kv_blocks <= FULL_BLOCKS
    ttft = student_ratio(list(map(ttft_p99, runs[JUDGED])), list(map(ttft_p99, runs[best])))
    judged = [
        Verdict(
            f"{JUDGED.text()} over {best.text()}: urgent TTFT p99", place.text(), ttft,
            1 / MIN_TIMES if full else NO_WORSE, True,
        )
    ]  # fmt: skip
    for other in dict.fromkeys((best, STOCK)):
        batch = student_ratio(list(map(batch_tok_s, runs[JUDGED])), list(map(batch_tok_s, runs[other])))
        bar = f"{JUDGED.text()} over {other.text()}: batch tok/s"
        judged.append(Verdict(bar, place.text(), batch, MIN_BATCH if full else 1 / NO_WORSE, False))
    return judged


def main(arguments: Sequence[str] | None = None) -> int:
    options = _arguments(arguments)
    hardware = hardware_of(MACHINE, options.cache / "configs")
    blocks = options.kv_blocks or (FULL_BLOCKS, AMPLE_BLOCKS)
    sizes = options.seeds, options.urgent, options.batch
    places = [Place(arrivals, count, *sizes) for count in blocks for arrivals in ARRIVALS]
    wanted = [{arm: place.cells(arm, hardware) for arm in ARMS} for place in places]
    found = run_cells(wanted, options.jobs, options.cache, options.fresh)
    heads = ["order, how", "urgent TTFT mean s", "p99", "e2e", "batch tok/s", "e2e", "longest gap p99 s", "preempted"]
    judged: list[Verdict] = []
    for place, runs in zip(places, found, strict=True):
        print(f"\n{place.text()}")
        print("\n".join(aligned([[*heads, "moved GB"], *rows(runs)])))
        judged += verdicts(place, runs)
    print()
    print("\n".join(verdict.line() for verdict in judged))
    if options.json:
        write(options.json, places, found, judged)
    return 0 if all(verdict.text == MET for verdict in judged) else 1


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kv-blocks", type=int, action="append", help="of 16 tokens; 8000 and 60000 without it")
    parser.add_argument("--urgent", type=int, default=2400, help="urgent requests")
    parser.add_argument("--batch", type=int, default=400, help="requests of the batch")
    add_arguments(parser)
    options = parser.parse_args(arguments)
    if options.seeds < 2:
        parser.error(f"--seeds is {options.seeds}: should be 2 or more, one run has no interval")
    return options


if __name__ == "__main__":
    sys.exit(main())
