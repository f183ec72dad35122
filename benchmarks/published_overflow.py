"""What the overflow study's paper says of batches, memory and use over time, simulated at the paper's own size.

    python benchmarks/published_overflow.py [--trace DIR] [--json FILE]

Published (Ye, Nicolae, Kougkas and Sun, on an A100 of 40 GB with vLLM 0.4.2 and Yarn-Llama-2-7B-64k): batches are pure
prefill or pure decode; with 32 requests of 1500 prompt and 1024 output tokens, all at once, the overhead falls as KV
memory grows up to 40% and is lowest at 30 or 50%; at 12%, the host's cache fills as the GPU's empties. A percentage is
taken of the blocks that hold all requests at full length, as in docs/overflow-study.md.

Simulated: the built-in simulator with vLLM 0.32's rules (V1, chunked prefill) and times from the data sheet of that
GPU. ``--trace``: a recorded trace, whose steps are counted by the same rule, of a `kvpolicy characterize` those of the
runs that it served. Its use over time is shown, too; the device's is of its forward passes where the trace has their
time, else of steps under way. The first statement is about V1 and is expected to differ from the published one. Exits 1
where a statement does not hold.
"""

from __future__ import annotations

import argparse
import sys
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

from published_lines import Line, Statement, show, status, write
from rich.console import Console
from rich.table import Table

from kvpolicy.cost.analytic import untrained
from kvpolicy.errors import KVPolicyError
from kvpolicy.hardware.engine_spec import EngineSpec
from kvpolicy.hardware.sheets import device_sheet
from kvpolicy.overflow import SERVED, figure_and_level
from kvpolicy.policy import load as load_policy
from kvpolicy.shape import ModelShape
from kvpolicy.simulator import Server
from kvpolicy.simulator.base import NULL_BLOCK
from kvpolicy.simulator.builtin import Builtin
from kvpolicy.simulator.hardware.law_times import law_times
from kvpolicy.simulator.sinks import MemorySink
from kvpolicy.trace import Header, Trace, TraceError
from kvpolicy.trace.table import read
from kvpolicy.workload import Request, Workload

