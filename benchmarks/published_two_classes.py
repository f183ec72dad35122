"""The shape of ConServe's result: interactive and batch requests on one engine, simulated with vLLM's own priorities
and with an order that displaces.

    python benchmarks/published_two_classes.py --data DIR [--seconds S] [--speeds X...] [--json FILE]

Published (Qiao et al., "ConServe: Fine-Grained GPU Harvesting for LLM Online and Offline Co-Serving", arXiv:2410.01228,
ICML 2026; abstract): on H100s, with Llama-3.1 and Qwen-2.5, 2.2 times the throughput and a tail latency of online
requests 2.9 times lower than state-of-the-art systems, on average. Their workload is not published with the abstract.

Simulated: Llama-3.1-8B on an H100 by its data sheet. Online: Azure's conversations with their own arrival times
(``traces/azure2023_conv_0-1800s.csv.gz`` of DIR), of priority -1, at several speeds. Offline: the lengths of arXiv
summaries (``lengths/arxiv_summarization_llama2tok_even_rows.csv.gz``), all there from the beginning, as many as keep
the engine busy beyond the last online arrival. Every arm gets the same requests. Nothing was fitted to the published
figures. The bars are below them on purpose, as neither workload nor system is ConServe's: what differs is in
docs/published-results.md. Exits 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from published_lines import Line, Statement, show, status, write
from recorded_engine import CONFIGS
from rich.console import Console

import kvpolicy
from kvpolicy.cost.analytic import untrained
from kvpolicy.hardware.engine_spec import EngineSpec
from kvpolicy.hardware.sheets import device_sheet
from kvpolicy.order.spec import load as load_order
from kvpolicy.policy import Policy
from kvpolicy.policy import load as load_policy
from kvpolicy.policy.cheapest import Cheapest
from kvpolicy.shape import ModelShape
from kvpolicy.simulator import Server
from kvpolicy.simulator.builtin import Builtin
from kvpolicy.simulator.hardware.law_times import law_times
from kvpolicy.simulator.sinks import MemorySink
from kvpolicy.workload import Workload, open_workload

BLOCK_SIZE, DEVICE_BLOCKS, TOKEN_BUDGET, MAX_RUNNING = 16, 26_000, 8192, 1024
"""54.5 GB of KV, as in docs/orders.md; vLLM's defaults for a server on an H100."""
HOST_GIB = 128
ONLINE, OFFLINE = "online", "offline"
PUBLISHED_TAIL, PUBLISHED_THROUGHPUT = 2.9, 2.2
TAIL_BAR, BATCH_BAR, ALONE_BAR = 2.0, 0.95, 1.5
"""The tail against the best watermark under vLLM's priorities; the batch's tokens/s against the same; all tokens/s
against the online requests alone. Set before the first run."""
WATERMARKS = (0.0, 0.01, 0.05)
OFFLINE_PER_S = 12.0
"""More than any arm serves; those that are left when the window ends are not counted."""


@dataclass(frozen=True, slots=True)
class Arm:
    name: str
    scheduling: str = "fcfs"
    order: str = "fcfs"
    swaps: bool = False
    watermark: float = 0.0
    offline: bool = True


ALONE = Arm("online alone", offline=False)
PRIORITY = tuple(
    Arm(f"vLLM's priorities{f', watermark {mark:g}' if mark else ''}", "priority", watermark=mark)
    for mark in WATERMARKS
)
OURS = Arm("urgent, learned", order="urgent", swaps=True)
ARMS = (ALONE, Arm("first come, first served"), *PRIORITY, Arm("urgent, recompute", order="urgent"), OURS)


@dataclass(frozen=True, slots=True)
class Served:
    """Of the window in which online requests arrive."""

    arm: Arm
    ttft_p50_s: float
    ttft_p99_s: float
    itl_p99_s: float
    online_tok_s: float
    offline_tok_s: float
    """Prompt and output tokens of requests that ended in the window, per second."""
    preemptions: int

    @property
    def tok_s(self) -> float:
        return self.online_tok_s + self.offline_tok_s


def requests_of(data: Path, seconds: float, speed: float, offline: bool) -> Workload:
    trace = data / "traces" / "azure2023_conv_0-1800s.csv.gz"
    # The options are applied in the order window, speed.
    online = f"arrivals:{trace}?window=0-{seconds * speed:g}&speed={speed:g}&class={ONLINE}&priority=-1"
    if not offline:
        return Workload("online", tuple(open_workload(online)), 0)
    lengths = data / "lengths" / "arxiv_summarization_llama2tok_even_rows.csv.gz"
    batch = f"lengths:{lengths}?n={int(OFFLINE_PER_S * seconds)}&class={OFFLINE}"
    return Workload("online and offline", tuple(open_workload(f"{online} + {batch}")), 0)


