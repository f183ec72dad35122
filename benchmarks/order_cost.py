"""What an order of service costs a step in which nobody is displaced, on vLLM's own scheduler: no engine, no model.

    python benchmarks/order_cost.py [--running N ...] [--orders SPEC ...] [--rounds N] [--cpu N] [--json FILE]

Requests that all run and decode one token in every step, in memory that they fill, and one more that

- alone: is not there, or
- outranked: waits, does not fit, and goes after all others, or
- in vain: goes before all others and does not fit whoever is displaced for it, or
- not ready: goes before all others and waits for a grammar, as others do for an adapter's slot or for further input, or
- in prefill: goes before all others and runs, and each step computes a short part of its prompt, so that the plugin
  puts those that decode first, and all back in the order of service afterwards.

Printed is the thread's time in the plugin's functions, microseconds a step: a mean over a round's steps, as ranks are
renewed and room is looked for in few of them, less the same of the order `fcfs` in the same situation; the least over
rounds, with the median. Beside it opcodes per step, and those of the built-in simulator, with and without leaps, on as
many requests of which nobody waits.

Ends with status 1 where the least is over the bar: 50 us at 300 running requests.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from time import perf_counter, thread_time_ns
from typing import Any

from rich.console import Console
from rich.table import Table
from scheduler_alone import BLOCK, make_scheduler
from step_cost import Bench, Clocks, counted
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.request import Request, RequestStatus

from kvpolicy import policy
from kvpolicy.order import load
from kvpolicy.simulator import Builtin, Server
from kvpolicy.simulator.hardware.law_times import ConstantTimes
from kvpolicy.workload import Request as WorkloadRequest
from kvpolicy.workload import Workload
from kvpolicy_vllm.plugin.settings import SCHEDULER, transfer_config

BAR_US = {300: 50.0}
RUNNING = (64, 300, 512)
SITUATIONS = ("alone", "outranked", "in vain", "not ready", "in prefill")
ALONE, OUTRANKED, IN_VAIN, NOT_READY, IN_PREFILL = SITUATIONS
ORDERS: dict[str, str] = {
    "urgent": "urgent",
    "mlfq:base=32": "mlfq:base=4096",
    "las:quantum=32": "las:quantum=4096",
    "srpt:limit": "srpt:limit",
    "gittins:quantum=32": "gittins:quantum=4096",
    "deadline:ttft=1,tpot=1": "deadline:ttft=1,tpot=0.001",
}
"""Each beside the one under which who has just come goes after those that run."""
PROMPT_TOKENS, LONG_PROMPT_TOKENS, CONTEXT = 24, 3900, 4096
WARM_STEPS = 40
STEPS = 64
"""Of a round: four times the longest distance between two looks."""
COUNTED_STEPS = 64
MAX_ROUNDS = 32
"""A prompt in prefill has a token or more for each of their steps."""
TIMES = ConstantTimes(2e-3, (1e-5, 2e-6, 1e-7, 1e-9, 1e-4, 1e-8), 1e-4, 2e9, 1e-6)


class ThreadClocks(Clocks):
    """Of the thread's own time: what else the machine does meanwhile is not in it, which a mean would show."""

    now_ns = staticmethod(thread_time_ns)


