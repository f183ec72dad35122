"""Throughput and tails of every policy over workloads x memory pressure x machines, simulated: the README's table.

    python benchmarks/overflow_matrix.py [--data FOLDER] [--requests N] [--repeats N] [--jobs N] [--json FILE]

Two machines, by their data sheets: an H100 with Llama-3.1-8B (grouped-query attention, 8 KV heads) and an A100 with
Llama-2-7B (multi-head attention, 32 KV heads). Workloads: lengths of the three that ship, drawn by a seed per repeat;
with ``--data`` also the public traces below that folder, successive parts of each being the repeats. All requests
arrive at once, so that throughput is what the engine does and not what is asked of it. Pressure: KV memory as a share
of what as many requests as may run would hold at their mean length. Servers are vLLM's own for the device, and a
copy moves one layer's keys and values of a block at a time. Policies are compared on the same requests and
chance, pair by pair; ``best threshold`` is chosen for each repeat on the other ones. Exits 1 where a run fails.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import Any

from kvpolicy.cost.analytic import ASSUMED
from kvpolicy.hardware.sheets import device_sheet, link_sheet
from kvpolicy.stats import CONFIDENCE, Ratio, student_ratio
from kvpolicy.study.cache import Result, default_folder, workload_digest
from kvpolicy.study.cell import Cell
from kvpolicy.study.config import Run, Serving
from kvpolicy.study.grid import sweep
from kvpolicy.study.progress import bar
from kvpolicy.study.report import aligned, server_words
from kvpolicy.study.run_cell import open_source, with_seed

LLAMA_3_1_8B = {
    "_name_or_path": "Llama-3.1-8B",
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
LLAMA_2_7B = {
    "_name_or_path": "Llama-2-7B",
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}
MACHINES: Mapping[str, Mapping[str, Any]] = {"H100-SXM": LLAMA_3_1_8B, "A100-SXM-80GB": LLAMA_2_7B}
SHIPPED = ("azure-conversation-2023", "sharegpt-8k", "deepseek-r1")
TRACES = ("azure2023_conv*", "azure2023_code*", "mooncake_conversation*", "burstgpt*", "BurstGPT*")
CONTEXT_TOKENS = 16384
"""Longer requests lose prompt, so that the same requests fit every memory."""
SHARES = (0.5, 0.2, 0.05)
THRESHOLDS = (512, 1024, 2048, 4096)
RECOMPUTE, SWAP, BEST = "always-recompute", "always-swap", "best threshold"
MINWASTE, LEARNED = "minwaste:analytic", "cheapest:analytic"
SHOWN = (RECOMPUTE, SWAP, BEST, MINWASTE, LEARNED)
HOST_GIB = 128.0

AT_ONCE = 1e6
"""Times as fast as it was recorded: all requests of a trace within milliseconds."""
Runs = Mapping[str, Sequence[Result]]
"""By policy, one of each repeat in their order."""


@dataclass(frozen=True, slots=True)
class Place:
    """One cell of the matrix."""

    machine: str
    hardware: str
    workload: str
    share: float
    kv_blocks: int
    seeds: int
    parts: int
    serving: Serving

    def cells(self) -> list[Cell]:
        place = self.kv_blocks, "native"
        return [
            Cell(self.workload, policy, *place, seed, self.hardware, "builtin", self.serving, part, self.parts)
            for policy in (RECOMPUTE, SWAP, MINWASTE, LEARNED, *(f"threshold:{tokens}" for tokens in THRESHOLDS))
            for seed in range(self.seeds)
            for part in range(self.parts)
        ]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _arguments(arguments)
    cache = default_folder() if options.cache is None else options.cache
    places = _places(options, cache / "configs")
    with bar() as progress:
        run = Run(jobs=options.jobs, cache=cache, fresh=options.fresh, progress=progress)
        report = sweep([cell for place in places for cell in place.cells()], run)
    for result in report.failed:
        print(f"failed: {result.text()}", file=sys.stderr)
    if report.failed:
        return 1
    results: dict[tuple[str, str, int], dict[str, list[Result]]] = {}
    for result in report.results:
        inputs = result["inputs"]
        place = results.setdefault((inputs["hardware"], inputs["workload"], inputs["kv_blocks"]), {})
        place.setdefault(inputs["policy"], []).append(result)
    measured_places = [(place, with_best(results[place.hardware, place.workload, place.kv_blocks])) for place in places]
    rows, summary = [row_of(place, runs) for place, runs in measured_places], summary_of(measured_places)
    print("\n".join([*constants(options.machine or tuple(MACHINES)), *table(rows), *closing_lines(summary)]))
    if options.json:
        options.json.write_text(json.dumps({"cells": rows, "summary": summary}, indent=2, allow_nan=False) + "\n")
    return 0


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with public traces somewhere below it")
    parser.add_argument("--requests", type=int, default=300, help="of each run")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each policy: seeds, or parts of a trace")
    parser.add_argument("--machine", choices=MACHINES, action="append", help="only that one")
    parser.add_argument("--shipped", choices=SHIPPED, action="append", help="only that workload of those that ship")
    parser.add_argument("--share", type=float, action="append", help="of memory, instead of the usual three")
    parser.add_argument("--no-prefix-caching", action="store_true", help="nothing of a victim survives on the device")
    parser.add_argument("--jobs", type=int, help="processes; one per core without it")
    parser.add_argument("--cache", type=Path, help="folder of finished runs; the user's cache folder without it")
    parser.add_argument("--fresh", action="store_true", help="simulate also what was finished before")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if options.repeats < 2:
        parser.error(f"--repeats is {options.repeats}: should be 2 or more, one run has no interval")
    if options.requests < 1:
        parser.error(f"--requests is {options.requests}: should be 1 or more")
    if options.jobs is not None and options.jobs < 0:
        parser.error(f"--jobs is {options.jobs}: should be 1 or more, or 0 for none but this process")
    for share in options.share or ():
        if not 0 < share < float("inf"):
            parser.error(f"--share is {share}: should be above 0")
    return options


def _places(options: argparse.Namespace, configs: Path) -> list[Place]:
    """Configurations are written beside the cached results, since a result belongs to the path of its configuration."""
    configs.mkdir(parents=True, exist_ok=True)
    workloads = [(f"{name}?n={options.requests}&context={CONTEXT_TOKENS}", True) for name in options.shipped or SHIPPED]
    traces = [path for name in TRACES for path in sorted(options.data.rglob(name))] if options.data else []
    whole = f"n={options.requests * options.repeats}&context={CONTEXT_TOKENS}&speed={AT_ONCE}"
    workloads += [(f"{path}?{whole}", False) for path in dict.fromkeys(traces)]
    if options.data and not traces:
        raise SystemExit(f"{options.data}: holds none of {', '.join(TRACES)}")
    places = []
    for machine, (workload, machine_workload) in itertools.product(options.machine or MACHINES, workloads):
        config = configs / f"{MACHINES[machine]['_name_or_path']}.json"
        config.write_text(json.dumps(MACHINES[machine]))
        seeds, parts = (options.repeats, 1) if machine_workload else (1, options.repeats)
        serving = serving_of(machine, not options.no_prefix_caching)
        for share in options.share or SHARES:
            blocks = _blocks(workload, options.requests, share, serving)
            places.append(Place(machine, f"{machine}:{config}", workload, share, blocks, seeds, parts, serving))
    return places


def serving_of(machine: str, prefix_caching: bool = True) -> Serving:
    """vLLM's own for the device, but with more host memory, so that it is not what decides."""
    return Serving(host_gib=HOST_GIB, prefix_caching=prefix_caching).on(machine)


