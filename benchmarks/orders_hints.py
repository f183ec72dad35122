"""What an order of service gains by hints: chats beside prompts that nobody repeats, in simulation.

    python benchmarks/orders_hints.py --data DIR [--load X,...] [--seeds N] [--requests N] [--json FILE]

The server of ``caching_study.py``, with 64 GiB of host memory. Half of the requests are ShareGPT's conversations, each
of which asks to keep its window and names its session; the other half are prompts with the lengths of sharegpt-8k,
which say that they come ``once``. ``--load`` is the share of the capacity, as there.

Orders, each with and without a cache in host memory: vLLM's; by ``mlfq``; by hints, which puts chats before the rest;
by hints and among equals by ``mlfq``; and the last by classes that an operator granted in place of hints, which is the
same rank of something else. Ratios are to vLLM's order with the same cache, geometric means over seeds with Student's
interval.

With ``--json`` every run is written when it is done, and those that the file has are not made again.
docs/orders-hints.json has those of docs/requests.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from caching_study import NONE, Setting, numbers
from matrix_places import LLAMA_3_1_8B
from row_file import RowFile, versions

from kvpolicy.order import Order, load_order
from kvpolicy.request_marks import Hints
from kvpolicy.stats import student_ratio
from kvpolicy.study.report import aligned
from kvpolicy.workload import Workload, open_workload

CHAT, ONCE = "chat", "once"
CACHES = (NONE, "lru")
HOST_GIB = 64.0
BEHIND = "mlfq:base=256"
TIMES, FIGURES = ("ttft_s", "e2e_s"), ("throughput_tok_s", "prefix_hits", "preemptions")


NAMES = ("fcfs", BEHIND, "hints", f"hints/{BEHIND}", f"classes:{CHAT}+{ONCE}/{BEHIND}")
ORDERS: Mapping[str, Order] = {name: load_order(name) for name in NAMES}


@dataclass(frozen=True, slots=True, order=True)
class Arm:
    """What a run is of, beside its seed."""

    requests: int
    """Of each kind."""
    load: float
    cache: str
    order: str


def mixed(data: Path, count: int, seed: int) -> Workload:
    """Conversations and prompts, as many of each and over the same time, with what they say."""
    files = sorted(data.glob("lengths/sharegpt_*.csv.gz"))
    if not files:
        raise SystemExit(f"{data}: has no lengths/sharegpt_*.csv.gz")
    chats = open_workload(
        f"lengths:{files[0]}?n={count}&think=60&arrivals=poisson&rate=2&seed={seed}&block=64&hints=sessions&class={CHAT}"
    )
    begun = tuple(chats)
    rate = count / begun[-1].arrival_s
    prompts = open_workload(f"sharegpt-8k?n={count}&rate={rate}&seed={seed}&class={ONCE}")
    said = (replace(one, hints=Hints(once=True)) for one in prompts)
    together = sorted((*begun, *said), key=lambda one: one.arrival_s)
    return Workload("chats and prompts", tuple(together), seed)


def figures_of(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a run's summary that are written."""
    by_class = {name: {figure: of[figure] for figure in TIMES} for name, of in summary["classes"].items()}
    return {name: summary[name] for name in (*TIMES, *FIGURES)} | {"classes": by_class}


class Results:
    """Runs by arm and seed."""

    def __init__(self, file: RowFile) -> None:
        self._file = file
        self._runs = {(Arm(**run["arm"]), run["seed"]): run["found"] for run in file.rows}

    def serve(self, arms: Sequence[Arm], seed: int, work: Workload, setting: Setting) -> None:
        """Make the runs of one draw that there are not yet."""
        lacking = [arm for arm in arms if (arm, seed) not in self._runs]
        if not lacking:
            return
        arriving = setting.at_load(work, lacking[0].load)
        for arm in lacking:
            found = figures_of(asdict(replace(setting, order=ORDERS[arm.order]).summary(arriving, arm.cache)))
            self._runs[arm, seed] = self._file.add({"arm": asdict(arm), "seed": seed, "found": found})["found"]

    def of(self, arm: Arm, seeds: Sequence[int]) -> list[Mapping[str, Any]]:
        return [self._runs[arm, seed] for seed in seeds]


HEADS = (
    "load", "cache", "order", "chats: ttft s", "of fcfs", "e2e", "once: ttft s", "of fcfs", "e2e", "all: e2e",
    "of fcfs", "tok/s", "host", "preempted",
)  # fmt: skip


def row(arm: Arm, results: Results, seeds: Sequence[int]) -> list[str]:
    """Means over seeds, and ratios to vLLM's order with the same cache."""

    runs, stock = results.of(arm, seeds), results.of(replace(arm, order="fcfs"), seeds)

    def figure(run: Mapping[str, Any], name: str, kind: str | None) -> float:
        return float((run if kind is None else run["classes"][kind])[name]["mean"])

    def both(name: str, kind: str | None) -> list[str]:
        """The mean over seeds, and the ratio."""
        ours, theirs = ([figure(run, name, kind) for run in of] for of in (runs, stock))
        one = student_ratio(ours, theirs)
        interval = "" if one.low is None else f" ({one.low:.3f}-{one.high:.3f})"
        return [f"{fmean(ours):.3g}", f"{one.value:.3f}{interval}"]

    found = fmean(run["prefix_hits"]["host_tokens"] / run["prefix_hits"]["prompt_tokens"] for run in runs)
    return [
        f"{arm.load:g}", arm.cache, arm.order,
        *both("ttft_s", CHAT), both("e2e_s", CHAT)[0], *both("ttft_s", ONCE), both("e2e_s", ONCE)[0],
        *both("e2e_s", None), f"{fmean(run['throughput_tok_s'] for run in runs):.0f}", f"{found:.1%}",
        f"{fmean(sum(run['preemptions'].values()) for run in runs):.0f}",
    ]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--load", type=numbers, default=[0.9, 1.2], help="shares of the capacity")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=1000, help="of each kind")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    for name in ("seeds", "requests"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: should be 1 or more")
    try:
        results = Results(RowFile.read(options.json, {"versions": versions()}))
    except ValueError as error:
        parser.error(str(error))
    seeds, lines = range(options.seeds), [list(HEADS)]
    works = [mixed(options.data, options.requests, seed) for seed in seeds]
    with TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(LLAMA_3_1_8B))
        for load in options.load:
            arms = [Arm(options.requests, load, cache, order) for cache, order in product(CACHES, ORDERS)]
            for seed, work in enumerate(works):
                results.serve(arms, seed, work, Setting(config, HOST_GIB))
            lines += [row(arm, results, seeds) for arm in arms]
    print("\n".join(aligned(lines)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
