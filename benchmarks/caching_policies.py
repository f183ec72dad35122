"""What caching policies save of computing prompts, in one tier of bounded size: recorded prompts with shared prefixes.

    python benchmarks/caching_policies.py --data DIR [--shares S,S,...] [--sessions-per-min R]
        [--conversations-per-min R] [--think S] [--seeds N] [--cost-model MODEL] [--json FILE]

DIR holds ``traces/mooncake_*.jsonl.gz``, ``traces/agentic_*.jsonl.gz`` and ``lengths/sharegpt_*.csv.gz``. Every prompt
is asked for in the order of arrival and stored whole; capacities are shares of the distinct blocks. A block's price is
what Llama-3.1-8B computes for its tokens after those before it, by its FLOPs on an H100: longer prompts cost more per
token. With ``--cost-model``, a folder, a shipped model or ``analytic:DEVICE[@LINK]:CONFIG``, it is what that model says
of computing these tokens less what it says of loading them. Blocks of agentic sessions are of 1,024 tokens, sixteen of
the recorded ones; when sessions start was not recorded and is drawn, as often as there are seeds. ShareGPT's table has
lengths only: rows whose prompts grow are taken for conversations, and their starts and pauses are drawn.

Printed: the share of the seconds that ``lru`` saves, and what the others save over it; beside them what hindsight
saves, the better of Belady's rule and the same by price. That is a reference and no limit.

Exits 1 where a bar is missed: where hindsight saves at least 1.3 times what ``lru`` does, ``cost`` saves at least 1.10
times (geometric mean); nowhere less than 0.97 of the best of ``lru``, ``arc`` and ``s3fifo``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from statistics import fmean

from matrix_places import LLAMA_3_1_8B

from kvpolicy import cost
from kvpolicy.caching import KINDS, ByCost, chains_of, hindsight, replay
from kvpolicy.caching.base import Chain
from kvpolicy.cost.block_price import block_price
from kvpolicy.hardware.sheets import devices
from kvpolicy.shape import ModelShape
from kvpolicy.study.report import aligned
from kvpolicy.workload import open_workload

DEVICE = "H100-SXM"
SHARES = "0.01,0.02,0.05,0.1,0.2,0.4"
JOINED = 16
"""Recorded blocks of an agentic session that are one here."""
SHAREGPT_BLOCK = 128
"""Tokens of a block of ShareGPT's conversations."""
Price = Callable[[int], float]
Trace = tuple[str, int, list[Chain]]
"""Name, tokens of a block, and prompts."""
RIVALS = ("lru", "arc", "s3fifo")
ROOM, MIN_GAIN, MIN_OF_BEST = 1.3, 1.10, 0.97


@dataclass(frozen=True, slots=True)
class Row:
    """One trace and capacity."""

    trace: str
    block_tokens: int
    capacity: int
    blocks: int
    saved_s: dict[str, float]
    """By policy, ``hindsight`` among them."""
    whole_s: float

    def gain(self, name: str) -> float:
        return self.saved_s[name] / self.saved_s["lru"]

    @property
    def of_best(self) -> float:
        return self.saved_s["cost"] / max(self.saved_s[name] for name in RIVALS)


def prices(cost_model: str | None) -> Callable[[int], Price]:
    """What gives the price of a block by its index, for blocks of so many tokens."""
    if cost_model is None:
        return by_flops
    model = cost.load(cost_model)
    bytes_per_token = model.provenance.kv_bytes_per_token
    return lambda block_tokens: block_price(model.predict, block_tokens, round(bytes_per_token * block_tokens))


def by_flops(block_tokens: int) -> Price:
    shape, speed = ModelShape.from_config(LLAMA_3_1_8B), devices()[DEVICE].bf16_flops
    linear = shape.linear_flops_per_token * block_tokens / speed
    pairs = shape.attention_flops_per_pair * block_tokens**2 / speed
    return lambda position: linear + pairs * (position + 0.5)


