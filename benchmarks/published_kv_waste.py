"""Waste of KV memory, and what sharing saves of it, as in the PagedAttention paper, by simulation and block arithmetic.

    python benchmarks/published_kv_waste.py --data DIR [--requests N] [--vllm] [--json FILE]

Published (Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", SOSP 2023,
arXiv:2309.06180, figures 2, 11 and 15, section 6.3, table 1): OPT-13B on an A100 of 40 GB, 15.7 K slots for KV,
ShareGPT with 161.31 prompt and 337.99 output tokens on average. Of the KV memory, on average, token states fill 20.4%
under Orca with room for the longest output (Max), 26.8% with room for the next power of two (Pow2), 38.2% with room for
the true length (Oracle), and 96.3% under vLLM. Reserved is what a request will fill later, internal what it never
fills, external all else.

Here: the lengths of ShareGPT in DIR whose sum is at most 2048, scaled to the paper's means; a queue that is never
empty. Orca: contiguous room from a buddy allocator, first come, first served, one token a step. vLLM: kvpolicy's
built-in simulator, blocks of 16 (steps in which nobody computes a prompt: a trace holds the context of these); with
``--vllm`` vLLM's own scheduler and block manager as well. Sharing: n samples of one prompt that share its full blocks,
as vLLM V1 finds them, over the steps of their outputs. Of beam search only bounds follow from lengths: beams share the
prompt alone, or all but their last block.

Exits 1 where a bar is missed, set before the first run: token states within 15%, savings within 25%; the published
savings of beam search between the bounds.
"""

from __future__ import annotations

import argparse
import heapq
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, log2
from pathlib import Path
from statistics import fmean

from published_lines import Line, Statement, show, status, write
from rich.console import Console

from kvpolicy.errors import KVPolicyError
from kvpolicy.policy import load as load_policy
from kvpolicy.simulator import Server, Simulator
from kvpolicy.simulator.base import NULL_BLOCK
from kvpolicy.simulator.builtin import Builtin
from kvpolicy.simulator.hardware.law_times import ConstantTimes
from kvpolicy.simulator.sinks import MemorySink
from kvpolicy.workload import Request, Workload, open_workload

CONTEXT, SLOTS, BLOCK_SIZE = 2048, 15_700, 16
PROMPT_MEAN, OUTPUT_MEAN = 161.31, 337.99
SAMPLES = (2, 4, 6)
STATES_BAR, SAVED_BAR = 0.15, 0.25
PUBLISHED_WASTE = {
    "Orca, Max": (0.204, 0.133, 0.573, 0.089),
    "Orca, Pow2": (0.268, 0.179, 0.136, 0.416),
    "Orca, Oracle": (0.382, 0.252, 0.0, 0.366),
    "vLLM": (0.963, None, None, None),
}
"""Shares of token states, reserved, internal, and external and others."""
PUBLISHED_SAVED = {"parallel sampling": (0.162, 0.305), "beam search": (0.443, 0.663)}
"""Of the blocks, with 2 and with 6 samples or beams, on ShareGPT."""


@dataclass(frozen=True, slots=True)
class Waste:
    """Shares of all KV memory, averages over steps; they sum to 1."""

    states: float
    reserved: float
    internal: float
    external: float


def lengths(data: Path, count: int) -> list[tuple[int, int]]:
    """(prompt, output) tokens."""
    file = data / "lengths" / "sharegpt_8k_llama2tok_even_rows.csv.gz"
    rows = [(row.prompt_tokens, row.output_tokens) for row in open_workload(f"lengths:{file}")]
    rows = [row for row in rows if sum(row) <= CONTEXT][:count]
    scales = [
        mean / fmean(column) for mean, column in zip((PROMPT_MEAN, OUTPUT_MEAN), zip(*rows, strict=True), strict=True)
    ]
    scaled = [(max(1, round(p * scales[0])), max(1, round(o * scales[1]))) for p, o in rows]
    return [(prompt, min(output, CONTEXT - prompt)) for prompt, output in scaled]