def _blocks(workload: str, requests: int, share: float, serving: Serving) -> int:
    """Of KV memory; the longest request that may come has to fit."""
    lengths = [request.total_tokens for request in open_source(with_seed(workload, 0), workload_digest(workload))]
    tokens = share * min(serving.max_num_seqs, requests) * fmean(lengths) / serving.block_size
    return max(round(tokens), -(-CONTEXT_TOKENS // serving.block_size) + 1)


# ---- figures ----


def with_best(runs: Mapping[str, Sequence[Result]]) -> Runs:
    """The runs, and those of the threshold that had the highest throughput on the other repeats."""
    thresholds = [policy for policy in runs if policy.startswith("threshold:")]
    repeats = range(len(runs[RECOMPUTE]))

    def elsewhere(policy: str, repeat: int) -> float:
        return fmean(log(runs[policy][other]["throughput_tok_s"]) for other in repeats if other != repeat)

    best = [runs[max(thresholds, key=lambda policy: elsewhere(policy, repeat))][repeat] for repeat in repeats]
    return {**runs, BEST: best}


def row_of(place: Place, runs: Runs) -> dict[str, Any]:
    return {
        "machine": place.machine,
        "workload": place.workload,
        "memory_share": place.share,
        "prefix_caching": place.serving.prefix_caching,
        "kv_blocks": place.kv_blocks,
        "policies": {policy: _figures(runs, policy) for policy in SHOWN},
    }


def _figures(runs: Runs, policy: str) -> dict[str, Any]:
    results = runs[policy]
    values: dict[str, Any] = {"throughput_tok_s": fmean(result["throughput_tok_s"] for result in results)}
    for name in ("e2e_s", "ttft_s", "itl_s"):
        values[f"{name[:-2]}_p99_s"] = fmean(result[name]["p99"] for result in results)
        values[f"{name[:-2]}_p99_ratio"] = asdict(
            _ratio_over(runs, policy, RECOMPUTE, lambda result, name=name: result[name]["p99"])
        )
    for other in (RECOMPUTE, SWAP):
        values[f"throughput over {other}"] = asdict(_ratio_over(runs, policy, other, _throughput))
    kinds = ("recompute", "swap")
    values["preemptions"] = {kind: fmean(result["preemptions"].get(kind, 0) for result in results) for kind in kinds}
    values["recomputed_tokens"] = fmean(result["recomputed_tokens"] for result in results)
    values["moved_bytes"] = fmean(result["moved_bytes"] for result in results)
    return values


def _throughput(result: Result) -> float:
    return float(result["throughput_tok_s"])


def _ratio_over(runs: Runs, policy: str, other: str, value: Callable[[Result], float]) -> Ratio:
    return student_ratio([value(result) for result in runs[policy]], [value(result) for result in runs[other]])


def summary_of(runs_by_place: Sequence[tuple[Place, Runs]]) -> dict[str, Any]:
    """Per policy, on each machine and in all: geometric means over places, intervals over repeats; the worst place."""
    machines = list(dict.fromkeys(place.machine for place, _ in runs_by_place))
    summary: dict[str, Any] = {}
    for group in [*machines, "all"] if len(machines) > 1 else machines:
        group_runs = [(place, runs) for place, runs in runs_by_place if group in (place.machine, "all")]
        summary[group] = {policy: _overall(group_runs, policy) for policy in SHOWN}
    return summary


def _overall(runs_by_place: Sequence[tuple[Place, Runs]], policy: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for other in (RECOMPUTE, SWAP):
        values[f"over {other}"] = asdict(
            student_ratio(_mean_by_repeat(runs_by_place, policy), _mean_by_repeat(runs_by_place, other))
        )
    worst = min(runs_by_place, key=lambda one: _to_better(one[1], policy).value)
    ratio = _to_better(worst[1], policy)
    where = f"{worst[0].machine}, {_short(worst[0].workload)}, memory {worst[0].share:g}"
    return values | {"worst over the better fixed action": asdict(ratio) | {"where": where}}


def _mean_by_repeat(runs_by_place: Sequence[tuple[Place, Runs]], policy: str) -> list[float]:
    repeats = range(len(runs_by_place[0][1][policy]))
    return [exp(fmean(log(_throughput(runs[policy][repeat])) for _, runs in runs_by_place)) for repeat in repeats]


def _to_better(runs: Runs, policy: str) -> Ratio:
    """Throughput over that of the fixed action which had more of it in this place."""
    fixed = max((RECOMPUTE, SWAP), key=lambda one: fmean(log(_throughput(run)) for run in runs[one]))
    return _ratio_over(runs, policy, fixed, _throughput)


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
            f"{row['machine']}, {_short(row['workload'])}, memory {row['memory_share']:g} ({row['kv_blocks']} blocks)"
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


def _short(workload: str) -> str:
    return Path(workload.partition("?")[0]).name


if __name__ == "__main__":
    sys.exit(main())
