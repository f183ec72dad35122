"""Steps of two GPUs with communication from a published table of all-reduces, against published times of a server.

Splitwise (Patel et al., ISCA 2024; Mutinifni/splitwise-sim, data/perf_model.csv) measured Llama-2-70B on two A100s of
80 GB: the time of prompts, and the time per token. Here the same steps are put together from others' tables, with
nothing fitted: Vidur's linear operators and all-reduces, AIConfigurator's attention and matrix products. The bar of 10%
is on the mean of the absolute errors over prompts and over tokens, of one request and of all batches.

    python benchmarks/published_two_gpus.py --profiles DATA/profiles
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow.csv
from published_lines import Line, Statement, show, status, write
from rich.console import Console

import kvpolicy
from kvpolicy.arrays import causal_pairs
from kvpolicy.errors import InputError, KVPolicyError
from kvpolicy.shape import ModelShape
from kvpolicy.simulator.base import StepLoad
from kvpolicy.simulator.hardware.table_times import TableTimes

LLAMA_2_70B = {
    "model_type": "llama", "num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64,
    "num_key_value_heads": 8, "intermediate_size": 28672, "vocab_size": 32000, "torch_dtype": "float16",
    "tie_word_embeddings": False,
}  # fmt: skip
RANKS = 2
TABLES = (
    "vidur_linear_ops_a100.csv.gz", "aiconf_a100_sxm_vllm0.14.0_context_attention_perf.parquet",
    "aiconf_a100_sxm_vllm0.14.0_generation_attention_perf.parquet", "aiconf_a100_sxm_vllm0.14.0_gemm_perf.parquet",
)  # fmt: skip
ALL_REDUCES = {"dgx": "vidur_network_a100_dgx_all_reduce.csv.gz",
               "pairs": "vidur_network_a100_pairwise_nvlink_all_reduce.csv.gz"}  # fmt: skip
BAR = 0.1
LEAST_S_PER_TOKEN = 1e-4
"""A prompt that took less per token was not computed: Llama-2-70B needs 0.22 ms a token of two A100s at their peak."""
Case = tuple[int, int, int]
"""Prompt tokens, requests, output tokens."""


def measured(file: Path) -> dict[Case, tuple[float, float]]:
    """Mean seconds of a prompt phase and of a token, by case. Raises InputError where they are not there."""
    try:
        table = pyarrow.csv.read_csv(file).to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise InputError(f"{file}: not a table in CSV: {error}") from error
    times: dict[Case, list[tuple[float, float]]] = {}
    for row in table:
        if (row.get("model"), row.get("hardware"), row.get("tensor_parallel")) == ("llama2-70b", "a100-80gb", RANKS):
            case = (row["prompt_size"], row["batch_size"], row["token_size"])
            times.setdefault(case, []).append((1e-3 * row["prompt_time"], 1e-3 * row["token_time"]))
    if not times:
        raise InputError(f"{file}: no rows of llama2-70b on {RANKS} a100-80gb")
    return {case: (float(np.mean(rows, 0)[0]), float(np.mean(rows, 0)[1])) for case, rows in sorted(times.items())}


def simulated(times: TableTimes, case: Case) -> tuple[float, float]:
    """Seconds of the prompts as one step, and of a step half-way through the outputs."""
    prompt, requests, output = case
    pairs = int(requests * causal_pairs(0, prompt))
    context = int(requests * (prompt + output / 2))
    return (
        times.step_s(StepLoad(requests * prompt, 0, 0, pairs, requests, 0)),
        times.step_s(StepLoad(requests, requests, context, 0, 0, 0)),
    )


def lines_of(times: TableTimes, cases: dict[Case, tuple[float, float]], title: str) -> Iterator[Line]:
    """Each case's prompt and token, without those prompts that cannot have been computed."""
    for case, published in cases.items():
        prompt, requests, output = case
        for name, was, ours in zip(("prompt", "token"), published, simulated(times, case), strict=True):
            if name == "prompt" and was < LEAST_S_PER_TOKEN * prompt * requests:
                continue
            yield Line(f"{title}, {name} of {requests} x {prompt} + {output}, ms", 1e3 * was, 1e3 * ours)


def statements_of(lines: Sequence[Line], title: str) -> Iterator[Statement]:
    for kind in ("prompt", "token"):
        for who in ("one request", "batches"):
            chosen = [line for line in lines if f", {kind} of" in line.name]
            chosen = [line for line in chosen if (f"{kind} of 1 x" in line.name) == (who == "one request")]
            errors = np.array([line.error for line in chosen])
            text = f"{title}: {kind} of {who} within {BAR:.0%} on average"
            figures = (
                f"{np.abs(errors).mean():.1%}, signed {errors.mean():+.1%}, {(np.abs(errors) <= BAR).sum()} of "
                f"{len(errors)} cases within {BAR:.0%}"
            )
            yield Statement(text, bool(np.abs(errors).mean() <= BAR), figures)


def judged(profiles: Path, all_reduce: str | None) -> tuple[list[Line], list[Statement]]:
    """Lines and statements with this table of all-reduces, or without communication."""
    shape = ModelShape.from_config(LLAMA_2_70B)
    tables = [profiles / name for name in TABLES]
    communication = None if all_reduce is None else profiles / ALL_REDUCES[all_reduce]
    with tempfile.TemporaryDirectory() as folder:
        model = kvpolicy.import_profile(tables, Path(folder), shape, RANKS, all_reduce=communication).model
    title = f"all-reduces of {all_reduce}" if all_reduce else "without communication"
    lines = list(lines_of(TableTimes(model), measured(profiles / "splitwise_perf_a100.csv.gz"), title))
    return lines, list(statements_of(lines, title))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profiles", type=Path, required=True, help="folder with the tables")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    console = Console(width=140)
    try:
        others = [judged(options.profiles, all_reduce) for all_reduce in (None, "pairs")]
        for unjudged in others:
            show("Two A100s", *unjudged, console)
        # Splitwise's machines have eight GPUs on NVSwitch: "dgx" is the table that has to meet the bar.
        lines, statements = judged(options.profiles, "dgx")
    except (KVPolicyError, OSError) as error:
        parser.exit(2, f"published_two_gpus.py: error: {error}\n")
    show("Two A100s", lines, statements, console)
    if options.json:
        compared = [asdict(statement) for _, said in others for statement in said]
        write(options.json, lines, statements, {"without a bar": compared})
    return status(lines, statements)


if __name__ == "__main__":
    sys.exit(main())
