"""Orders of service x recompute or swap x load x memory, on two machines, in the built-in simulator.

    python benchmarks/orders_study.py [--machine M] [--kv-blocks N] [--load L] [--requests N] [--seeds N] [--order SPEC]
        [--how HOW] [--host-gib G] [--jobs N] [--json FILE]

For every place (``order_places.py``) the arms are stock vLLM (fcfs, recompute), its best static watermark (that of the
lowest mean end-to-end time, chosen with hindsight), fcfs with always-swap and with the learned policy, and every order
with each of the three. Printed are the length, capacity, memory and host memory of each place, and for each arm ratios
over stock vLLM: means of the logarithm over seeds, the same requests for every arm. The bars follow, with intervals.
Virtual time: the figures are the same in every run. Exits 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, nan
from statistics import fmean

from matrix_bars import MET, MISSED, Verdict
from matrix_places import HOST_GIB
from order_places import (
    HOW,
    MACHINES,
    STOCK,
    WATERMARKS,
    Arm,
    Place,
    add_arguments,
    capacity_of,
    drawn,
    hardware_of,
    run_cells,
    write,
)  # fmt: skip

from kvpolicy.errors import KVPolicyError
from kvpolicy.order import load as load_order
from kvpolicy.stats import Ratio, student_ratio
from kvpolicy.study.cache import Result
from kvpolicy.study.config import Serving
from kvpolicy.study.report import aligned

MLFQ, PROMOTED, GITTINS = "mlfq:base=256", "mlfq:base=256,promote=30", "gittins:quantum=64"
ORDERS = (MLFQ, PROMOTED, GITTINS, "las:quantum=256", "srpt:lengths", "srpt:limit", "deadline:ttft=1,tpot=0.1")
PROMOTE_S = 30.0
MAX_PAUSE = 1.6
"""Longest pause of a stream under promotion, over the seconds after which requests are promoted."""
Runs = Mapping[Arm, Sequence[Result]]
Figure = Callable[[Result], float]


def _tail(name: str, statistic: str) -> Figure:
    return lambda result: float(result[name][statistic] or nan)


FIGURES: Mapping[str, Figure] = {
    "e2e per token": _tail("e2e_per_token_s", "mean"),
    "e2e": _tail("e2e_s", "mean"),
    "e2e p99": _tail("e2e_s", "p99"),
    "TTFT": _tail("ttft_s", "mean"),
    "TTFT p99": _tail("ttft_s", "p99"),
    "longest gap p99": _tail("longest_gap_s", "p99"),
    "steady tok/s": lambda result: float(result["steady_tok_s"]),
    "tok/s": lambda result: float(result["throughput_tok_s"]),
}
BEST_BY = FIGURES["e2e"]


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar of one arm at one load: a figure over stock vLLM's."""

    arm: Arm
    figure: str
    limit: float
    at_most: bool = True


BARS: Mapping[float, Sequence[Bar]] = {
    1.2: (
        Bar(Arm(MLFQ, "learned"), "e2e per token", 1 / 2.0),
        Bar(Arm(MLFQ, "learned"), "e2e", 0.80),
        Bar(Arm(MLFQ, "learned"), "TTFT", 1 / 100),
        Bar(Arm(MLFQ, "learned"), "steady tok/s", 1.05, False),
        Bar(Arm(MLFQ, "learned"), "e2e p99", 1.10),
        Bar(Arm(GITTINS, "learned"), "e2e", 0.72),
        Bar(Arm(GITTINS, "learned"), "steady tok/s", 1.15, False),
        Bar(Arm(GITTINS, "learned"), "TTFT", 1 / 100),
    ),
    0.9: (
        Bar(Arm(MLFQ, "learned"), "e2e per token", 1 / 1.6),
        Bar(Arm(MLFQ, "learned"), "e2e", 0.85),
    ),
}


def arms_of(orders: Sequence[str], hows: Sequence[str]) -> list[Arm]:
    stock = [STOCK, *(Arm(watermark=share) for share in WATERMARKS), *(Arm(how=how) for how in hows)]
    return list(dict.fromkeys(stock + [Arm(order, how) for order in orders for how in hows]))


def rows(runs: Runs) -> list[list[str]]:
    """One for each arm; of the watermarks only the best one."""
    marked = [arm for arm in runs if arm.watermark]
    best = min(marked, key=lambda arm: fmean(map(BEST_BY, runs[arm])), default=None)
    return [
        [
            arm.text(),
            *(f"{ratio(runs, arm, figure).value:.3g}" for figure in FIGURES),
            f"{fmean(map(FIGURES['longest gap p99'], results)):.2f}",
            f"{max(float(result['longest_pause_s'] or 0) for result in results):.0f}",
            f"{fmean(sum(result['preemptions'].values()) for result in results):.0f}",
            f"{fmean(result['recomputed_tokens'] for result in results) / 1e3:.0f}",
            f"{fmean(result['moved_bytes'] for result in results) / 1e9:.0f}",
        ]
        for arm, results in runs.items()
        if not arm.watermark or arm == best
    ]


