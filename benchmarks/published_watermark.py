"""The table of watermarks in vLLM's pull request 44594, simulated with nothing but what the request says.

    python benchmarks/published_watermark.py [--seeds N] [--json FILE]

Published (https://github.com/vllm-project/vllm/pull/44594, njhill, 2026-06-05): Qwen2.5-7B-Instruct on one GB200, KV
cache of 16 GiB (299,584 tokens), prefix caching off, ``--max-model-len 8192``, ``--max-num-seqs 256``; 450 random
prompts of 1000 tokens +- 20% with outputs of 5000 +- 20%, 128 at a time. Simulated: the built-in simulator, step times
from the data sheet of a GB200 (peak rates and the shares of them that kvpolicy assumes everywhere). No number here was
fitted to the table. Lengths are drawn from a seed, as the published ones are not known: means over seeds.

Exits 1 where a bar is missed. The bars were set before the first run: preemptions within 25% of each row, output
tokens/s relative to no watermark within 3%, and the shape of the table in words. Figures without a bar are for reading.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from published_lines import Line, Statement, show, status, write
from rich.console import Console

from kvpolicy.cost.analytic import untrained
from kvpolicy.hardware.engine_spec import EngineSpec
from kvpolicy.hardware.sheets import DeviceSheet
from kvpolicy.policy import load as load_policy
from kvpolicy.shape import ModelShape
from kvpolicy.simulator import Server
from kvpolicy.simulator.base import Summary
from kvpolicy.simulator.builtin import Builtin
from kvpolicy.simulator.hardware.law_times import LawTimes, law_times
from kvpolicy.workload import Request, Workload
from kvpolicy.workload.classes import Looped

GB200 = DeviceSheet(
    "GB200", ("NVIDIA GB200",), bf16_flops=2.5e15, fp8_flops=5e15, int8_ops=5e15, memory_bytes=186e9,
    memory_bytes_per_s=8e12, link="nvlink-c2c",
    source="NVIDIA GB200 NVL72 Datasheet, a 72nd; its figures with sparsity (5, 10, 10 x 10^15) halved",
)  # fmt: skip
QWEN = {
    "model_type": "qwen2", "num_hidden_layers": 28, "hidden_size": 3584, "num_attention_heads": 28,
    "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064, "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}  # fmt: skip
"""Qwen2.5-7B-Instruct's config.json."""
BLOCK_SIZE = 16
KV_TOKENS = 299_584
TOKEN_BUDGET = 16384
"""vLLM's default on a device of 160 GiB or more."""
REQUESTS, CONCURRENCY = 450, 128
PROMPT, OUTPUT, RANGE = 1000, 5000, 0.2


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the published table; seconds, ITL in milliseconds. None: not in what could be read."""

    watermark: float
    preemptions: int
    output_tok_s: float
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    itl_p99_ms: float | None
    e2e_p50_s: float | None


PUBLISHED = (
    Row(0.0, 1065, 11582, 6.56, 25.51, 40.62, 51.6),
    Row(0.02, 400, 12134, 11.80, 26.49, 18.80, 48.4),
    Row(0.05, 187, 12167, 11.20, 28.94, 17.70, 47.9),
    Row(0.10, 168, 11835, 8.96, 31.02, 17.57, 48.6),
    Row(0.15, 168, 11635, None, None, None, None),
)
PREEMPTIONS_BAR, RELATIVE_BAR = 0.25, 0.03


def lengths(seed: int) -> Looped:
    """``vllm bench serve --dataset-name random --random-range-ratio 0.2 --max-concurrency 128``, from a seed."""
    rng = random.Random(seed)

    def drawn(mean: int) -> int:
        return rng.randint(round(mean * (1 - RANGE)), round(mean * (1 + RANGE)))

    requests = tuple(Request(0.0, drawn(PROMPT), drawn(OUTPUT)) for _ in range(REQUESTS))
    return Looped(Workload("random", requests, seed), CONCURRENCY)


def gb200_times() -> tuple[LawTimes, int]:
    """Times of the data sheet, and the bytes of a KV block."""
    shape = ModelShape.from_config(QWEN)
    block_bytes = int(shape.kv_bytes_per_token * BLOCK_SIZE)
    engine = EngineSpec(BLOCK_SIZE, TOKEN_BUDGET, block_bytes=block_bytes)
    return law_times(untrained(shape, GB200, engine=engine)), block_bytes


def server_of(watermark: float, block_bytes: int) -> Server:
    return Server(
        BLOCK_SIZE,
        block_bytes,
        device_blocks=KV_TOKENS // BLOCK_SIZE - 1,
        host_blocks=0,
        token_budget=TOKEN_BUDGET,
        max_running=256,
        max_model_len=8192,
        prefix_caching=False,
        watermark=watermark,
        asynchronous=True,
    )


def simulated(watermark: float, seeds: int) -> list[Summary]:
    times, block_bytes = gb200_times()
    policy, server = load_policy("always-recompute"), server_of(watermark, block_bytes)
    return [Builtin().run(lengths(seed), policy, server, times).summary for seed in range(seeds)]


def _line(name: str, published: float, values: Sequence[float], bar: float | None = None) -> Line:
    return Line(name, published, fmean(values), bar, (min(values), max(values)))


def compared(runs: Sequence[Sequence[Summary]]) -> tuple[list[Line], list[Statement]]:
    """``runs``: those of each published row, over seeds."""
    preempted = [[float(sum(run.preemptions.values())) for run in row] for row in runs]
    rates = [[run.throughput_tok_s for run in row] for row in runs]
    relative = [[rate / base for rate, base in zip(row, rates[0], strict=True)] for row in rates]
    lines = []
    for number, (published, row) in enumerate(zip(PUBLISHED, runs, strict=True)):
        mark = f"watermark {published.watermark:g}"
        lines.append(_line(f"{mark}: preemptions", published.preemptions, preempted[number], PREEMPTIONS_BAR))
        if number:
            over = published.output_tok_s / PUBLISHED[0].output_tok_s
            lines.append(_line(f"{mark}: output tok/s over none's", over, relative[number], RELATIVE_BAR))
        lines.append(_line(f"{mark}: output tok/s", published.output_tok_s, rates[number]))
        read = (
            ("TTFT p50, s", published.ttft_p50_s, [run.ttft_s.p50 for run in row]),
            ("TTFT p99, s", published.ttft_p99_s, [run.ttft_s.p99 for run in row]),
            ("ITL p99, ms", published.itl_p99_ms, [run.itl_s.p99 * 1e3 for run in row]),
            ("E2EL p50, s", published.e2e_p50_s, [run.e2e_s.p50 for run in row]),
        )
        lines += [_line(f"{mark}: {name}", value, values) for name, value, values in read if value is not None]
    return lines, _statements([fmean(row) for row in preempted], [fmean(row) for row in rates], runs)


def _statements(
    preempted: Sequence[float], rates: Sequence[float], runs: Sequence[Sequence[Summary]]
) -> list[Statement]:
    best = PUBLISHED[rates.index(max(rates))].watermark
    tails = [fmean(run.itl_s.p99 * 1e3 for run in row) for row in runs]
    falls = all(later <= earlier for earlier, later in pairwise(preempted))
    return [
        Statement("preemptions fall, or stay, as the watermark grows", falls, _numbers(preempted)),
        Statement("the highest output rate is at a watermark of 0.05", best == 0.05, f"at {best:g}: {_numbers(rates)}"),
        Statement("with 0.05, the p99 between tokens is half of that without, or less", tails[2] <= tails[0] / 2,
                  f"ms: {_numbers(tails)}"),
    ]  # fmt: skip


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.5g}" for value in values)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="draws of the lengths")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    if options.seeds < 1:
        parser.error(f"--seeds is {options.seeds}, should be 1 or more")
    lines, statements = compared([simulated(row.watermark, options.seeds) for row in PUBLISHED])
    show(f"vllm#44594, {options.seeds} draws of the lengths", lines, statements, Console(width=140))
    if options.json:
        write(options.json, lines, statements)
    return status(lines, statements)


if __name__ == "__main__":
    sys.exit(main())
