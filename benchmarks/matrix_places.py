"""The places of the matrix: two machines, public workloads, shares of memory; and the runs of policies in them.

The machines, by their data sheets, are an H100 with Llama-3.1-8B (grouped-query attention, 8 KV heads) and an A100 with
Llama-2-7B (multi-head attention, 32 KV heads).
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from kvpolicy.study.cache import Result, default_folder, workload_digest
from kvpolicy.study.cell import Cell
from kvpolicy.study.config import Run, Serving
from kvpolicy.study.grid import sweep
from kvpolicy.study.progress import bar
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
RECOMPUTE, SWAP, LEARNED = "always-recompute", "always-swap", "cheapest:analytic"
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

    @property
    def repeats(self) -> int:
        return self.seeds * self.parts

    def cells(self, policy: str) -> list[Cell]:
        """One of each repeat."""
        return [
            Cell(
                self.workload, policy, self.kv_blocks, "native", seed, self.hardware, "builtin", self.serving, part,
                self.parts,
            )
            for seed in range(self.seeds)
            for part in range(self.parts)
        ]  # fmt: skip

    def text(self) -> str:
        return f"{self.machine}, {short(self.workload)}, memory {self.share:g}"


def short(workload: str) -> str:
    """The workload's name without its options and folder."""
    return Path(workload.partition("?")[0]).name


# ---- flags ----


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=300, help="of each run")
    parser.add_argument(
        "--repeats", "--seeds", type=int, default=3, help="runs of each policy: seeds, or parts of a trace"
    )
    parser.add_argument("--machine", choices=MACHINES, action="append", help="only that one")
    parser.add_argument("--shipped", choices=SHIPPED, action="append", help="only that workload of those that ship")
    parser.add_argument("--share", type=float, action="append", help="of memory, instead of the usual three")
    parser.add_argument("--jobs", type=int, help="processes; one per core without it, 0 for none but this one")
    parser.add_argument(
        "--cache", type=Path, default=default_folder(), help="folder of finished runs; else in the user's cache folder"
    )
    parser.add_argument("--fresh", action="store_true", help="simulate also what was finished before")
    parser.add_argument("--json", type=Path)


def parsed(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Exits 2 where a flag's value cannot be."""
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


# ---- places ----


def places_of(options: argparse.Namespace, prefix_caching: bool, data: Path | None = None) -> list[Place]:
    """Configurations are written beside the cached results, since a result belongs to the path of its configuration.

    ``data``: folder with public traces somewhere below it. Exits where it holds none.
    """
    configs = options.cache / "configs"
    configs.mkdir(parents=True, exist_ok=True)
    workloads = [(f"{name}?n={options.requests}&context={CONTEXT_TOKENS}", True) for name in options.shipped or SHIPPED]
    traces = [path for name in TRACES for path in sorted(data.rglob(name))] if data else []
    whole = f"n={options.requests * options.repeats}&context={CONTEXT_TOKENS}&speed={AT_ONCE}"
    workloads += [(f"{path}?{whole}", False) for path in dict.fromkeys(traces)]
    if data and not traces:
        raise SystemExit(f"{data}: holds none of {', '.join(TRACES)}")
    places = []
    for machine, (workload, drawn) in itertools.product(options.machine or MACHINES, workloads):
        config = configs / f"{MACHINES[machine]['_name_or_path']}.json"
        config.write_text(json.dumps(MACHINES[machine]))
        seeds, parts = (options.repeats, 1) if drawn else (1, options.repeats)
        serving = serving_of(machine, prefix_caching)
        for share in options.share or SHARES:
            blocks = kv_blocks_of(workload, options.requests, share, serving)
            places.append(Place(machine, f"{machine}:{config}", workload, share, blocks, seeds, parts, serving))
    return places


def serving_of(machine: str, prefix_caching: bool = True) -> Serving:
    """vLLM's own for the device, but with more host memory, so that it is not what decides."""
    return Serving(host_gib=HOST_GIB, prefix_caching=prefix_caching).on(machine)


def kv_blocks_of(workload: str, requests: int, share: float, serving: Serving) -> int:
    """Of KV memory; the longest request that may come has to fit."""
    lengths = [request.total_tokens for request in open_source(with_seed(workload, 0), workload_digest(workload))]
    tokens = share * min(serving.max_num_seqs, requests) * fmean(lengths) / serving.block_size
    return max(round(tokens), -(-CONTEXT_TOKENS // serving.block_size) + 1)


# ---- runs ----


def simulated(places: Iterable[Place], policies: Sequence[str], options: argparse.Namespace) -> list[Runs]:
    """The runs of every policy in every place. Exits 1 where one fails."""
    places = list(places)
    with bar() as progress:
        run = Run(jobs=options.jobs, cache=options.cache, fresh=options.fresh, progress=progress)
        report = sweep([cell for place in places for policy in policies for cell in place.cells(policy)], run)
    for result in report.failed:
        print(f"failed: {result.text()}", file=sys.stderr)
    if report.failed:
        raise SystemExit(1)
    by_place: dict[tuple[Any, ...], dict[str, list[Result]]] = {}
    for result in report.results:
        inputs = result["inputs"]
        key = inputs["hardware"], inputs["workload"], inputs["kv_blocks"], inputs["serving"]["prefix_caching"]
        by_place.setdefault(key, {}).setdefault(inputs["policy"], []).append(result)
    return [by_place[place.hardware, place.workload, place.kv_blocks, place.serving.prefix_caching] for place in places]