# ---- contiguous room ----


class Buddies:
    """Chunks of powers of two in ``slots``; a remainder too small for the largest is split into smaller ones."""

    def __init__(self, slots: int) -> None:
        self._free: dict[int, list[int]] = {}
        begin = 0
        for order in reversed(range(slots.bit_length())):
            if slots >> order & 1:
                self._free.setdefault(order, []).append(begin)
                begin += 1 << order

    def take(self, tokens: int) -> tuple[int, int] | None:
        """(order, place), or None where no chunk is large enough."""
        order = ceil(log2(tokens)) if tokens > 1 else 0
        found = min((have for have, places in self._free.items() if have >= order and places), default=None)
        if found is None:
            return None
        place = heapq.heappop(self._free[found])
        for half in reversed(range(order, found)):
            heapq.heappush(self._free.setdefault(half, []), place + (1 << half))
        return order, place

    def give(self, order: int, place: int) -> None:
        """Merge with the other half as long as it is free."""
        while (places := self._free.setdefault(order, [])) and (place ^ (1 << order)) in places:
            places.remove(place ^ (1 << order))
            heapq.heapify(places)
            place, order = min(place, place ^ (1 << order)), order + 1
        heapq.heappush(self._free.setdefault(order, []), place)


def room_of(rule: str, prompt: int, output: int) -> int:
    if rule == "Orca, Max":
        return CONTEXT
    if rule == "Orca, Pow2":
        return min(CONTEXT, prompt + (1 << ceil(log2(output)) if output > 1 else 1))
    return prompt + output


def orca(rule: str, rows: Sequence[tuple[int, int]]) -> Waste:
    """One token of each request a step; measured while requests wait."""
    memory, waiting = Buddies(SLOTS), iter(rows)
    running: list[tuple[int, int, int, int, int, int]] = []
    totals, steps, step = [0.0, 0.0, 0.0], 0, 0
    row = next(waiting, None)
    while row is not None:
        while row is not None and (chunk := memory.take(room_of(rule, *row))) is not None:
            running.append((step, *row, room_of(rule, *row), *chunk))
            row = next(waiting, None)
        if row is None:
            break
        # All sums are linear until the next request ends.
        until = min(begun + output for begun, _, output, *_ in running) - step
        for begun, prompt, output, room, _, _ in running:
            done = step - begun
            held = until * (prompt + done) + until * (until + 1) / 2
            totals[0] += held
            totals[1] += until * (prompt + output) - held
            totals[2] += until * (room - prompt - output)
        steps, step = steps + until, step + until
        for begun, _, output, _, order, place in running:
            if begun + output <= step:
                memory.give(order, place)
        running = [one for one in running if one[0] + one[2] > step]
    shares = [total / steps / SLOTS for total in totals]
    return Waste(shares[0], shares[1], shares[2], 1 - sum(shares))


# ---- blocks ----


def paged(rows: Sequence[tuple[int, int]], simulator: Simulator) -> Waste:
    """Over the steps in which somebody waits and nobody computes a prompt."""
    requests = tuple(Request(0.0, prompt, output) for prompt, output in rows)
    server = Server(
        BLOCK_SIZE, 1, SLOTS // BLOCK_SIZE, 0, token_budget=2560, max_running=1024, max_model_len=CONTEXT,
        prefix_caching=False,
    )  # fmt: skip
    if not isinstance(simulator, Builtin):
        server = replace(server, rules=simulator.rules)
    policy = load_policy("always-recompute")
    run = simulator.run(Workload("sharegpt", requests, 0), policy, server, ConstantTimes(), sink=MemorySink())
    assert run.trace is not None
    held, internal, steps = 0.0, 0.0, 0
    for row in run.trace.rows("steps"):
        if row["waiting_requests"] and row["scheduled_tokens"] == row["decode_requests"] == row["running_requests"]:
            used = (row["used_blocks"] - NULL_BLOCK) * BLOCK_SIZE
            held, internal, steps = held + row["kv_read_tokens"], internal + used - row["kv_read_tokens"], steps + 1
    total = steps * SLOTS
    return Waste(held / total, 0.0, internal / total, 1 - (held + internal) / total)


