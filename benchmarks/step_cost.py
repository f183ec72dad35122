"""What the plugin costs a step in which nothing is preempted, on vLLM's own scheduler: no engine, no model.

    python benchmarks/step_cost.py [--running N ...] [--rounds N] [--steps N] [--cpu N] [--json FILE]

Requests that all fit into memory and decode one token in every step, for as long as it is measured. Once per way the
plugin can be set up, and once without it:

- own: microseconds a step spends in the plugin's functions: what `schedule` and `update_from_output` take beyond
  vLLM's own, and the connector's methods that vLLM calls meanwhile. A median over a round's steps, then the median and
  the least over rounds: with other work on the machine the least is the better figure. The clocks are in it.
- difference: the same schedulers without clocks in them, each beside the stock one, in turn: seconds of `schedule` and
  `update_from_output`, with the ratio and its 95% interval (bootstrap over rounds). What vLLM itself does for any
  connector is in it.
- calls and opcodes: Python calls into the plugin, and Python instructions executed in it, per step. Equal from run to
  run; what is done within one instruction of the interpreter does not show.

Ends with status 1 where the least of own is over the bar: 20 us at 64 running requests, 60 us at 512.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Any
from unittest import mock

from rich.console import Console
from rich.table import Table
from scheduler_alone import BLOCK, make_scheduler
from vllm import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request

from kvpolicy.cost import FittedModel
from kvpolicy.stats import bootstrap_ratio
from kvpolicy_vllm.plugin.connector import KVPolicyConnector
from kvpolicy_vllm.plugin.settings import SCHEDULER, transfer_config

BAR_US = {64: 20.0, 512: 60.0}
MODEL = "cpu-llama-native"
STOCK = "stock"
MODES: dict[str, dict[str, Any]] = {
    "metrics only": {"policy": "always-recompute"},
    "trace": {"policy": "always-recompute", "trace": True},
    "cost model": {"policy": f"cheapest:{MODEL}"},
    "cost model, trace": {"policy": f"cheapest:{MODEL},online=on", "trace": True},
}
PROMPT_TOKENS = 24
WARM_STEPS = 30
COUNTED_STEPS = 20


class Bench:
    """One scheduler with ``running`` requests that decode; ``plugin``: options of the connector, None without it."""

    def __init__(self, running: int, steps: int, plugin: dict[str, Any] | None, scratch: Path) -> None:
        context = 32 * -(-(PROMPT_TOKENS + steps + 64) // 32)
        blocks = running * (context // BLOCK) + 8
        arguments: dict[str, Any] = {}
        if plugin is not None:
            extra = plugin | ({"trace": str(scratch)} if plugin.get("trace") else {})
            arguments = {
                "scheduler_cls": SCHEDULER,
                "kv_transfer_config": transfer_config(extra | {"host_gib": 0.25}),
            }
        with mock.patch.object(FittedModel, "check_fit", return_value=None):  # whether it fits is not the question
            # All prompts in one step.
            budget = max(context, running * PROMPT_TOKENS)
            self.scheduler = make_scheduler(context, blocks, running, budget, log_stats=True, **arguments)
        self._connected = plugin is not None
        for i in range(running):
            parameters = SamplingParams(temperature=0.0, max_tokens=context - PROMPT_TOKENS - 1, ignore_eos=True)
            self.scheduler.add_request(Request(f"request-{i:08d}", [7] * PROMPT_TOKENS, parameters, None, 0.0))
        for _ in range(WARM_STEPS):
            self.step()
        if len(self.scheduler.running) != running:
            raise RuntimeError(f"{len(self.scheduler.running)} of {running} requests are running")

    def step(self) -> int:
        """One step; returns what scheduling and updating took, nanoseconds."""
        begun = perf_counter_ns()
        output = self.scheduler.schedule()
        scheduled = perf_counter_ns()
        result = self._answer(output)
        begun_again = perf_counter_ns()
        self.scheduler.update_from_output(output, result)
        return perf_counter_ns() - begun_again + scheduled - begun

    def _answer(self, output: Any) -> ModelRunnerOutput:
        names, requests = list(output.num_scheduled_tokens), self.scheduler.requests
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: place for place, name in enumerate(names)},
            sampled_token_ids=[[] if requests[name].is_prefill_chunk else [7] for name in names],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=KVConnectorOutput() if self._connected else None,
        )


# ---- the plugin's own time ----


class Clocks:
    """Reads the clock whenever a scheduler's run passes from the plugin to vLLM or back."""

    now_ns = staticmethod(perf_counter_ns)

    def __init__(self) -> None:
        self.marks: list[int] = []

    def own_ns(self) -> int:
        """What was spent in the plugin since the last call: the first, third, ... of the spans between two marks."""
        own = sum(self.marks[1::2]) - sum(self.marks[::2])
        self.marks.clear()
        return own

    @contextmanager
    def put_in(self, scheduler: Any) -> Iterator[None]:
        connector, inner = scheduler.connector, (Scheduler.schedule, Scheduler.update_from_output)
        public = (name for name in vars(KVPolicyConnector) if not name.startswith("_"))
        methods = [name for name in public if callable(getattr(connector, name, None))]
        with mock.patch.multiple(Scheduler, schedule=self._on(inner[0]), update_from_output=self._on(inner[1])):
            for name in methods:
                setattr(connector, name, self._on(getattr(connector, name)))
            scheduler.schedule = self._on(scheduler.schedule)
            scheduler.update_from_output = self._on(scheduler.update_from_output)
            try:
                yield
            finally:
                for name in methods:
                    delattr(connector, name)
                del scheduler.schedule, scheduler.update_from_output

    def _on(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` between two marks, whether it leads from the plugin to vLLM or from vLLM to the plugin."""
        mark, now = self.marks.append, self.now_ns

        def marked(*arguments: Any, **options: Any) -> Any:
            mark(now())
            result = function(*arguments, **options)
            mark(now())
            return result

        return marked


def own_us(bench: Bench, steps: int) -> float:
    """Median over steps of the time in the plugin's functions."""
    clocks, spans = Clocks(), []
    with clocks.put_in(bench.scheduler):
        for _ in range(steps):
            bench.step()
            spans.append(clocks.own_ns())
    return median(spans) / 1e3


def counted(bench: Bench, steps: int = COUNTED_STEPS) -> dict[str, float]:
    """Calls into the plugin's and the library's functions, and opcodes executed in them, per step."""
    counts = {"calls": 0, "opcodes": 0}

    def trace(frame: Any, event: str, _: Any) -> Any:
        if not frame.f_globals.get("__name__", "").startswith("kvpolicy"):
            return None
        counts["calls"] += event == "call"
        counts["opcodes"] += event == "opcode"
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return trace

    before = sys.gettrace()
    for _ in range(steps):
        sys.settrace(trace)
        try:
            bench.step()
        finally:
            sys.settrace(before)
    return {name: count / steps for name, count in counts.items()}


# ---- measuring ----


@dataclass(frozen=True)
class Taken:
    """Of one way to set the plugin up: a figure per round, microseconds."""

    own_us: list[float]
    with_us: list[float]
    stock_us: list[float]

    def add(self, own_us: float, with_us: float, stock_us: float) -> None:
        self.own_us.append(own_us)
        self.with_us.append(with_us)
        self.stock_us.append(stock_us)


def measure(running: int, rounds: int, steps: int, rng: random.Random, scratch: Path) -> list[dict[str, Any]]:
    """One row per way to set the plugin up."""
    each = (rounds + 1) * steps
    stock = Bench(running, WARM_STEPS + each * len(MODES), None, scratch)
    most = WARM_STEPS + COUNTED_STEPS + 2 * each
    benches = {name: Bench(running, most, plugin, scratch) for name, plugin in MODES.items()}
    times = {name: Taken([], [], []) for name in MODES}
    for number in range(rounds + 1):
        for name in rng.sample(list(MODES), len(MODES)):
            round_times = _round(benches[name], stock, steps, rng)
            if number:  # the first round is for whatever happens only once
                for spans, span in zip(
                    (times[name].own_us, times[name].with_us, times[name].stock_us), round_times, strict=True
                ):
                    spans.append(span)
    rows = [_row(name, running, times[name], counted(benches[name]), rng) for name in MODES]
    for bench in benches.values():
        bench.scheduler.connector.shutdown()
    return rows


def _round(bench: Bench, stock: Bench, steps: int, rng: random.Random) -> tuple[float, float, float]:
    gc.collect()
    gc.disable()
    try:
        own = own_us(bench, steps)
        spans: dict[int, list[int]] = {0: [], 1: []}
        for _ in range(steps):
            for which in rng.sample((0, 1), 2):
                spans[which].append((stock, bench)[which].step())
    finally:
        gc.enable()
    return own, median(spans[1]) / 1e3, median(spans[0]) / 1e3


def _row(name: str, running: int, times: Taken, counts: dict[str, float], rng: random.Random) -> dict[str, Any]:
    ratio = bootstrap_ratio(times.with_us, times.stock_us, rng)
    apart = [a - b for a, b in zip(times.with_us, times.stock_us, strict=True)]
    return {
        "mode": name,
        "running_requests": running,
        "own_us": median(times.own_us),
        "own_least_us": min(times.own_us),
        "more_than_stock_us": median(apart),
        "stock_us": median(times.stock_us),
        "ratio": ratio.to_dict(),
    } | counts


def misses(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Which rows are over the bar, where there is one for so many running requests."""
    return [
        f"{row['mode']} at {row['running_requests']} running: {row['own_least_us']:.1f} us, the bar is {bar:g}"
        for row in rows
        if (bar := BAR_US.get(row["running_requests"])) is not None and row["own_least_us"] > bar
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--running", type=int, nargs="+", default=list(BAR_US))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=30, help="per round and way to set the plugin up")
    parser.add_argument("--cpu", type=int, help="pin to this processor")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    for name, least in (("rounds", 2), ("steps", 2)):
        if getattr(options, name) < least:
            parser.error(f"--{name} is {getattr(options, name)}, should be at least {least}")
    if options.cpu is not None:
        os.sched_setaffinity(0, {options.cpu})
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as scratch:
        rows = [
            row
            for running in options.running
            for row in measure(running, options.rounds, options.steps, rng, Path(scratch))
        ]
    failed = misses(rows)
    show(rows, failed)
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "bar_us": BAR_US, "missed": failed}, indent=2) + "\n")
    sys.exit(1 if failed else 0)


def show(rows: Sequence[dict[str, Any]], failed: Sequence[str]) -> None:
    table = Table("running", "plugin", "own us, median", "least", "more than stock, us", "ratio", "calls", "opcodes")
    for row in rows:
        ratio = row["ratio"]
        table.add_row(
            str(row["running_requests"]), row["mode"], f"{row['own_us']:.1f}", f"{row['own_least_us']:.1f}",
            f"{row['more_than_stock_us']:+.1f} of {row['stock_us']:.0f}",
            f"{ratio['value']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})",
            f"{row['calls']:.0f}", f"{row['opcodes']:.0f}",
        )  # fmt: skip
    console = Console(width=140)
    console.print(table)
    console.print("\n".join(failed) or "every bar is met")


if __name__ == "__main__":
    main()