YARN = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 32, "intermediate_size": 11008, "vocab_size": 32000, "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}  # fmt: skip
REQUESTS, PROMPT, OUTPUT = 32, 1500, 1024
BLOCK_SIZE, TOKEN_BUDGET = 16, 2048
WHOLE = REQUESTS * -(-(PROMPT + OUTPUT) // BLOCK_SIZE)
LEVELS = (10, 20, 30, 40, 50, 60)
TIMELINE_LEVEL, MOMENTS = 12, 10
FELT_S = 1e-6
"""Below it, a sum of costs is rounding."""
POLICIES = ("always-recompute", "always-swap")
Steps = Iterable[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Batches:
    """Shares of the steps that compute anything."""

    prefill: float
    decode: float
    mixed: float

    @property
    def decoding(self) -> float:
        """Of the steps that compute a part of a prompt, or recompute, the share that also decodes."""
        return self.mixed / (self.mixed + self.prefill) if self.mixed + self.prefill else 0.0


def batches_of(steps: Steps) -> Batches:
    """A request that computes one token decodes; one that computes more is in prefill."""
    counts = [0, 0, 0]
    for row in steps:
        if row["scheduled_requests"]:
            decodes, prefills = row["decode_requests"], row["scheduled_requests"] - row["decode_requests"]
            counts[2 if decodes and prefills else 1 if decodes else 0] += 1
    whole = max(1, sum(counts))
    return Batches(*(count / whole for count in counts))


def simulated(policy: str, level: int) -> tuple[Trace, Server]:
    shape = ModelShape.from_config(YARN)
    block_bytes = int(shape.kv_bytes_per_token * BLOCK_SIZE)
    spec = EngineSpec(BLOCK_SIZE, TOKEN_BUDGET, block_bytes=block_bytes)
    times = law_times(untrained(shape, device_sheet("A100-SXM-40GB"), engine=spec))
    server = Server(BLOCK_SIZE, block_bytes, WHOLE * level // 100, WHOLE, TOKEN_BUDGET, asynchronous=True)
    requests = Workload("at once", (Request(0.0, PROMPT, OUTPUT),) * REQUESTS, 0)
    run = Builtin().run(requests, load_policy(policy), server, times, sink=MemorySink())
    assert run.trace is not None
    return run.trace, server


def overhead_s(trace: Trace) -> float:
    """Engine time that preemptions cost, by the simulator's own account."""
    return sum(row["engine_s"] or 0.0 for row in trace.rows("outcomes"))


def use_over_time(trace: Trace, server: Server | Header, core: str | None = None) -> list[dict[str, float]]:
    """Shares in each tenth of the run: the device computing, each direction of the link copying, device KV in use, and
    host memory in use, by what was saved and not loaded yet. ``core``: the engine core, where there are several."""
    steps, transfers = (
        [row for row in trace.rows(name) if core in (None, row["core"])] for name in ("steps", "transfers")
    )
    begin_s = min(row["start_s"] for row in steps)
    whole_s = max(row["start_s"] + row["duration_s"] for row in steps) - begin_s
    timed = any(row["device_s"] is not None for row in steps)
    moments = []
    for number in range(MOMENTS):
        low, high = (begin_s + whole_s * at / MOMENTS for at in (number, number + 1))

        def busy(spans: Iterable[tuple[float, float]], low: float = low, high: float = high) -> float:
            return sum(max(0.0, min(end, high) - max(begin, low)) for begin, end in spans) / (high - low)

        within = [row for row in steps if low <= row["start_s"] < high]
        used = sum((row["used_blocks"] - NULL_BLOCK) * row["duration_s"] for row in within)
        held = sum(
            (row["bytes"] if row["direction"] == "save" else -row["bytes"])
            for row in transfers if row["end_s"] <= high
        )  # fmt: skip
        forwards_s = sum(row["device_s"] or 0.0 for row in within)
        under_way = busy((row["start_s"], row["start_s"] + row["duration_s"]) for row in steps)
        moments.append({
            "until_s": high - begin_s,
            "device": forwards_s / (high - low) if timed else under_way,
            **{word: busy((row["start_s"], row["end_s"]) for row in transfers if row["direction"] == word)
               for word in ("save", "load")},
            "device KV": used / max(1e-12, sum(row["duration_s"] for row in within)) / server.device_blocks,
            "host KV": held / server.block_bytes / max(1, server.host_blocks),
        })  # fmt: skip
    return moments


def _show_use(title: str, moments: Sequence[Mapping[str, float]], console: Console) -> None:
    table = Table("until s", *list(moments[0])[1:], title=f"{title}: shares in use")
    for moment in moments:
        table.add_row(f"{moment['until_s']:.1f}", *(f"{share:.1%}" for share in list(moment.values())[1:]))
    console.print(table)


def host_beside_device(trace: Trace, server: Server) -> tuple[float, float]:
    """Mean share of host memory in use over the quarter of the steps with the least device KV in use, and the quarter
    with the most; of the steps in which somebody waits."""
    steps = [row for row in trace.rows("steps") if row["waiting_requests"]]
    moves = sorted((row["end_s"], row["bytes"] * (1 if row["direction"] == "save" else -1))
                   for row in trace.rows("transfers"))  # fmt: skip
    ends, held = [end_s for end_s, _ in moves], list(accumulate(moved for _, moved in moves))
    pairs = []
    for row in steps:
        done = bisect_right(ends, row["start_s"])
        pairs.append((row["used_blocks"], held[done - 1] if done else 0))
    pairs.sort(key=itemgetter(0))
    quarter = max(1, len(pairs) // 4)
    whole = server.block_bytes * server.host_blocks
    empty, full = (fmean(one for _, one in part) / whole for part in (pairs[:quarter], pairs[-quarter:]))
    return empty, full


def _of_memory(policy: str, traces: Mapping[int, Trace]) -> list[Statement]:
    """What memory does to the overhead; nothing is said of an overhead that is only rounding."""
    overheads = {level: overhead_s(trace) for level, trace in traces.items()}
    felt = {level: 0.0 if abs(seconds) < FELT_S else seconds for level, seconds in overheads.items()}
    words = [
        f"{level}%: {seconds:.3g} s of {max(row['last_token_s'] for row in traces[level].rows('requests')):.1f} s, "
        f"{len(traces[level].rows('outcomes'))} preempted"
        for level, seconds in felt.items()
    ]
    if max(overheads.values()) < FELT_S:
        return [Statement(f"{policy}: preemptions cost the engine no time that can be told from none", True,
                          "; ".join(words))]  # fmt: skip
    upto = [seconds for level, seconds in overheads.items() if level <= 40]
    least = min(overheads, key=lambda level: overheads[level])
    falls = all(later < earlier for earlier, later in pairwise(upto))
    return [
        Statement(f"{policy}: the overhead falls as memory grows up to 40%", falls, "; ".join(words)),
        Statement(f"{policy}: the overhead is lowest at 30 or 50%", least in (30, 50), f"at {least}%"),
    ]


def recorded_in(folder: Path) -> Trace:
    """A recorded trace. Raises TraceError where it has no steps."""
    trace = read(folder)
    if not trace.table("steps").num_rows:
        raise TraceError(f"{folder}: no steps were recorded; should be the trace of a server, or of a measurement")
    return trace


def counted(trace: Trace, core: str) -> tuple[str, list[dict[str, Any]]]:
    """The steps of a core by which its batches are judged, with a name for them: those of the runs that
    `kvpolicy characterize` served whole, else all."""
    steps = [row for row in trace.rows("steps") if row["core"] == core]
    runs = [
        range(row["first_step"], row["last_step"] + 1)
        for row in trace.rows("windows")
        if row["core"] == core and row["repeat"] >= 0 and (figure_and_level(row["state_id"]) or ("",))[0] in SERVED
    ]
    if runs:
        return f"{core}, {len(runs)} served runs", [row for row in steps if any(row["step"] in run for run in runs)]
    single = ", a profile of single requests" if trace.headers[core].source == "profile" else ""
    return f"{core}{single}", steps


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, metavar="DIR", help="a recorded trace")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    console, lines, statements = Console(width=140), list[Line](), list[Statement]()
    recorded = None
    if options.trace:
        try:
            recorded = recorded_in(options.trace)
        except (KVPolicyError, OSError) as error:
            parser.exit(2, f"published_overflow.py: error: {error}\n")
    for policy in POLICIES:
        runs = {level: simulated(policy, level) for level in (*LEVELS, TIMELINE_LEVEL)}
        batches = batches_of(runs[TIMELINE_LEVEL][0].rows("steps"))
        lines.append(Line(f"{policy}: steps of prompts that decode nothing", 1.0, 1 - batches.decoding))
        statements.append(_mixes(f"{policy}, {TIMELINE_LEVEL}% memory", batches))
        statements += _of_memory(policy, {level: runs[level][0] for level in LEVELS})
        _show_use(f"{policy}, {TIMELINE_LEVEL}% memory", use_over_time(*runs[TIMELINE_LEVEL]), console)
        if policy == "always-swap":
            empty, full = host_beside_device(*runs[TIMELINE_LEVEL])
            text = (
                "under swap, host memory holds more in the quarter of the steps with the emptiest device than in that "
            )
            statements.append(Statement(f"{text}with the fullest", empty > full, f"{empty:.2%} and {full:.2%}"))
    if recorded is not None:
        for core, header in recorded.headers.items():
            name, steps = counted(recorded, core)
            batches = batches_of(steps)
            lines.append(Line(f"{name}: steps of prompts that decode nothing", 1.0, 1 - batches.decoding))
            statements.append(_mixes(name, batches))
            _show_use(core, use_over_time(recorded, header, core), console)
    show("The overflow study's paper", lines, statements, console)
    if options.json:
        write(options.json, lines, statements)
    return status(lines, statements)


def _mixes(name: str, batches: Batches) -> Statement:
    figures = (
        f"pure prefill {batches.prefill:.2%}, pure decode {batches.decode:.2%}, mixed {batches.mixed:.2%} of steps"
    )
    text = f"{name}: V1 mixes: most steps with a part of a prompt also decode"
    return Statement(text, batches.decoding > 0.5, figures)


if __name__ == "__main__":
    sys.exit(main())
