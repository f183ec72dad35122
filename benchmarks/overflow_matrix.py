"""Throughput and tails of every policy over workloads x memory pressure x machines, simulated; and the bars.

    python benchmarks/overflow_matrix.py [--data FOLDER] [--requests N] [--repeats N] [--no-prefix-caching]
        [--bars-alone] [--poisson LOAD] [--jobs N] [--json FILE]

Machines and workloads are those of ``matrix_places.py``: lengths of the three workloads that ship, drawn by a seed per
repeat; with ``--data`` also the public traces below that folder, successive parts of each being the repeats. All
requests arrive at once, so that throughput is what the engine does and not what is asked of it. Pressure: KV memory as
a share of what as many requests as may run would hold at their mean length. Servers are vLLM's own for the device, and
a copy moves one layer's keys and values of a block at a time. Policies are compared on the same requests and chance,
pair by pair; ``best threshold`` is chosen for each repeat on the other ones.

``--poisson 0.9 --poisson 1.1``: the requests arrive at those shares of capacity instead, and their end-to-end times are
compared (``matrix_poisson.py``).

Bars (``matrix_bars.py``): each is a ratio with its 95% interval over the repeats. It is met where the whole interval is
on the right side, missed where the whole interval is on the wrong side, and else undecided. Exits 1 where a bar is
missed or a run fails.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import Any

import matrix_bars
import matrix_poisson
from matrix_bars import ratio_over
from matrix_places import (
    CONTEXT_TOKENS,
    HOST_GIB,
    LEARNED,
    MACHINES,
    RECOMPUTE,
    SWAP,
    Place,
    Runs,
    add_arguments,
    parsed,
    places_of,
    serving_of,
    short,
    simulated,
)

from kvpolicy.cost.analytic import ASSUMED
from kvpolicy.hardware.sheets import device_sheet, link_sheet
from kvpolicy.stats import CONFIDENCE, Ratio, student_ratio
from kvpolicy.study.cache import Result
from kvpolicy.study.report import aligned, server_words
from kvpolicy.workload.near_capacity import MIN_REQUESTS

THRESHOLDS = (512, 1024, 2048, 4096)
BEST, MINWASTE = "best threshold", "minwaste:analytic"
OTHERS = (MINWASTE, *(f"threshold:{tokens}" for tokens in THRESHOLDS))


def main(arguments: Sequence[str] | None = None) -> int:
    options = _arguments(arguments)
    places = places_of(options, not options.no_prefix_caching, options.data)
    heading = constants(options.machine or tuple(MACHINES))
    if options.poisson:
        figures = matrix_poisson.all_measured(places, options)
        verdicts = [verdict for one in figures for verdict in one.verdicts()]
        verdicts.sort(key=lambda verdict: verdict.bar)
        shown = [*heading, *matrix_poisson.table(figures), "", *matrix_bars.lines(verdicts)]
        values: dict[str, Any] = {"cells": [one.to_dict() for one in figures]}
    else:
        policies = (RECOMPUTE, SWAP, LEARNED) if options.bars_alone else (RECOMPUTE, SWAP, *OTHERS, LEARNED)
        measured_places = list(zip(places, map(with_best, simulated(places, policies, options)), strict=True))
        rows, summary = [row_of(place, runs) for place, runs in measured_places], summary_of(measured_places)
        verdicts = matrix_bars.judged(measured_places)
        shown = [*heading, *table(rows), *closing_lines(summary), *matrix_bars.lines(verdicts)]
        values = {"cells": rows, "summary": summary}
    print("\n".join(shown))
    if options.json:
        values |= {"bars": matrix_bars.dicts(verdicts)}
        options.json.write_text(json.dumps(values, indent=2, allow_nan=False) + "\n")
    return matrix_bars.exit_status(verdicts)


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with public traces somewhere below it")
    parser.add_argument("--no-prefix-caching", action="store_true", help="nothing of a victim survives on the device")
    parser.add_argument("--bars-alone", action="store_true", help="only the policies that the bars are about")
    parser.add_argument(
        "--poisson", type=float, action="append", metavar="LOAD", help="arrivals at that share of capacity instead"
    )
    add_arguments(parser)
    options = parsed(parser, arguments)
    for load in options.poisson or ():
        if not 0 < load < float("inf"):
            parser.error(f"--poisson is {load}: should be above 0")
    fewest = MIN_REQUESTS
    if options.poisson and options.requests < fewest:
        parser.error(f"--requests is {options.requests}: should be {fewest} or more with --poisson")
    return options


# ---- figures ----


def with_best(runs: Mapping[str, Sequence[Result]]) -> Runs:
    """The runs, and those of the threshold with the highest throughput on the other repeats, where there are any."""
    thresholds = [policy for policy in runs if policy.startswith("threshold:")]
    if not thresholds:
        return runs
    repeats = range(len(runs[RECOMPUTE]))

    def elsewhere(policy: str, repeat: int) -> float:
        return fmean(log(runs[policy][other]["throughput_tok_s"]) for other in repeats if other != repeat)

    best = [runs[max(thresholds, key=lambda policy: elsewhere(policy, repeat))][repeat] for repeat in repeats]
    return {**runs, BEST: best}


def shown_of(runs: Runs) -> list[str]:
    return [policy for policy in (RECOMPUTE, SWAP, BEST, MINWASTE, LEARNED) if policy in runs]


def row_of(place: Place, runs: Runs) -> dict[str, Any]:
    return {
        "machine": place.machine,
        "workload": place.workload,
        "memory_share": place.share,
        "prefix_caching": place.serving.prefix_caching,
        "kv_blocks": place.kv_blocks,
        "policies": {policy: _figures(runs, policy) for policy in shown_of(runs)},
    }


def _figures(runs: Runs, policy: str) -> dict[str, Any]:
    results = runs[policy]
    values: dict[str, Any] = {
        name: fmean(result[name] for result in results) for name in ("throughput_tok_s", "steady_tok_s")
    }
    for name in ("e2e_s", "ttft_s", "itl_s", "longest_gap_s"):
        values[f"{name[:-2]}_p99_s"] = fmean(result[name]["p99"] for result in results)
        values[f"{name[:-2]}_p99_ratio"] = asdict(
            ratio_over(runs, policy, RECOMPUTE, lambda result, name=name: result[name]["p99"])
        )
    for other in (RECOMPUTE, SWAP):
        values[f"throughput over {other}"] = asdict(ratio_over(runs, policy, other, _throughput))
        values[f"steady over {other}"] = asdict(ratio_over(runs, policy, other, matrix_bars.steady))
    kinds = ("recompute", "swap")
    values["preemptions"] = {kind: fmean(result["preemptions"].get(kind, 0) for result in results) for kind in kinds}
    values["recomputed_tokens"] = fmean(result["recomputed_tokens"] for result in results)
    values["moved_bytes"] = fmean(result["moved_bytes"] for result in results)
    return values


def _throughput(result: Result) -> float:
    return float(result["throughput_tok_s"])


def summary_of(runs_by_place: Sequence[tuple[Place, Runs]]) -> dict[str, Any]:
    """Per policy, on each machine and in all: geometric means over places, intervals over repeats; the worst place."""
    machines = list(dict.fromkeys(place.machine for place, _ in runs_by_place))
    summary: dict[str, Any] = {}
    for group in [*machines, "all"] if len(machines) > 1 else machines:
        group_runs = [(place, runs) for place, runs in runs_by_place if group in (place.machine, "all")]
        summary[group] = {policy: _overall(group_runs, policy) for policy in shown_of(group_runs[0][1])}
    return summary


def _overall(runs_by_place: Sequence[tuple[Place, Runs]], policy: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for other in (RECOMPUTE, SWAP):
        values[f"over {other}"] = asdict(
            student_ratio(_mean_by_repeat(runs_by_place, policy), _mean_by_repeat(runs_by_place, other))
        )
    worst = min(runs_by_place, key=lambda one: _to_better(one[1], policy).value)
    ratio = _to_better(worst[1], policy)
    return values | {"worst over the better fixed action": asdict(ratio) | {"where": worst[0].text()}}


def _mean_by_repeat(runs_by_place: Sequence[tuple[Place, Runs]], policy: str) -> list[float]:
    repeats = range(len(runs_by_place[0][1][policy]))
    return [exp(fmean(log(_throughput(runs[policy][repeat])) for _, runs in runs_by_place)) for repeat in repeats]


def _to_better(runs: Runs, policy: str) -> Ratio:
    """Throughput over that of the fixed action which had more of it in this place."""
    fixed = max((RECOMPUTE, SWAP), key=lambda one: fmean(log(_throughput(run)) for run in runs[one]))
    return ratio_over(runs, policy, fixed, _throughput)


# ---- for a person ----


def constants(machines: Sequence[str]) -> list[str]:
    """Where the constants of the machines come from, and which were not measured."""
    lines = []
    for machine in machines:
        sheet = device_sheet(machine)
        link = link_sheet(sheet.link)
        lines += [
            f"{machine} with {MACHINES[machine]['_name_or_path']} (16-bit)",
            f"  {sheet.bf16_flops / 1e12:g} Tflop/s, {sheet.memory_bytes_per_s / 1e9:g} GB/s: {sheet.source}",
            f"  server: {server_words(asdict(serving_of(machine)), machine)}",
            f"  host link {link.name}, {link.bytes_per_s / 1e9:g} GB/s each way: {link.source}",
        ]
    shares = ("linear_share", "attention_share", "weight_share", "kv_share")
    reached = ", ".join(f"{getattr(ASSUMED, name).value:g} {getattr(ASSUMED, name).unit}" for name in shares)
    copies = ", ".join(
        f"{constant.value:g} {constant.unit}" for constant in (ASSUMED.pinned_share, ASSUMED.copy_s, ASSUMED.segment_s)
    )
    return [
        *lines,
        f"share of the peaks, linear layers, attention, weights, KV: {reached}: from published kernel timings",
        f"measured by nobody: copies between host and device ({copies}); the engine's own {ASSUMED.step_s.value:g} s "
        "per step; a layer's keys and values of a block are one contiguous piece; copies run beside steps",
        f"the cost model of {MINWASTE} and {LEARNED} has the simulator's own constants: how far off a trained one is, "
        "is not in this table",
        f"context {CONTEXT_TOKENS} tokens, host memory {HOST_GIB:g} GiB, vLLM's scheduling rules",
        f"intervals: {CONFIDENCE:.0%} for each figure alone; of many, some miss by chance",
        "",
    ]


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = []
    for row in rows:
        lines.append(
            f"{row['machine']}, {short(row['workload'])}, memory {row['memory_share']:g} ({row['kv_blocks']} blocks)"
            f"{'' if row['prefix_caching'] else ', without prefix caching'}"
        )
        head = ["policy", "tok/s", "over recompute", "over swap", "e2e p99 s", "over recompute", "ttft p99 s"]
        cells = [[*head, "itl p99 ms", "recomputes", "swaps", "tokens again", "moved GB"]]
        for policy, values in row["policies"].items():
            ratios = [Ratio(**values[f"throughput over {other}"]).text() for other in (RECOMPUTE, SWAP)]
            cells.append(
                [policy, f"{values['throughput_tok_s']:.0f}", *ratios, f"{values['e2e_p99_s']:.1f}"]
                + [
                    Ratio(**values["e2e_p99_ratio"]).text(),
                    f"{values['ttft_p99_s']:.1f}",
                    f"{1e3 * values['itl_p99_s']:.0f}",
                ]
                + [f"{values['preemptions'][kind]:.0f}" for kind in ("recompute", "swap")]
                + [f"{values['recomputed_tokens']:.0f}", f"{values['moved_bytes'] / 1e9:.1f}"]
            )
        lines += [*aligned(cells), ""]
    return lines


def closing_lines(summary: Mapping[str, Any]) -> list[str]:
    lines = []
    for group, policies in summary.items():
        cells = [["policy", "over always-recompute", "over always-swap", "worst over the better fixed action"]]
        for policy, values in policies.items():
            worst = values["worst over the better fixed action"]
            ratio = Ratio(*(worst[name] for name in ("value", "low", "high", "pairs"))).text()
            means = [Ratio(**values[f"over {other}"]).text() for other in (RECOMPUTE, SWAP)]
            cells.append([policy, *means, f"{ratio} in {worst['where']}"])
        lines += [f"throughput, geometric mean over places: {group}", *aligned(cells), ""]
    return lines


if __name__ == "__main__":
    sys.exit(main())
