"""The five figures of the overflow study's paper, and what it says of batches, simulated at the paper's own size.

    python benchmarks/published_overflow.py [--trace DIR] [--json FILE]

Published (Ye, Nicolae, Kougkas and Sun, on an A100 of 40 GB with vLLM 0.4.2 and Yarn-Llama-2-7B-64k): batches are pure
prefill or pure decode; with 32 requests of 1500 prompt and 1024 output tokens, all at once, the overhead falls as KV
memory grows up to 40% and is lowest at 30 or 50%; at 12%, the host's cache fills as the GPU's empties. A percentage is
taken of the blocks that hold all requests at full length, as in docs/overflow-study.md. Of single overflows: the cost
of recompute is flat over block sizes, that of swap falls (2 requests); both grow with the evicted tokens, and swap is
lower for many; both grow with the sequence length (16 requests), and swap is better for long ones.

Simulated: the built-in simulator with vLLM 0.32's rules (V1, chunked prefill) and times from the data sheet of that
GPU. In a single overflow all requests are as long as the victims, which are the last ones: the paper's own lengths are
not known here; these fit into the GPU's memory. vLLM 0.4.2 had the engine wait for copies, so what is compared with a
recompute's engine time is the time that the victims' copies take on the link, out and back; in the simulation they go
on beside the steps.

``--trace``: a recorded trace, whose steps are counted by the same rule, of a `kvpolicy characterize` those of the runs
that it served. Its use over time is shown, too; the device's is of its forward passes where the trace has their time,
else of steps under way. The first statement is about V1 and is expected to differ from the published one. Exits 1 where
a statement does not hold.
"""

from __future__ import annotations

