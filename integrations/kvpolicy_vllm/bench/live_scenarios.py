"""What live comparisons with unmodified vLLM share: a small model, its server, requests, and figures of a run.

The demo and `benchmarks/live_*.py` call it. Importing this loads no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate
from pathlib import Path
from statistics import fmean

from kvpolicy.stats import quantile
from kvpolicy.workload import Workload
from kvpolicy.workload.near_capacity import BATCH, URGENT, middle_rate
from kvpolicy_vllm.bench.engine_process import EngineProcess
from kvpolicy_vllm.bench.exactness import Comparison, compare
from kvpolicy_vllm.bench.overload import STOCK, Arms, Run

SHAPE = {"hidden": 1024, "intermediate": 2560, "layers": 2, "heads": 16, "kv_heads": 8, "spread": 0.1}
"""26 million parameters. Wide and flat, so that the fixed cost of a step in Python does not hide that of its tokens."""
BLOCK_SIZE = 32
HOST_GIB = 2.0
STEADY = (0.25, 0.75)
"""Shares of the batch's tokens between which its rate is taken."""
ONE_CLASS, TWO_CLASSES = "one", "two"

Figure = Callable[[Run], float]


def made_llm(out: Path, seed: int = 0, shape: Mapping[str, object] = SHAPE) -> tuple[Path, bool]:
    """The model, made from the seed in ``out``/llm, and whether engines run on the CPU."""
    with EngineProcess("kvpolicy_vllm.bench.inspect_model", out / "logs" / "preparing.log") as process:
        answer = process.ask({"llm": None, "make": str(out / "llm"), "seed": seed, "shape": dict(shape)})
    return Path(answer["llm"]), not answer["device"]


def capacity_of(run: Run) -> float:
    """Requests per second that finish in the middle half of a run in which all were there at once. Lengths differ much
    between workloads, so each has its own."""
    return middle_rate(e2e_s(run, number) for number in range(len(run.tokens)))


def compared(arms: Arms, workload: Workload, reference: Run, other: Run) -> Comparison:
    """Where tokens differ, unmodified vLLM serves the workload once more, for how near the best token's rival was."""
    if reference.tokens == other.tokens:
        return Comparison(reference.output_tokens)
    gaps = arms.serve(STOCK, workload, -1, gaps=True).gaps
    return compare(reference.tokens, gaps, other.tokens, f"seed {workload.seed}, {other.arm}")


# ---- figures of a run ----


def e2e_s(run: Run, number: int) -> float:
    """Seconds from the arrival of request ``number`` to its last token."""
    return run.ttft_s[number] + sum(run.itl_s[number])


def of_class(run: Run, name: str) -> list[int]:
    """Numbers of the requests of that class."""
    return [number for number, request in enumerate(run.requests) if request.class_name == name]


def urgent_ttft_p99(run: Run) -> float:
    return quantile([run.ttft_s[number] for number in of_class(run, URGENT)], 0.99)


def batch_tok_s(run: Run) -> float:
    """Between the times at which a quarter and three quarters of the batch's tokens were out."""
    times = sorted(
        at_s
        for number in of_class(run, BATCH)
        for at_s in accumulate(run.itl_s[number], initial=run.arrival_s[number] + run.ttft_s[number])
    )
    low, high = (round(share * (len(times) - 1)) for share in STEADY)
    return (high - low) / (times[high] - times[low])


FIGURES: Mapping[str, Mapping[str, Figure]] = {
    ONE_CLASS: {
        "e2e per token": lambda run: fmean(e2e_s(run, n) / len(tokens) for n, tokens in enumerate(run.tokens)),
        "e2e": lambda run: fmean(e2e_s(run, number) for number in range(len(run.tokens))),
        "e2e p99": lambda run: quantile([e2e_s(run, number) for number in range(len(run.tokens))], 0.99),
        "TTFT": lambda run: fmean(run.ttft_s),
        "tok/s": lambda run: run.throughput_tok_s,
        "CPU time": lambda run: run.cpu_s,
    },
    TWO_CLASSES: {
        "urgent TTFT p99": urgent_ttft_p99,
        "urgent TTFT": lambda run: fmean(run.ttft_s[number] for number in of_class(run, URGENT)),
        "batch tok/s": batch_tok_s,
        "batch e2e": lambda run: fmean(e2e_s(run, number) for number in of_class(run, BATCH)),
        "CPU time": lambda run: run.cpu_s,
    },
}