def traces(options: argparse.Namespace) -> Iterator[Trace]:
    data, seeds = options.data, options.seeds
    for file in sorted((data / "traces").glob("mooncake_*.jsonl.gz")):
        yield file.name.partition(".")[0], 512, list(chains_of(open_workload(f"mooncake:{file}")))
    for file in sorted((data / "traces").glob("agentic_*.jsonl.gz")):
        for seed in range(seeds):
            text = f"agentic:{file}?closed=false&arrivals=poisson&rate={options.sessions_per_min / 60}&seed={seed}"
            name = f"{file.name.partition('.')[0]}, seed {seed}"
            yield name, 64 * JOINED, list(chains_of(open_workload(text), JOINED))
    for file in sorted((data / "lengths").glob("sharegpt_*.csv.gz")):
        for seed in range(seeds):
            text = (
                f"lengths:{file}?think={options.think}&arrivals=poisson&rate={options.conversations_per_min / 60}"
                f"&block={SHAREGPT_BLOCK}&seed={seed}"
            )
            name = f"{file.name.partition('.')[0]}, seed {seed}"
            yield name, SHAREGPT_BLOCK, list(chains_of(open_workload(text)))


def row(trace: str, block_tokens: int, chains: Sequence[Chain], share: float, costs: Price) -> Row:
    blocks = len({key for chain in chains for key in chain})
    capacity = max(1, int(share * blocks))
    saved_s = {
        name: replay(chains, ByCost(capacity, costs) if kind is ByCost else kind(capacity), costs).saved_s
        for name, kind in KINDS.items()
    }
    foreseen = [hindsight(chains, capacity, costs, by_price) for by_price in (False, True)]
    saved_s["hindsight"] = max(one.saved_s for one in foreseen)
    return Row(trace, block_tokens, capacity, blocks, saved_s, foreseen[0].whole_s)


def table(rows: Sequence[Row]) -> list[str]:
    names = [*[name for name in KINDS if name != "lru"], "hindsight"]
    heads = ["trace", "block", "capacity", "of", "lru saves", *[f"{name}/lru" for name in names]]
    cells = [
        [
            one.trace, str(one.block_tokens), str(one.capacity), str(one.blocks),
            f"{one.saved_s['lru'] / one.whole_s:.3f}", *[f"{one.gain(name):.3f}" for name in names],
        ]
        for one in rows
    ]  # fmt: skip
    return aligned([heads, *cells])


def bars(rows: Sequence[Row]) -> list[str]:
    """Lines about the bars; those missed begin with ``missed``."""
    room = [one for one in rows if one.gain("hindsight") >= ROOM]
    lines = []
    if room:
        gain = exp(fmean(log(one.gain("cost")) for one in room))
        taken = fmean((one.gain("cost") - 1) / (one.gain("hindsight") - 1) for one in room)
        verdict = "met" if gain >= MIN_GAIN else "missed"
        lines.append(
            f"{verdict}: where hindsight saves {ROOM} times what lru does ({len(room)} of {len(rows)}), cost saves "
            f"{gain:.3f} times (geometric mean), at least {MIN_GAIN}; {taken:.0%} of the gap on average"
        )
    least = min(rows, key=lambda one: one.of_best)
    verdict = "met" if least.of_best >= MIN_OF_BEST else "missed"
    lines.append(
        f"{verdict}: the least that cost saves of the best of {', '.join(RIVALS)} is {least.of_best:.3f}, at least "
        f"{MIN_OF_BEST} ({least.trace}, capacity {least.capacity})"
    )
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--shares", default=SHARES, help="capacities, as shares of the distinct blocks")
    parser.add_argument("--sessions-per-min", type=float, default=3.0)
    parser.add_argument("--conversations-per-min", type=float, default=60.0)
    parser.add_argument("--think", type=float, default=60.0, help="mean pause in ShareGPT's conversations, seconds")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cost-model", help="cost model that gives the prices; default: FLOPs")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    price_of = prices(options.cost_model)
    rows = [
        row(name, tokens, chains, float(share), price_of(tokens))
        for name, tokens, chains in traces(options)
        for share in options.shares.split(",")
    ]
    if not rows:
        parser.error(
            f"{options.data}: holds no traces/mooncake_*.jsonl.gz, traces/agentic_*.jsonl.gz or "
            "lengths/sharegpt_*.csv.gz"
        )
    print("\n".join([*table(rows), *(lines := bars(rows))]))
    if options.json is not None:
        found = [
            {"trace": one.trace, "capacity": one.capacity, "blocks": one.blocks, "whole_s": one.whole_s, **one.saved_s}
            for one in rows
        ]
        options.json.write_text(json.dumps(found, indent=1))
    return int(any(line.startswith("missed") for line in lines))


if __name__ == "__main__":
    sys.exit(main())