def ratio(runs: Runs, arm: Arm, figure: str) -> Ratio:
    """Over stock vLLM, the same requests for both."""
    take = FIGURES[figure]
    return student_ratio(list(map(take, runs[arm])), list(map(take, runs[STOCK])))


def verdicts(place: Place, runs: Runs) -> list[Verdict]:
    return [
        Verdict(
            f"{bar.arm.text()}: {bar.figure}", place.text(), ratio(runs, bar.arm, bar.figure), bar.limit, bar.at_most
        )
        for bar in BARS.get(place.load, ())
        if bar.arm in runs
    ]


def promotion(place: Place, runs: Runs) -> list[tuple[str, bool]]:
    """Of orders that promote after ``PROMOTE_S``: a line about the longest pause of any stream, and whether it is short
    enough."""
    found = []
    for arm in (Arm(PROMOTED, how) for how in HOW):
        if arm in runs:
            pause_s = max(float(result["longest_pause_s"] or 0) for result in runs[arm])
            met = pause_s <= MAX_PAUSE * PROMOTE_S
            found.append(
                (
                    f"{place.text()}: {arm.text()}: longest pause {pause_s:.1f} s, at most "
                    f"{MAX_PAUSE:g} x {PROMOTE_S:g} s: {MET if met else MISSED}",
                    met,
                )
            )
    return found


def places_of(options: argparse.Namespace) -> list[Place]:
    """Every machine, memory and load, with the capacity measured first."""
    places = []
    for machine in options.machine or MACHINES:
        hardware = hardware_of(machine, options.cache / "configs")
        for blocks in options.kv_blocks or (26_000,):
            capacity = capacity_of(machine, hardware, blocks, options.requests, options.seeds)
            print(
                f"{machine}, Llama-3.1-8B, {blocks:,} blocks of 16 tokens, {options.host_gib:g} GiB of host memory, "
                f"{options.requests} requests of deepseek-r1: capacity {capacity:.3f} requests/s",
                flush=True,
            )
            places += [
                Place(
                    machine, hardware, blocks, options.requests, load, load * capacity, options.seeds, options.host_gib
                )
                for load in options.load or (0.9, 1.2)
            ]
    return places


def main(arguments: Sequence[str] | None = None) -> int:
    options = _arguments(arguments)
    places = places_of(options)
    arms = arms_of(options.order or ORDERS, options.how or tuple(HOW))
    wanted = [{arm: place.cells(arm) for arm in arms} for place in places]
    found = run_cells(wanted, options.jobs, options.cache, options.fresh)
    heads = ["order, how", *FIGURES, "longest gap p99 s", "longest pause s", "preempted", "recomputed K", "moved GB"]
    judged: list[Verdict] = []
    bounded = True
    for place, runs in zip(places, found, strict=True):
        base = {name: fmean(map(take, runs[STOCK])) for name, take in FIGURES.items()}
        print(
            f"\n{place.text()}; over stock vLLM, whose means are " + ", ".join(f"{n} {v:.4g}" for n, v in base.items())
        )
        print("\n".join(aligned([heads, *rows(runs)])))
        for line, met in promotion(place, runs):
            print(line)
            bounded &= met
        judged += verdicts(place, runs)
    print()
    print("\n".join(verdict.line() for verdict in judged))
    if options.json:
        write(options.json, places, found, judged)
    return 0 if bounded and all(verdict.text == MET for verdict in judged) else 1


def longest_blocks(requests: int, seeds: int) -> int:
    """Blocks that the longest of the requests needs, its last token apart, whose KV is not stored."""
    most = max(request.total_tokens for seed in range(seeds) for request in drawn(requests, seed).requests)
    return -(-(most - 1) // Serving().block_size)


def order_named(text: str) -> str:
    """The name itself. Raises what argparse prints where there is no such order."""
    try:
        load_order(text)
    except KVPolicyError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", choices=MACHINES, action="append", help="only that one")
    parser.add_argument("--kv-blocks", type=int, action="append", help="of 16 tokens; 26000 without it")
    parser.add_argument("--load", type=float, action="append", help="share of capacity; 0.9 and 1.2 without it")
    parser.add_argument("--order", type=order_named, action="append", help="only these orders beside fcfs")
    parser.add_argument("--how", choices=tuple(HOW), action="append", help="only these policies; all without it")
    parser.add_argument("--requests", type=int, default=800)
    parser.add_argument("--host-gib", type=float, default=HOST_GIB)
    add_arguments(parser)
    options = parser.parse_args(arguments)
    for name, least in (("requests", 4), ("seeds", 2)):
        if getattr(options, name) < least:
            parser.error(f"--{name} is {getattr(options, name)}: should be {least} or more")
    for load in options.load or ():
        if not 0 < load < inf:
            parser.error(f"--load is {load}: should be above 0")
    for blocks in options.kv_blocks or ():
        if blocks < (least := longest_blocks(options.requests, options.seeds)):
            parser.error(f"--kv-blocks is {blocks}: should be {least} or more, which the longest request needs")
    if not 0 <= options.host_gib < inf:
        parser.error(f"--host-gib is {options.host_gib:g}: should be 0 or more")
    return options


if __name__ == "__main__":
    sys.exit(main())
