"""The plugin's own share of a step where one long prefix goes before many short texts, with prompts in host memory.

    python benchmarks/own_time.py [--llm DIR] [--policy SPEC] [--files-gib G] [--hints] [--rounds N] [--texts N]
        [--prefix-tokens N ...] [--clock wall|cpu] [--json FILE]

A real engine of vLLM on this machine, with `--cache cost`: texts of the lengths of tweets behind a prefix that is in
the cache, two output tokens each, so many at the same time. Blocks on the device are few enough that texts of earlier
rounds make room, and are saved. The clock is read whenever a call passes from vLLM to the plugin's scheduler, or to
either side of its connector, and back (`own_time_engine.py`); what a method of the plugin has vLLM's own do is not
counted. Reading the clock is. ``--files-gib`` has files of that size below host memory, ``--hints`` says of every text
that it is sent once and its prefix pinned.

Per length of the prefix: the plugin's time over that of the engine's steps, a mean over rounds with its 95% interval
(Student's); lengths alternate, in an order drawn anew in every round. Then the share by method that vLLM called. The
plugin's background threads are not in it, which write and read files. `--clock cpu` takes the time of the engine's
one thread on the processor in place of the wall's, for a machine on which other work runs.

With ``--json`` rows are added to those that FILE has. Ends with status 1 where a mean is over the bar, 1% of the step.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table
from row_file import RowFile

from kvpolicy.stats import student_interval
from kvpolicy_vllm.bench.engine_process import EngineProcess
from kvpolicy_vllm.bench.live_scenarios import BLOCK_SIZE, made_llm
from kvpolicy_vllm.bench.overload import Arm, Settings

BAR = 0.01
CONTEXT_TOKENS = 2048
MAX_SHOWN = 12
"""Methods in the table."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _arguments(arguments)
    settings = {"bar": BAR, "clock": options.clock, "concurrency": options.concurrency, "blocks": options.blocks}
    try:
        file = RowFile.read(options.json, settings)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    with tempfile.TemporaryDirectory() as scratch:
        made, on_cpu = made_llm(Path(scratch)) if options.llm is None else (options.llm, True)
        runs = measure(str(made), on_cpu, options, Path(scratch) / "files")
    rows = [row_of(tokens, runs[tokens]) for tokens in options.prefix_tokens]
    show(rows)
    of_all = {
        "model": "" if options.llm is None else options.llm.name, "policy": options.policy,
        "files_gib": options.files_gib, "hints": options.hints, "texts": options.texts,
    }  # fmt: skip
    for row in rows:
        file.add(of_all | row)
    return 1 if any(row["share"] > BAR for row in rows) else 0


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--llm", type=Path, help="a model's folder; by default a Llama of 26 million parameters")
    parser.add_argument("--policy", default="always-swap", help="of the server; the cache stores by it, too")
    parser.add_argument("--files-gib", type=float, default=0.0, help="0: no files below host memory")
    parser.add_argument("--hints", action="store_true", help="texts say that they come once, behind a pinned prefix")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--texts", type=int, default=200, help="per round and length of the prefix")
    parser.add_argument("--prefix-tokens", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--concurrency", type=int, default=8, help="requests at the same time")
    parser.add_argument("--blocks", type=int, default=200, help=f"of {BLOCK_SIZE} tokens on the device")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    for name, least in (("rounds", 2), ("texts", 1), ("concurrency", 1)):
        if getattr(options, name) < least:
            parser.error(f"--{name} is {getattr(options, name)}, should be at least {least}")
    longest = CONTEXT_TOKENS - 64
    if not all(1 <= tokens <= longest for tokens in options.prefix_tokens):
        parser.error(f"--prefix-tokens is {options.prefix_tokens}, should be from 1 to {longest} each")
    return options


def measure(llm: str, on_cpu: bool, options: argparse.Namespace, files: Path) -> dict[int, list[dict[str, Any]]]:
    """The runs by length of the prefix, in the order of rounds."""
    settings = Settings(llm, on_cpu, options.blocks, BLOCK_SIZE, CONTEXT_TOKENS, options.concurrency)
    below = (("cache_files", str(files)), ("cache_files_gib", options.files_gib)) if options.files_gib else ()
    arm = Arm("cost", options.policy, extra=(("cache", "cost"), *below))
    rng, lengths = random.Random(options.seed), options.prefix_tokens
    runs: dict[int, list[dict[str, Any]]] = {tokens: [] for tokens in lengths}
    with EngineProcess("own_time_engine") as engine:
        engine.ask({"do": "start", "engine": settings.arguments() | arm.arguments(), "clock": options.clock})
        for round_ in range(options.rounds + 1):
            for tokens in rng.sample(lengths, len(lengths)):
                seed = options.seed * 1000 + round_ * len(lengths) + lengths.index(tokens)
                run = engine.ask(
                    {
                        "do": "serve", "prefix_tokens": tokens, "texts": options.texts, "seed": seed,
                        "hints": options.hints,
                    }
                )  # fmt: skip
                if round_:  # the first one is for whatever happens only once
                    runs[tokens].append(run)
    return runs


def row_of(prefix_tokens: int, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The shares of the plugin's time in that of the steps."""
    mean, low, high = student_interval([sum(run["own_s"].values()) / run["step_s"] for run in runs])
    methods = sorted({method for run in runs for method in run["own_s"]})
    by_method = {method: fmean(run["own_s"].get(method, 0.0) / run["step_s"] for run in runs) for method in methods}
    return {
        "prefix_tokens": prefix_tokens,
        "rounds": len(runs),
        "share": mean,
        "low": low,
        "high": high,
        "own_us": 1e6 * fmean(sum(run["own_s"].values()) / run["steps"] for run in runs),
        "step_us": 1e6 * fmean(run["step_s"] / run["steps"] for run in runs),
        "by_method": dict(sorted(by_method.items(), key=lambda one: -one[1])),
    }


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    table = Table("prefix", "plugin's share of a step", "95% interval", "us a step", "of a step of, us", "rounds")
    for row in rows:
        table.add_row(
            str(row["prefix_tokens"]), f"{row['share']:.2%}", f"{row['low']:.2%} to {row['high']:.2%}",
            f"{row['own_us']:.0f}", f"{row['step_us']:.0f}", str(row["rounds"]),
        )  # fmt: skip
    console = Console(width=120)
    console.print(table)
    methods = Table("method", *(f"prefix {row['prefix_tokens']}" for row in rows))
    for method in list(rows[0]["by_method"])[:MAX_SHOWN]:
        methods.add_row(method, *(f"{row['by_method'].get(method, 0.0):.3%}" for row in rows))
    console.print(methods)
    over = [f"prefix {row['prefix_tokens']}: over the bar of {BAR:.0%}" for row in rows if row["share"] > BAR]
    console.print("\n".join(over) or "the bar is met")


if __name__ == "__main__":
    sys.exit(main())