class Ordered(Bench):
    """One scheduler with ``running`` requests that decode, served by ``order``, in a situation. Before each step as
    many blocks are left free as it takes."""

    def __init__(self, running: int, steps: int, order: str, situation: str) -> None:
        self.running, self.situation = running, situation
        self._connected = True
        self._taken: list[Any] = []
        blocks = running * ((PROMPT_TOKENS + BLOCK + steps + WARM_STEPS) // BLOCK + 2) + 2 * CONTEXT // BLOCK
        settings = {"policy": "always-recompute", "order": order, "host_gib": 0.25}
        # Of a prompt in prefill a part is left for every step.
        chunks = {"long_prefill_token_threshold": LONG_PROMPT_TOKENS // (steps + 1)} if situation == IN_PREFILL else {}
        self.scheduler = make_scheduler(
            CONTEXT, blocks, running + 8, max(8192, running * 64), log_stats=True, scheduler_cls=SCHEDULER,
            kv_transfer_config=transfer_config(settings), **chunks,
        )  # fmt: skip
        for number in range(running):
            prompt = PROMPT_TOKENS + number % BLOCK
            self._add(number, prompt, CONTEXT - prompt - 1, 0 if situation == OUTRANKED else 1)
        for _ in range(WARM_STEPS):
            super().step()
        if situation != ALONE:
            last = situation == OUTRANKED
            self._add(running, LONG_PROMPT_TOKENS, CONTEXT - LONG_PROMPT_TOKENS - 1 if last else 8, 2 if last else 0)
        if situation == IN_PREFILL:
            super().step()  # while all of its prompt fits
            self.running += 1

    def _add(self, number: int, prompt: int, outputs: int, priority: int) -> None:
        waits = self.situation == NOT_READY and number == self.running
        more: dict[str, Any] = {"structured_outputs": StructuredOutputsParams(choice=["yes", "no"])} if waits else {}
        parameters = SamplingParams(temperature=0.0, max_tokens=outputs, ignore_eos=True, **more)
        request = Request(f"r{number:08d}", [7] * prompt, parameters, None, perf_counter(), priority=priority)
        self.scheduler.add_request(request)
        assert not waits or request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR

    def step(self) -> int:
        pool = self.scheduler.kv_cache_manager.block_pool
        growth = sum(request.num_computed_tokens % BLOCK == 0 for request in self.scheduler.running)
        spare = pool.get_num_free_blocks() - growth - 8
        if spare > 0:
            self._taken += pool.get_new_blocks(spare)
        elif spare < 0:
            pool.free_blocks([self._taken.pop() for _ in range(-spare)])
        took = super().step()
        if len(self.scheduler.running) != self.running:
            raise RuntimeError(f"{len(self.scheduler.running)} of {self.running} requests are running")
        return took

    def own_us(self) -> float:
        """Mean over a round's steps of the time in the plugin's functions."""
        clocks, spans = ThreadClocks(), []
        gc.collect()
        gc.disable()
        try:
            with clocks.put_in(self.scheduler):
                for _ in range(STEPS):
                    self.step()
                    spans.append(clocks.own_ns())
        finally:
            gc.enable()
        return fmean(spans) / 1e3


def measure(running: int, situation: str, orders: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """A row per order, the first for `fcfs`."""
    rows = []
    for order in ("fcfs", *orders):
        spec = ORDERS.get(order, order) if situation == OUTRANKED else order
        arm = Ordered(running, (rounds + 1) * STEPS + COUNTED_STEPS, spec, situation)
        spans_us = [arm.own_us() for _ in range(rounds + 1)][1:]  # the first is for whatever happens only once
        row: dict[str, Any] = {"order": spec, "situation": situation, "running_requests": running}
        row |= {"own_us": median(spans_us), "own_least_us": min(spans_us), **counted(arm, COUNTED_STEPS)}
        row["more_us"] = row["own_least_us"] - (rows[0] if rows else row)["own_least_us"]
        rows.append(row)
        arm.scheduler.connector.shutdown()
    return rows


# ---- the built-in simulator ----


def simulated(running: int, order: str, leap: bool, outputs: int = 200) -> float:
    """Opcodes per step of a run in which nobody waits."""
    requests = [WorkloadRequest(0.0, PROMPT_TOKENS + number % BLOCK, outputs) for number in range(running)]
    blocks = running * (PROMPT_TOKENS + BLOCK + outputs) // BLOCK + running
    server = Server(
        BLOCK, 1 << 16, blocks, 0, token_budget=8192, max_running=running, order=load(order), max_model_len=CONTEXT
    )
    opcodes = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal opcodes
        if not frame.f_globals.get("__name__", "").startswith("kvpolicy"):
            return None
        opcodes += event == "opcode"
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run = Builtin(leap=leap).run(
            Workload("quiet", tuple(requests), 0), policy.load("always-recompute"), server, TIMES, 0
        )
    finally:
        sys.settrace(before)
    return opcodes / run.summary.steps


# ---- printing ----


def misses(rows: Sequence[dict[str, Any]]) -> list[str]:
    return [
        f"{row['order']}, {row['situation']}, at {row['running_requests']} running: "
        f"{row['more_us']:.1f} us, the bar is {bar:g}"
        for row in rows
        if (bar := BAR_US.get(row["running_requests"])) is not None and row["more_us"] > bar
    ]


def show(rows: Sequence[dict[str, Any]], runs: Sequence[dict[str, Any]], failed: Sequence[str]) -> None:
    table = Table("running", "situation", "order", "more than fcfs, us", "own us, median", "least", "opcodes")
    for row in rows:
        table.add_row(
            str(row["running_requests"]), row["situation"], row["order"], f"{row['more_us']:+.1f}",
            f"{row['own_us']:.1f}", f"{row['own_least_us']:.1f}", f"{row['opcodes']:.0f}",
        )  # fmt: skip
    console = Console(width=140)
    console.print(table)
    simulator = Table("running", "order", "opcodes a simulated step", "with leaps")
    for run in runs:
        simulator.add_row(
            str(run["running_requests"]), run["order"], f"{run['opcodes']:.0f}", f"{run['opcodes_leaping']:.0f}"
        )
    console.print(simulator)
    console.print("\n".join(failed) or "every bar is met")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--running", type=int, nargs="+", default=list(RUNNING))
    parser.add_argument("--orders", nargs="+", default=list(ORDERS))
    parser.add_argument("--situations", nargs="+", choices=SITUATIONS, default=list(SITUATIONS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cpu", type=int, help="pin to this processor")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not 1 <= options.rounds <= MAX_ROUNDS:
        parser.error(f"--rounds is {options.rounds}, should be from 1 to {MAX_ROUNDS}")
    if options.cpu is not None:
        os.sched_setaffinity(0, {options.cpu})
    rows = [
        row
        for running in options.running
        for situation in options.situations
        for row in measure(running, situation, options.orders, options.rounds)
    ]
    runs = [
        {
            "running_requests": running, "order": order,
            "opcodes": simulated(running, order, False), "opcodes_leaping": simulated(running, order, True),
        }
        for running in options.running
        for order in ("fcfs", *options.orders)
    ]  # fmt: skip
    failed = misses(rows)
    show(rows, runs, failed)
    if options.json:
        found = {"rows": rows, "simulator": runs, "bar_us": BAR_US, "missed": failed}
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
