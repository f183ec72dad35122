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
from kvpolicy.study.cache import Result, default_folder, workload_digest
from kvpolicy.study.cell import Cell
from kvpolicy.study.config import Run, Serving
from kvpolicy.study.grid import sweep
from kvpolicy.study.progress import bar
from kvpolicy.study.recommend import LEVEL, Ratio, paired_ratio
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
    asked = _arguments(arguments)
    cache = default_folder() if asked.cache is None else asked.cache
    places = _places(asked, cache / "configs")
    with bar() as progress:
        run = Run(jobs=asked.jobs, cache=cache, fresh=asked.fresh, progress=progress)
        report = sweep([cell for place in places for cell in place.cells()], run)
    for one in report.failed:
        print(f"failed: {one.text()}", file=sys.stderr)
    if report.failed:
        return 1
    results: dict[tuple[str, str, int], dict[str, list[Result]]] = {}
    for one in report.results:
        given = one["inputs"]
        place = results.setdefault((given["hardware"], given["workload"], given["kv_blocks"]), {})
        place.setdefault(given["policy"], []).append(one)
    found = [(place, with_best(results[place.hardware, place.workload, place.kv_blocks])) for place in places]
    rows, summary = [row_of(place, runs) for place, runs in found], summary_of(found)
    print("\n".join([*constants(asked.machine or tuple(MACHINES)), *table(rows), *closing(summary)]))
    if asked.json:
        asked.json.write_text(json.dumps({"cells": rows, "summary": summary}, indent=2, allow_nan=False) + "\n")
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
    asked = parser.parse_args(arguments)
    if asked.repeats < 2:
        parser.error(f"--repeats is {asked.repeats}: should be 2 or more, one run has no interval")
    if asked.requests < 1:
        parser.error(f"--requests is {asked.requests}: should be 1 or more")
    if asked.jobs is not None and asked.jobs < 0:
        parser.error(f"--jobs is {asked.jobs}: should be 1 or more, or 0 for none but this process")
    for share in asked.share or ():
        if not 0 < share < float("inf"):
            parser.error(f"--share is {share}: should be above 0")
    return asked


def _places(asked: argparse.Namespace, configs: Path) -> list[Place]:
    """Configurations are written where results are kept, since a result belongs to the path of its own."""
    configs.mkdir(parents=True, exist_ok=True)
    workloads = [(f"{name}?n={asked.requests}&context={CONTEXT_TOKENS}", True) for name in asked.shipped or SHIPPED]
    traces = [path for name in TRACES for path in sorted(asked.data.rglob(name))] if asked.data else []
    whole = f"n={asked.requests * asked.repeats}&context={CONTEXT_TOKENS}&speed={AT_ONCE}"
    workloads += [(f"{path}?{whole}", False) for path in dict.fromkeys(traces)]
    if asked.data and not traces:
        raise SystemExit(f"{asked.data}: holds none of {', '.join(TRACES)}")
    found = []
    for machine, (workload, drawn) in itertools.product(asked.machine or MACHINES, workloads):
        config = configs / f"{MACHINES[machine]['_name_or_path']}.json"
        config.write_text(json.dumps(MACHINES[machine]))
        seeds, parts = (asked.repeats, 1) if drawn else (1, asked.repeats)
        serving = serving_of(machine, not asked.no_prefix_caching)
        for share in asked.share or SHARES:
            blocks = _blocks(workload, asked.requests, share, serving)
            found.append(Place(machine, f"{machine}:{config}", workload, share, blocks, seeds, parts, serving))
    return found


def serving_of(machine: str, prefix_caching: bool = True) -> Serving:
    """vLLM's own for the device, but with more host memory, so that it is not what decides."""
    return Serving(host_gib=HOST_GIB, prefix_caching=prefix_caching).on(machine)


