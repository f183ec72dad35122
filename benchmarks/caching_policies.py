"""What caching policies save of computing prompts, in one tier of bounded size: recorded prompts with shared prefixes.

    python benchmarks/caching_policies.py --data DIR [--shares S,S,...] [--sessions-per-min R]
        [--conversations-per-min R] [--think S] [--first-seed N] [--seeds N] [--parts N] [--cost-model MODEL]
        [--json FILE]

DIR holds ``traces/mooncake_*.jsonl.gz``, ``traces/agentic_*.jsonl.gz`` and ``lengths/sharegpt_*.csv.gz``. Every prompt
is asked for in the order of arrival and stored whole; capacities are shares of the distinct blocks. A block's price is
what Llama-3.1-8B computes for its tokens after those before it, by its FLOPs on an H100: longer prompts cost more per
token. With ``--cost-model``, a folder, a shipped model or ``analytic:DEVICE[@LINK]:CONFIG``, it is what that model says
of computing these tokens less what it says of loading them. Blocks of agentic sessions are of 1,024 tokens, sixteen of
the recorded ones; when sessions start was not recorded and is drawn, as often as there are seeds. ShareGPT's table has
lengths only: rows whose prompts grow are taken for conversations, and their starts and pauses are drawn. ``--parts``
cuts a recorded order of prompts, which no seed changes, into as many stretches, each served from an empty cache.

With ``--json`` every row is written when it is done, and those that the file has are not made again.

Printed: the share of the seconds that ``lru`` saves, and what the others save over it; beside them what hindsight
saves, the better of Belady's rule and the same by price. That is a reference and no limit.

Exits 1 where a bar is missed: where hindsight saves at least 1.3 times what ``lru`` does, ``cost`` saves at least 1.10
times (geometric mean, with a bootstrap interval over draws: seeds and parts, with all of their capacities); nowhere
less than 0.97 of the best of ``lru``, ``arc`` and ``s3fifo``.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import Any

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
RESAMPLES = 2000
SETTINGS = ("sessions_per_min", "conversations_per_min", "think", "parts", "cost_model")
"""Options on which a row depends, beside its trace and share."""


@dataclass(frozen=True, slots=True)
class Row:
    """One draw of a trace, and a capacity."""

    trace: str
    share: float
    """Capacity over distinct blocks."""
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
    data, seeds = options.data, range(options.first_seed, options.first_seed + options.seeds)
    for file in sorted((data / "traces").glob("mooncake_*.jsonl.gz")):
        chains = list(chains_of(open_workload(f"mooncake:{file}")))
        for part in range(options.parts):
            low, high = (len(chains) * (part + end) // options.parts for end in (0, 1))
            yield _named(file, f"part {part + 1} of {options.parts}"), 512, chains[low:high]
    for file in sorted((data / "traces").glob("agentic_*.jsonl.gz")):
        for seed in seeds:
            text = f"agentic:{file}?closed=false&arrivals=poisson&rate={options.sessions_per_min / 60}&seed={seed}"
            yield _named(file, f"seed {seed}"), 64 * JOINED, list(chains_of(open_workload(text), JOINED))
    for file in sorted((data / "lengths").glob("sharegpt_*.csv.gz")):
        for seed in seeds:
            text = (
                f"lengths:{file}?think={options.think}&arrivals=poisson&rate={options.conversations_per_min / 60}"
                f"&block={SHAREGPT_BLOCK}&seed={seed}"
            )
            yield _named(file, f"seed {seed}"), SHAREGPT_BLOCK, list(chains_of(open_workload(text)))


def _named(file: Path, draw: str) -> str:
    return f"{file.name.partition('.')[0]}, {draw}"


def row(trace: str, block_tokens: int, chains: Sequence[Chain], share: float, costs: Price) -> Row:
    blocks = len({key for chain in chains for key in chain})
    capacity = max(1, int(share * blocks))
    saved_s = {
        name: replay(chains, ByCost(capacity, costs) if kind is ByCost else kind(capacity), costs).saved_s
        for name, kind in KINDS.items()
    }
    foreseen = [hindsight(chains, capacity, costs, by_price) for by_price in (False, True)]
    saved_s["hindsight"] = max(one.saved_s for one in foreseen)
    return Row(trace, share, block_tokens, capacity, blocks, saved_s, foreseen[0].whole_s)


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


def mean_gain(rows: Sequence[Row]) -> float:
    return exp(fmean(log(one.gain("cost")) for one in rows))


def gain_interval(rows: Sequence[Row]) -> tuple[float, float]:
    """95% bootstrap interval of :func:`mean_gain`: draws of each trace are drawn again, with all of their rows."""
    of_trace: dict[str, dict[str, list[Row]]] = {}
    for one in rows:
        of_trace.setdefault(one.trace.partition(",")[0], {}).setdefault(one.trace, []).append(one)
    rng = random.Random(0)
    means = []
    for _ in range(RESAMPLES):
        drawn = [rng.choices([*draws.values()], k=len(draws)) for draws in of_trace.values()]
        means.append(mean_gain([one for draws in drawn for draw in draws for one in draw]))
    means.sort()
    return means[int(0.025 * RESAMPLES)], means[int(0.975 * RESAMPLES)]


def bars(rows: Sequence[Row]) -> list[str]:
    """Lines about the bars; those missed begin with ``missed``."""
    room = [one for one in rows if one.gain("hindsight") >= ROOM]
    lines = []
    if room:
        gain, (low, high) = mean_gain(room), gain_interval(room)
        taken = fmean((one.gain("cost") - 1) / (one.gain("hindsight") - 1) for one in room)
        verdict = "met" if gain >= MIN_GAIN else "missed"
        lines.append(
            f"{verdict}: where hindsight saves {ROOM} times what lru does ({len(room)} of {len(rows)}), cost saves "
            f"{gain:.3f} times (geometric mean; {low:.3f} to {high:.3f} over draws), at least {MIN_GAIN}; {taken:.0%} "
            "of the gap on average"
        )
    least = min(rows, key=lambda one: one.of_best)
    below = sum(one.of_best < MIN_OF_BEST for one in rows)
    lines.append(
        f"{'missed' if below else 'met'}: the least that cost saves of the best of {', '.join(RIVALS)} is "
        f"{least.of_best:.3f}, at least {MIN_OF_BEST} ({least.trace}, capacity {least.capacity}); less in {below} of "
        f"{len(rows)} rows"
    )
    return lines


class Results:
    """Rows in a file, which is written anew with every one of them; without a file, in memory alone.

    Raises ValueError for a file of other settings.
    """

    def __init__(self, file: Path | None, settings: Mapping[str, Any]) -> None:
        self._file, self._settings = file, dict(settings)
        self.rows: list[Row] = []
        if file is not None and file.exists():
            held = json.loads(file.read_text())
            for name, value in self._settings.items():
                if held["settings"].get(name) != value:
                    raise ValueError(f"{file}: was made with {name} {held['settings'].get(name)}, not {value}")
            self.rows = [Row(**one) for one in held["rows"]]

    def has(self, trace: str, share: float) -> bool:
        return any((one.trace, one.share) == (trace, share) for one in self.rows)

    def add(self, one: Row) -> None:
        self.rows.append(one)
        if self._file is not None:
            text = json.dumps({"settings": self._settings, "rows": [asdict(each) for each in self.rows]}, indent=1)
            part = self._file.with_name(f".{self._file.name}")
            part.write_text(text)
            part.replace(self._file)


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
    settings = {name: getattr(options, name) for name in SETTINGS}
    try:
        results = Results(options.json, settings)
    except ValueError as error:
        parser.error(str(error))
    price_of = prices(options.cost_model)
    asked = []
    for name, tokens, chains in traces(options):
        for share in map(float, options.shares.split(",")):
            asked.append((name, share))
            if not results.has(name, share):
                results.add(row(name, tokens, chains, share, price_of(tokens)))
    if not asked:
        parser.error(
            f"{options.data}: holds no traces/mooncake_*.jsonl.gz, traces/agentic_*.jsonl.gz or "
            "lengths/sharegpt_*.csv.gz"
        )
    rows = [one for one in results.rows if (one.trace, one.share) in asked]
    print("\n".join([*table(rows), *(lines := bars(rows))]))
    return int(any(line.startswith("missed") for line in lines))


if __name__ == "__main__":
    sys.exit(main())