import argparse
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
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
from kvpolicy.overflow import BLOCK_SIZE as STUDY_BLOCK_SIZE
from kvpolicy.overflow import EVICTED_TOKENS, MEMORY, SEQUENCE_LENGTH, SERVED, TIMELINE, figure_and_level
from kvpolicy.overflow import LEVELS as FIGURE_LEVELS
from kvpolicy.policy import load as load_policy
from kvpolicy.shape import ModelShape
from kvpolicy.simulator import Server
from kvpolicy.simulator.base import NULL_BLOCK
from kvpolicy.simulator.builtin import Builtin
from kvpolicy.simulator.hardware.law_times import LawTimes, law_times
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
PIECES = 2 * 32
"""Contiguous pieces of a block: keys and values of each layer."""
BLOCK_SIZES, BLOCK_SIZE_REQUESTS, BLOCK_SIZE_TOKENS = (16, 32, 64, 128), 2, 2048
LENGTHS, LENGTH_REQUESTS = (256, 512, 1024, 2048), 16
VICTIMS, VICTIM_TOKENS, VICTIM_BLOCK_SIZE = (1, 2, 4, 6), 256, 32
"""Evicted in one overflow. Each needs a block in the same step as all others, so that a victim's blocks are taken."""
VICTIM_REQUESTS = max(VICTIMS) + 1 + (max(VICTIMS) - 1) * (VICTIM_TOKENS // VICTIM_BLOCK_SIZE)
"""With fewer, the blocks of fewer victims would do for all others."""
DECODED, SOON, LATER = 4, 8, 64
"""Output tokens before the overflow, and after it: of the first half of the requests, and of the others."""
FLAT = 0.25
"""Of the mean: largest difference between levels that are called flat, as in docs/overflow-study.md."""
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


def machine(block_size: int, token_budget: int) -> tuple[LawTimes, int]:
    """Times of the GPU's data sheet, and the bytes of a block."""
    shape = ModelShape.from_config(YARN)
    block_bytes = int(shape.kv_bytes_per_token * block_size)
    spec = EngineSpec(block_size, token_budget, block_bytes=block_bytes)
    return law_times(untrained(shape, device_sheet("A100-SXM-40GB"), engine=spec)), block_bytes


def simulated(policy: str, level: int) -> tuple[Trace, Server]:
    times, block_bytes = machine(BLOCK_SIZE, TOKEN_BUDGET)
    server = Server(BLOCK_SIZE, block_bytes, WHOLE * level // 100, WHOLE, TOKEN_BUDGET, asynchronous=True)
    return served(policy, server, times, (Request(0.0, PROMPT, OUTPUT),) * REQUESTS), server


def served(policy: str, server: Server, times: LawTimes, requests: tuple[Request, ...]) -> Trace:
    run = Builtin().run(Workload("at once", requests, 0), load_policy(policy), server, times, sink=MemorySink())
    assert run.trace is not None
    return run.trace


# ---- single overflows ----


@dataclass(frozen=True, slots=True)
class Overflow:
    """One overflow: of ``requests`` as long requests, the last ``victims`` are evicted."""

    block_size: int
    requests: int
    tokens: int
    """Of each request when memory runs out: whole blocks."""
    victims: int = 1

    @property
    def blocks(self) -> int:
        """Of the device: one short of what is needed with fewer victims."""
        each = self.tokens // self.block_size
        return self.requests * each + self.requests - self.victims - 1 - (self.victims - 1) * each

    def trace(self, policy: str) -> Trace:
        budget = self.requests * self.tokens  # all prompts in one step, and so all requests are equally long
        times, block_bytes = machine(self.block_size, budget)
        server = Server(
            self.block_size, block_bytes, self.blocks, self.requests * self.tokens // self.block_size, budget,
            prefix_caching=False, segment_bytes=block_bytes // PIECES, asynchronous=True,
        )  # fmt: skip
        half = self.requests // 2
        outputs = [DECODED + (SOON if number < half else LATER) for number in range(self.requests)]
        return served(policy, server, times, tuple(Request(0.0, self.tokens - DECODED, one) for one in outputs))


@dataclass(frozen=True, slots=True)
class Level:
    """What an overflow costs, over all its victims, in milliseconds."""

    level: int
    """Tokens in a block, victims, or tokens of each request."""
    evicted_tokens: int
    recompute_ms: float
    """Engine time."""
    link_ms: float
    """Of a swap: copies out and back."""
    swap_ms: float
    """Of a swap: engine time."""


def measured(level: int, overflow: Overflow) -> Level:
    recomputed, swapped = (overflow.trace(policy) for policy in POLICIES)
    for trace in (recomputed, swapped):
        assert len(trace.rows("outcomes")) == overflow.victims, "no other overflow than the one that is meant"
    copies_s = sum(row["end_s"] - row["start_s"] for row in swapped.rows("transfers"))
    evicted = sum(row["computed_tokens"] for row in swapped.rows("decisions"))
    costs_s = (overhead_s(recomputed), copies_s, overhead_s(swapped))
    return Level(level, evicted, *(1e3 * felt(seconds) for seconds in costs_s))


def sweeps() -> dict[str, list[Level]]:
    """The paper's three figures of single overflows."""
    return {
        STUDY_BLOCK_SIZE: [
            measured(size, Overflow(size, BLOCK_SIZE_REQUESTS, BLOCK_SIZE_TOKENS)) for size in BLOCK_SIZES
        ],
        EVICTED_TOKENS: [
            measured(count, Overflow(VICTIM_BLOCK_SIZE, VICTIM_REQUESTS, VICTIM_TOKENS, count))
            for count in VICTIMS
        ],
        SEQUENCE_LENGTH: [
            measured(tokens, Overflow(BLOCK_SIZE, LENGTH_REQUESTS, tokens)) for tokens in LENGTHS
        ],
    }  # fmt: skip


def of_sweeps(found: Mapping[str, Sequence[Level]]) -> Iterator[Statement]:
    """What the paper says of them."""
    sizes = found[STUDY_BLOCK_SIZE]
    costs = [one.recompute_ms for one in sizes]
    spread = (max(costs) - min(costs)) / fmean(costs)
    yield Statement("the cost of recompute is flat over block sizes", spread <= FLAT, f"{spread:.1%} of the mean")
    yield Statement("the cost of swap falls as blocks grow", _grows([-one.link_ms for one in sizes]), _ms(sizes))
    for figure, what in ((EVICTED_TOKENS, "the evicted tokens"), (SEQUENCE_LENGTH, "sequence length")):
        levels = found[figure]
        grow = _grows([one.recompute_ms for one in levels]) and _grows([one.link_ms for one in levels])
        yield Statement(f"both costs grow with {what}", grow, _ms(levels))
        last = levels[-1]
        text = f"swap costs less than recompute at the most of {what}"
        yield Statement(text, last.link_ms < last.recompute_ms, f"{last.link_ms / last.recompute_ms:.2f} times")


def _grows(values: Sequence[float]) -> bool:
    return all(later > earlier for earlier, later in pairwise(values))


def _ms(levels: Sequence[Level]) -> str:
    return "; ".join(f"{one.level}: {one.recompute_ms:.1f} and {one.link_ms:.1f} ms" for one in levels)


def _show_sweep(figure: str, levels: Sequence[Level], console: Console) -> None:
    table = Table(FIGURE_LEVELS[figure], "evicted tokens", "recompute, engine ms", "swap, ms on the link",
                  "swap, engine ms", title=figure)  # fmt: skip
    for one in levels:
        costs = (f"{cost:.1f}" for cost in (one.recompute_ms, one.link_ms, one.swap_ms))
        table.add_row(str(one.level), str(one.evicted_tokens), *costs)
    console.print(table)


# ---- whole runs ----


def overhead_s(trace: Trace) -> float:
    """Engine time that preemptions cost, by the simulator's own account."""
    return sum(row["engine_s"] or 0.0 for row in trace.rows("outcomes"))


def felt(seconds: float) -> float:
    """0 where it is only rounding."""
    return 0.0 if abs(seconds) < FELT_S else seconds


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


@dataclass(frozen=True, slots=True)
class Run:
    """The requests served with a share of the memory."""

    policy: str
    level: int
    """Percent."""
    overhead_s: float
    """Engine time that preemptions cost; 0 where it is only rounding."""
    makespan_s: float
    preempted: int


def run_of(policy: str, level: int, trace: Trace) -> Run:
    makespan_s = max(row["last_token_s"] for row in trace.rows("requests"))
    return Run(policy, level, felt(overhead_s(trace)), makespan_s, len(trace.rows("outcomes")))


def _of_memory(policy: str, runs: Sequence[Run]) -> list[Statement]:
    """What memory does to the overhead; nothing is said of an overhead that is only rounding."""
    overheads = {run.level: run.overhead_s for run in runs}
    words = [
        f"{run.level}%: {run.overhead_s:.3g} s of {run.makespan_s:.1f} s, {run.preempted} preempted" for run in runs
    ]
    if not any(overheads.values()):
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
    memory, use = dict[str, list[Run]](), dict[str, list[dict[str, float]]]()
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
        memory[policy] = [run_of(policy, level, runs[level][0]) for level in LEVELS]
        statements += _of_memory(policy, memory[policy])
        use[policy] = use_over_time(*runs[TIMELINE_LEVEL])
        _show_use(f"{policy}, {TIMELINE_LEVEL}% memory", use[policy], console)
        if policy == "always-swap":
            empty, full = host_beside_device(*runs[TIMELINE_LEVEL])
            text = (
                "under swap, host memory holds more in the quarter of the steps with the emptiest device than in that "
            )
            statements.append(Statement(f"{text}with the fullest", empty > full, f"{empty:.2%} and {full:.2%}"))
    single = sweeps()
    for figure, levels in single.items():
        _show_sweep(figure, levels, console)
    statements += of_sweeps(single)
    if recorded is not None:
        for core, header in recorded.headers.items():
            name, steps = counted(recorded, core)
            batches = batches_of(steps)
            lines.append(Line(f"{name}: steps of prompts that decode nothing", 1.0, 1 - batches.decoding))
            statements.append(_mixes(name, batches))
            _show_use(core, use_over_time(recorded, header, core), console)
    show("The overflow study's paper", lines, statements, console)
    if options.json:
        tables: dict[str, Any] = {figure: [*map(asdict, levels)] for figure, levels in single.items()}
        tables |= {MEMORY: [asdict(run) for runs in memory.values() for run in runs], TIMELINE: use}
        write(options.json, lines, statements, tables)
    return status(lines, statements)


def _mixes(name: str, batches: Batches) -> Statement:
    figures = (
        f"pure prefill {batches.prefill:.2%}, pure decode {batches.decode:.2%}, mixed {batches.mixed:.2%} of steps"
    )
    text = f"{name}: V1 mixes: most steps with a part of a prompt also decode"
    return Statement(text, batches.decoding > 0.5, figures)


if __name__ == "__main__":
    sys.exit(main())