def _blocks(workload: str, requests: int, share: float, serving: Serving) -> int:
    """Of KV memory; the longest request that may come has to fit."""
    lengths = [one.total_tokens for one in open_source(with_seed(workload, 0), workload_digest(workload))]
    wanted = share * min(serving.max_num_seqs, requests) * fmean(lengths) / serving.block_size
    return max(round(wanted), -(-CONTEXT_TOKENS // serving.block_size) + 1)


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
    mine = runs[policy]
    told: dict[str, Any] = {"throughput_tok_s": fmean(one["throughput_tok_s"] for one in mine)}
    for name in ("e2e_s", "ttft_s", "itl_s"):
        told[f"{name[:-2]}_p99_s"] = fmean(one[name]["p99"] for one in mine)
        told[f"{name[:-2]}_p99_ratio"] = asdict(_over(runs, policy, RECOMPUTE, lambda one, name=name: one[name]["p99"]))
    for other in (RECOMPUTE, SWAP):
        told[f"throughput over {other}"] = asdict(_over(runs, policy, other, _throughput))
    kinds = ("recompute", "swap")
    told["preemptions"] = {kind: fmean(one["preemptions"].get(kind, 0) for one in mine) for kind in kinds}
    told["recomputed_tokens"] = fmean(one["recomputed_tokens"] for one in mine)
    told["moved_bytes"] = fmean(one["moved_bytes"] for one in mine)
    return told


def _throughput(one: Result) -> float:
    return float(one["throughput_tok_s"])


def _over(runs: Runs, policy: str, other: str, value: Callable[[Result], float]) -> Ratio:
    return paired_ratio([value(one) for one in runs[policy]], [value(one) for one in runs[other]])


def summary_of(found: Sequence[tuple[Place, Runs]]) -> dict[str, Any]:
    """Per policy, on each machine and in all: geometric means over places, intervals over repeats; the worst place."""
    machines = list(dict.fromkeys(place.machine for place, _ in found))
    summary: dict[str, Any] = {}
    for group in [*machines, "all"] if len(machines) > 1 else machines:
        some = [(place, runs) for place, runs in found if group in (place.machine, "all")]
        summary[group] = {policy: _overall(some, policy) for policy in SHOWN}
    return summary


def _overall(found: Sequence[tuple[Place, Runs]], policy: str) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for other in (RECOMPUTE, SWAP):
        told[f"over {other}"] = asdict(paired_ratio(_mean_by_repeat(found, policy), _mean_by_repeat(found, other)))
    worst = min(found, key=lambda one: _to_better(one[1], policy).value)
    ratio = _to_better(worst[1], policy)
    where = f"{worst[0].machine}, {_short(worst[0].workload)}, memory {worst[0].share:g}"
    return told | {"worst over the better fixed action": asdict(ratio) | {"where": where}}


def _mean_by_repeat(found: Sequence[tuple[Place, Runs]], policy: str) -> list[float]:
    repeats = range(len(found[0][1][policy]))
    return [exp(fmean(log(_throughput(runs[policy][repeat])) for _, runs in found)) for repeat in repeats]


def _to_better(runs: Runs, policy: str) -> Ratio:
    """Throughput over that of the fixed action which had more of it in this place."""
    fixed = max((RECOMPUTE, SWAP), key=lambda one: fmean(log(_throughput(run)) for run in runs[one]))
    return _over(runs, policy, fixed, _throughput)


# ---- for a person ----


def constants(machines: Sequence[str]) -> list[str]:
    """Where the constants of the machines come from, and which nobody has measured."""
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
        "per step; a layer's keys and values of a block are one contiguous piece; loads run beside steps, a step waits "
        "for its saves",
        f"the cost model of {MINWASTE} and {LEARNED} has the simulator's own constants: how far off a trained one is, "
        "is not in this table",
        f"context {CONTEXT_TOKENS} tokens, host memory {HOST_GIB:g} GiB, vLLM's scheduling rules",
        f"intervals are of each figure by itself, at {LEVEL:.0%}: of many, some miss by chance alone",
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
        for policy, told in row["policies"].items():
            ratios = [Ratio(**told[f"throughput over {other}"]).text() for other in (RECOMPUTE, SWAP)]
            cells.append(
                [policy, f"{told['throughput_tok_s']:.0f}", *ratios, f"{told['e2e_p99_s']:.1f}"]
                + [Ratio(**told["e2e_p99_ratio"]).text(), f"{told['ttft_p99_s']:.1f}", f"{1e3 * told['itl_p99_s']:.0f}"]
                + [f"{told['preemptions'][kind]:.0f}" for kind in ("recompute", "swap")]
                + [f"{told['recomputed_tokens']:.0f}", f"{told['moved_bytes'] / 1e9:.1f}"]
            )
        lines += [*aligned(cells), ""]
    return lines


def closing(summary: Mapping[str, Any]) -> list[str]:
    lines = []
    for group, policies in summary.items():
        cells = [["policy", "over always-recompute", "over always-swap", "worst over the better fixed action"]]
        for policy, told in policies.items():
            worst = told["worst over the better fixed action"]
            ratio = Ratio(*(worst[name] for name in ("value", "low", "high", "pairs"))).text()
            means = [Ratio(**told[f"over {other}"]).text() for other in (RECOMPUTE, SWAP)]
            cells.append([policy, *means, f"{ratio} in {worst['where']}"])
        lines += [f"throughput, geometric mean over places: {group}", *aligned(cells), ""]
    return lines


def _short(workload: str) -> str:
    return Path(workload.partition("?")[0]).name


if __name__ == "__main__":
    sys.exit(main())
