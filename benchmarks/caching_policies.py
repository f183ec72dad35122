"""What caching policies save of computing prompts, in one tier of bounded size: recorded prompts with shared prefixes.

    python benchmarks/caching_policies.py --data DIR [--shares S,S,...] [--sessions-per-min R]
        [--conversations-per-min R] [--think S] [--first-seed N] [--seeds N] [--parts N] [--cost-model MODEL]
        [--json FILE]

DIR holds ``traces/mooncake_*.jsonl.gz``, ``traces/agentic_*.jsonl.gz`` and ``lengths/sharegpt_*.csv.gz``. Every prompt
is asked for in the order of arrival and stored as far as the policy makes room for it; capacities are shares of the
distinct blocks. A block's price is what Llama-3.1-8B computes for its tokens after those before it, by its FLOPs on an
H100: longer prompts cost more per token. With ``--cost-model``, a folder, a shipped model or
``analytic:DEVICE[@LINK]:CONFIG``, it is what that model says of computing these tokens less what it says of loading
them. Blocks of agentic sessions are of 1,024 tokens, sixteen of the recorded ones; when sessions start was not recorded
and is drawn, as often as there are seeds. ShareGPT's table has lengths only: rows whose prompts grow are taken for
conversations, and their starts and pauses are drawn. ``--parts`` cuts a recorded order of prompts, which no seed
changes, into as many stretches, each served from an empty cache.

With ``--json`` every row is written when it is done, and those that the file has are not made again.
docs/caching-policies.json has two such files, gathered by ``tools/caching_tables.py``.

Printed: the share of the seconds that ``lru`` saves, and what the others save over it; beside them what hindsight
saves, the better of Belady's rule and the same by price. That is a reference and no limit.

Exits 1 where a bar is missed: where hindsight saves at least 1.3 times what ``lru`` does, ``cost`` saves at least 1.10
times (geometric mean, with an interval over draws: seeds and parts, with all of their capacities); nowhere
less than 0.97 of the best of ``lru``, ``arc`` and ``s3fifo``. The bars are of Mooncake's traces and agentic sessions;
the same figures over all rows, ShareGPT's among them, are printed beside theirs, and judged as well.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from caching_bars import Row, bars
from matrix_places import LLAMA_3_1_8B
from row_file import RowFile, versions

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
Trace = tuple[str, str, int, list[Chain]]
"""Name, draw, tokens of a block, and prompts."""
SETTINGS = ("sessions_per_min", "conversations_per_min", "think", "parts", "cost_model")
"""Options on which a row depends, beside its trace and share."""


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
    data, seeds = options.data, range(options.first_seed, options.first_seed + options.seeds)
    for file in sorted((data / "traces").glob("mooncake_*.jsonl.gz")):
        chains = list(chains_of(open_workload(f"mooncake:{file}")))
        for part in range(options.parts):
            low, high = (len(chains) * (part + end) // options.parts for end in (0, 1))
            yield _name(file), f"part {part + 1} of {options.parts}", 512, chains[low:high]
    for file in sorted((data / "traces").glob("agentic_*.jsonl.gz")):
        for seed in seeds:
            text = f"agentic:{file}?closed=false&arrivals=poisson&rate={options.sessions_per_min / 60}&seed={seed}"
            yield _name(file), f"seed {seed}", 64 * JOINED, list(chains_of(open_workload(text), JOINED))
    for file in sorted((data / "lengths").glob("sharegpt_*.csv.gz")):
        for seed in seeds:
            text = (
                f"lengths:{file}?think={options.think}&arrivals=poisson&rate={options.conversations_per_min / 60}"
                f"&block={SHAREGPT_BLOCK}&seed={seed}"
            )
            yield _name(file), f"seed {seed}", SHAREGPT_BLOCK, list(chains_of(open_workload(text)))


def _name(file: Path) -> str:
    return file.name.partition(".")[0]


def row(trace: Trace, share: float, costs: Price) -> Row:
    name, draw, block_tokens, chains = trace
    blocks = len({key for chain in chains for key in chain})
    capacity = max(1, int(share * blocks))
    saved_s = {
        kind.name: replay(chains, ByCost(capacity, costs) if kind is ByCost else kind(capacity), costs).saved_s
        for kind in KINDS.values()
    }
    foreseen = [hindsight(chains, capacity, costs, by_price) for by_price in (False, True)]
    saved_s["hindsight"] = max(one.saved_s for one in foreseen)
    whole_s = foreseen[0].whole_s
    saved = {policy: seconds / whole_s for policy, seconds in saved_s.items()}
    return Row(name, draw, share, block_tokens, capacity, blocks, whole_s, saved)


def table(rows: Sequence[Row]) -> list[str]:
    names = [*[name for name in KINDS if name != "lru"], "hindsight"]
    heads = ["trace", "block", "capacity", "of", "lru saves", *[f"{name}/lru" for name in names]]
    cells = [
        [
            f"{one.trace}, {one.draw}", str(one.block_tokens), str(one.capacity), str(one.blocks),
            f"{one.saved['lru']:.3f}", *[f"{one.gain(name):.3f}" for name in names],
        ]
        for one in rows
    ]  # fmt: skip
    return aligned([heads, *cells])


def rows_of(options: argparse.Namespace, file: RowFile) -> list[Row]:
    """Those that are asked for; what the file has is not made again."""
    price_of, rows = prices(options.cost_model), []
    known = {(one.trace, one.draw, one.share): one for one in (Row(**fields) for fields in file.rows)}
    for trace in traces(options):
        name, draw, tokens, _ = trace
        for share in map(float, options.shares.split(",")):
            one = known.get((name, draw, share))
            rows.append(one or Row(**file.add(asdict(row(trace, share, price_of(tokens))))))
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--shares", default=SHARES, help="capacities, as shares of the distinct blocks")
    parser.add_argument("--sessions-per-min", type=float, default=3.0)
    parser.add_argument("--conversations-per-min", type=float, default=60.0)
    parser.add_argument("--think", type=float, default=60.0, help="mean pause in ShareGPT's conversations, seconds")
    parser.add_argument("--first-seed", type=int, default=0, help="others than those that a policy was looked at with")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--parts", type=int, default=1, help="stretches of a recorded order, each served by itself")
    parser.add_argument("--cost-model", help="cost model that gives the prices; default: FLOPs")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    settings = {name: getattr(options, name) for name in SETTINGS} | {"versions": versions()}
    try:
        file = RowFile.read(options.json, settings)
    except ValueError as error:
        parser.error(str(error))
    rows = rows_of(options, file)
    if not rows:
        parser.error(
            f"{options.data}: holds no traces/mooncake_*.jsonl.gz, traces/agentic_*.jsonl.gz or "
            "lengths/sharegpt_*.csv.gz"
        )
    print("\n".join([*table(rows), *(lines := bars(rows))]))
    return int(any(line.startswith("missed") for line in lines))


if __name__ == "__main__":
    sys.exit(main())