def shared_blocks(prompt: int) -> int:
    """Blocks of a prompt that a second sample finds: full ones, and its last token is computed again."""
    return (prompt - 1) // BLOCK_SIZE


def blocks_over_steps(prompt: int, output: int) -> Iterator[int]:
    """Blocks of one sample after each step but the last."""
    return (-(-(prompt + step) // BLOCK_SIZE) for step in range(output))


def saved(rows: Sequence[tuple[int, int]], samples: int, beams_alike: bool = False) -> float:
    """Share of the blocks that sharing saves; ``beams_alike``: all but the last block is shared."""
    unshared, shared = 0, 0
    for prompt, output in rows:
        for blocks in blocks_over_steps(prompt, output):
            common = blocks - 1 if beams_alike else shared_blocks(prompt)
            unshared += samples * blocks
            shared += common + samples * (blocks - common)
    return 1 - shared / unshared


def compared(rows: Sequence[tuple[int, int]], simulators: dict[str, Simulator]) -> tuple[list[Line], list[Statement]]:
    wastes = {rule: orca(rule, rows) for rule in PUBLISHED_WASTE if rule != "vLLM"}
    wastes |= {name: paged(rows, simulator) for name, simulator in simulators.items()}
    lines = []
    for name, waste in wastes.items():
        states, reserved, internal, external = PUBLISHED_WASTE.get(name, PUBLISHED_WASTE["vLLM"])
        assert states is not None
        lines.append(Line(f"{name}: token states", states, waste.states, STATES_BAR))
        more = (("reserved", reserved, waste.reserved), ("internal", internal, waste.internal),
                ("external and others", external, waste.external))  # fmt: skip
        lines += [Line(f"{name}: {word}", share, ours) for word, share, ours in more if share]
    low, high = PUBLISHED_SAVED["parallel sampling"]
    savings = [saved(rows, samples) for samples in SAMPLES]
    lines.append(Line("parallel sampling, 2 samples: blocks saved", low, savings[0], SAVED_BAR))
    lines.append(Line("parallel sampling, 6 samples: blocks saved", high, savings[-1], SAVED_BAR))
    statements = []
    for samples, published in zip((SAMPLES[0], SAMPLES[-1]), PUBLISHED_SAVED["beam search"], strict=True):
        least, most = saved(rows, samples), saved(rows, samples, beams_alike=True)
        text = f"beam search with {samples} beams: the published {published:.1%} lies between what lengths allow"
        statements.append(Statement(text, least <= published <= most, f"{least:.1%} to {most:.1%}"))
    tight = wastes["vLLM"]
    statements.append(Statement("under vLLM less than 4% of the memory is in blocks and unused", tight.internal < 0.04,
                                f"{tight.internal:.1%}; {tight.external:.1%} free"))  # fmt: skip
    return lines, statements


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--requests", type=int, default=2000, metavar="N")
    parser.add_argument("--vllm", action="store_true", help="also vLLM's own scheduler and block manager")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    simulators: dict[str, Simulator] = {"vLLM": Builtin()}
    if options.vllm:
        from kvpolicy_vllm.simulator.engine import VllmScheduler

        simulators["vLLM, its own block manager"] = VllmScheduler()
    try:
        rows = lengths(options.data, options.requests)
    except (KVPolicyError, OSError) as error:
        parser.exit(2, f"published_kv_waste.py: error: {error}\n")
    lines, statements = compared(rows, simulators)
    show(f"Waste of KV memory, {len(rows)} requests", lines, statements, Console(width=140))
    if options.json:
        write(options.json, lines, statements)
    return status(lines, statements)


if __name__ == "__main__":
    sys.exit(main())