def serve(arm: Arm, workload: Workload, seconds: float) -> Served:
    shape = ModelShape.from_config(CONFIGS["meta-llama/Llama-3.1-8B"])
    block_bytes = int(shape.kv_bytes_per_token * BLOCK_SIZE)
    spec = EngineSpec(BLOCK_SIZE, TOKEN_BUDGET, block_bytes=block_bytes)
    model = untrained(shape, device_sheet("H100-SXM"), engine=spec)
    policy: Policy = Cheapest("learned", model) if arm.swaps else load_policy("always-recompute")
    server = Server(
        BLOCK_SIZE, block_bytes, DEVICE_BLOCKS, HOST_GIB * 2**30 // block_bytes, TOKEN_BUDGET, MAX_RUNNING,
        scheduling="priority" if arm.scheduling == "priority" else "fcfs", watermark=arm.watermark, asynchronous=True,
        order=load_order(arm.order),
    )  # fmt: skip
    run = Builtin().run(workload, policy, server, law_times(model), sink=MemorySink())
    assert run.trace is not None
    tokens = {ONLINE: 0.0, OFFLINE: 0.0}
    waits = []
    for row in run.trace.rows("requests"):
        if row["last_token_s"] <= seconds:
            tokens[row["class"]] += row["prompt_tokens"] + row["output_tokens"]
        if row["class"] == ONLINE:
            waits.append(row["first_token_s"] - row["arrival_s"])
    return Served(
        arm,
        float(np.median(waits)),
        float(np.quantile(waits, 0.99)),
        run.summary.classes[ONLINE].itl_s.p99,
        tokens[ONLINE] / seconds,
        tokens[OFFLINE] / seconds,
        sum(run.summary.preemptions.values()),
    )


def compared(speed: float, served: Sequence[Served]) -> tuple[list[Line], list[Statement]]:
    by_name = {one.arm.name: one for one in served}
    alone, ours = by_name[ALONE.name], by_name[OURS.name]
    best = min((by_name[arm.name] for arm in PRIORITY), key=lambda one: one.ttft_p99_s)
    tail, batch = best.ttft_p99_s / ours.ttft_p99_s, ours.offline_tok_s / best.offline_tok_s
    more = ours.tok_s / alone.tok_s
    at = f"online x {speed:g}"
    lines = [
        Line(f"{at}: TTFT p99 of {best.arm.name} over ours", PUBLISHED_TAIL, tail),
        Line(f"{at}: all tokens/s over online alone", PUBLISHED_THROUGHPUT, more),
    ]
    statements = [
        Statement(f"{at}: online TTFT p99 is {TAIL_BAR:g} times lower than under {best.arm.name}, or more",
                  tail >= TAIL_BAR, f"{best.ttft_p99_s:.3f} s and {ours.ttft_p99_s:.3f} s: {tail:.2f} times"),
        Statement(f"{at}: the batch keeps {BATCH_BAR:.0%} of its tokens/s there", batch >= BATCH_BAR, f"{batch:.3f}"),
        Statement(f"{at}: {ALONE_BAR:g} times the tokens/s of the online requests alone, or more",
                  more >= ALONE_BAR, f"{more:.2f} times"),
    ]  # fmt: skip
    return lines, statements


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--seconds", type=float, default=300.0, metavar="S", help="of online arrivals")
    parser.add_argument("--speeds", type=float, nargs="+", default=[1.0, 2.0, 3.0], metavar="X")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    console = Console(width=150)
    lines: list[Line] = []
    statements: list[Statement] = []
    rows: list[dict[str, Any]] = []
    for speed in options.speeds:
        try:
            loads = {beside: requests_of(options.data, options.seconds, speed, beside) for beside in (False, True)}
        except (kvpolicy.KVPolicyError, OSError) as error:
            parser.exit(2, f"published_two_classes.py: error: {error}\n")
        served = [serve(arm, loads[arm.offline], options.seconds) for arm in ARMS]
        console.print(f"\nonline x {speed:g}: {len(loads[False])} online requests in {options.seconds:g} s")
        rows += [{"speed": speed} | asdict(one) | {"arm": one.arm.name} for one in served]
        for one in served:
            console.print(
                f"  {one.arm.name:34} online TTFT p50 {one.ttft_p50_s:7.3f} s, p99 {one.ttft_p99_s:8.3f} s, between "
                f"tokens p99 {one.itl_p99_s * 1e3:5.0f} ms; tokens/s online {one.online_tok_s:6.0f}, offline "
                f"{one.offline_tok_s:6.0f}; {one.preemptions} preempted"
            )
        more_lines, more_statements = compared(speed, served)
        lines += more_lines
        statements += more_statements
    show("ConServe's two classes (published: averages over their workloads)", lines, statements, console)
    if options.json:
        write(options.json, lines, statements, {"served": rows})
    return status(lines, statements)


if __name__ == "__main__":
    sys.exit(main())
