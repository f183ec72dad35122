"""What the plugin costs where nothing is preempted: one engine, with the plugin and with it taken out, in turn.

    python benchmarks/plugin_overhead.py [--llm DIR] [--pairs N] [--json FILE]

For 1, 8 and 32 running requests that all fit into memory: time with over time without as a geometric mean over
alternating pairs with its 95% interval (bootstrap over pairs), and the difference per engine step. On a small model a
step takes a few milliseconds, so the ratio is an upper bound for a real one; the microseconds carry over.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvpolicy.stats import bootstrap_ratio
from kvpolicy.workload import Request, Workload
from kvpolicy_vllm.bench.engine_process import EngineProcess
from kvpolicy_vllm.bench.overload import Arm, Arms, Settings
from kvpolicy_vllm.bench.progress import Bar

WITHOUT, WITH = Arm("without", None), Arm("with", "always-recompute")
PROMPT_TOKENS, OUTPUT_TOKENS = 64, 200
BATCHES = (1, 8, 32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--llm", type=Path, help="a model's folder; by default a small Llama made from a seed")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.pairs < 2:
        parser.error(f"--pairs is {options.pairs}, should be at least 2")
    with tempfile.TemporaryDirectory() as scratch:
        with EngineProcess("kvpolicy_vllm.bench.inspect_model") as process:
            job = {"llm": options.llm and str(options.llm), "make": f"{scratch}/llm", "seed": 0, "shape": {}}
            answer = process.ask(job)
        rows = measure(answer["llm"], not answer["device"], options.pairs, options.seed)
    show(rows)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


def measure(llm: str, on_cpu: bool, pairs: int, seed: int) -> list[dict[str, float]]:
    rng = random.Random(seed)
    settings = Settings(llm, on_cpu, device_blocks=600, context_tokens=512)
    rows = []
    with Arms(settings) as arms, Bar("pairs") as bar:
        arms.start(WITHOUT, WITH)
        for batch in BATCHES:
            work = Workload("alike", (Request(0.0, PROMPT_TOKENS, OUTPUT_TOKENS),) * batch, seed)
            times_by_arm: dict[str, list[float]] = {WITHOUT.name: [], WITH.name: []}
            for arm in times_by_arm:
                arms.serve(arm, work, -1)  # whatever happens only once
            for pair in range(pairs):
                for arm in rng.sample(list(times_by_arm), 2):
                    times_by_arm[arm].append(arms.serve(arm, work, pair, progress=bar.tell).makespan_s)
            rows.append(_row(batch, times_by_arm, rng))
    return rows


def _row(batch: int, times_by_arm: dict[str, list[float]], rng: random.Random) -> dict[str, float]:
    ratio = bootstrap_ratio(times_by_arm[WITH.name], times_by_arm[WITHOUT.name], rng)
    apart = [(a - b) / OUTPUT_TOKENS for a, b in zip(times_by_arm[WITH.name], times_by_arm[WITHOUT.name], strict=True)]
    return {
        "running_requests": batch,
        "ratio": ratio.value,
        "low": ratio.low,
        "high": ratio.high,
        "median_us_per_step": statistics.median(apart) * 1e6,
        "step_us_without": statistics.median(times_by_arm[WITHOUT.name]) / OUTPUT_TOKENS * 1e6,
    }


def show(rows: list[dict[str, float]]) -> None:
    table = Table("running requests", "with / without", "95% interval", "us per step more", "of a step of, us")
    for row in rows:
        table.add_row(
            f"{row['running_requests']:.0f}", f"{row['ratio']:.4f}", f"{row['low']:.4f} to {row['high']:.4f}",
            f"{row['median_us_per_step']:+.0f}", f"{row['step_us_without']:.0f}",
        )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
