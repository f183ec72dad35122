"""Orders of service on the real CPU engine, short of memory, against unmodified vLLM, in alternating runs.

    python benchmarks/live_orders.py --out DIR [--scenario one|two] [--policy SPEC] [--link BYTES_PER_S,LATENCY_S]
        [--learned-only] [--arm "ORDER, HOW"] [--starts N] [--seeds N] [--requests N] [--blocks N] [--load L]

The model is that of ``live_pairs.py``, as is the cost model, which is profiled and trained once for DIR; a simulated
link has one of its own. An engine without the plugin is started as anybody would start it. Engines are started
``--starts`` times; every start serves the same ``--seeds`` workloads by all arms, in random order, and intervals are
over starts.

Scenario ``one``: requests with the lengths of deepseek-r1, scaled, and Poisson arrivals at ``--load`` of the capacity,
which is the rate of finishes in the middle half of a run of unmodified vLLM in which the same requests are all there at
once. Arms: it, ``mlfq:base=32`` with always-recompute, with always-swap, and with the learned policy. Scenario ``two``:
the same lengths as batch work that is there from the beginning, and urgent requests, short, six at a time. Arms: vLLM's
priority scheduling, and ``urgent`` with each of the three. ``--arm`` adds others, each with an engine of its own: an
order with ``learned``, ``always-swap`` or ``always-recompute``, or unmodified vLLM with its own watermark, as in
``--arm "fcfs, always-swap" --arm "gittins:quantum=16, learned" --arm "priority, watermark 0.05"``. They have no bars.

Printed are p / d at the batch that ran, from a recorded run under the order, and ratios over unmodified vLLM. All
tokens have to be the same, but for ties. Writes ``live_orders.json`` into DIR. Exits 1 where a bar is missed, tokens
differ, or p / d is below 0.2.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from live_pairs import EXTENT, MIN_PRICE_RATIO
from matrix_bars import MET, Verdict

from kvpolicy.errors import KVPolicyError
from kvpolicy.evaluation.log_headroom import log_headroom
from kvpolicy.fields import WrongValue
from kvpolicy.hardware.link import SimulatedLink
from kvpolicy.order import load_order
from kvpolicy.settings import Measurement
from kvpolicy.stats import Ratio, geometric_means, student_ratio
from kvpolicy.study.report import aligned
from kvpolicy.trace import read
from kvpolicy.training import train
from kvpolicy.workload import Workload
from kvpolicy.workload.near_capacity import BURST, CONTEXT_TOKENS, arriving, at_once, with_urgent
from kvpolicy_vllm.bench.exactness import Comparison
from kvpolicy_vllm.bench.live_scenarios import (
    BLOCK_SIZE,
    FIGURES,
    HOST_GIB,
    ONE_CLASS,
    TWO_CLASSES,
    capacity_of,
    compared,
    made_llm,
)
from kvpolicy_vllm.bench.overload import STOCK, Arm, Arms, Run, Settings
from kvpolicy_vllm.bench.run_profile import profile

LEARNED, RECOMPUTE, SWAP = "learned", "always-recompute", "always-swap"
HOWS = (LEARNED, SWAP, RECOMPUTE)
VLLMS_OWN = ("fcfs", "priority")
"""Orders that unmodified vLLM serves by."""
ORDERS: Mapping[str, tuple[str, str]] = {ONE_CLASS: ("fcfs", "mlfq:base=32"), TWO_CLASSES: ("priority", "urgent")}
"""Unmodified vLLM's scheduling policy, and the order that is judged."""
WARM_UP_REQUESTS = 16


BARS: Mapping[str, Sequence[tuple[str, float, bool]]] = {
    "one": (("e2e per token", 1 / 1.7, True),),
    "two": (("urgent TTFT p99", 1 / 1.8, True), ("batch tok/s", 0.97, False)),
}
"""Figure of the learned policy over unmodified vLLM, its limit, and whether it is the most or the least."""


@dataclass(frozen=True, slots=True)
class Extra:
    """An arm of ``--arm``."""

    text: str
    """``ORDER, HOW``, which names it in tables."""
    order: str
    how: str
    """One of :data:`HOWS`; empty for unmodified vLLM with a watermark."""
    watermark: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Extra:
        """Raises WrongValue for an order or a way that there is not."""
        order, _, how = text.rpartition(", ")
        word, _, share = how.partition(" ")
        if word != "watermark":
            if not order or how not in HOWS:
                raise _wrong_arm(text)
            load_order(order)
            return cls(text, order, how)
        try:
            watermark = float(share)
        except ValueError:
            watermark = 0.0
        if order not in VLLMS_OWN or not 0 < watermark < 1:
            raise _wrong_arm(text)
        return cls(text, order, "", watermark)


def _wrong_arm(text: str) -> WrongValue:
    return WrongValue(
        "arm",
        f"is {text!r}, should be 'ORDER, HOW', HOW being {', '.join(HOWS)}, or 'fcfs, watermark SHARE' or "
        "'priority, watermark SHARE' with a share of the blocks between 0 and 1",
    )


@dataclass(slots=True)
class Found:
    """One scenario."""

    scenario: str
    price_ratio: float | None
    sentence: str
    capacities_per_s: tuple[float, ...]
    """By seed."""
    load: float
    """Arrivals of scenario one, as a share of it."""
    blocks: int
    runs: list[tuple[int, str, Run]] = field(default_factory=list)
    """Start, arm and run."""
    comparison: Comparison = field(default_factory=Comparison)

    def ratio(self, figure: str, arm: str, over: str = STOCK) -> Ratio:
        take = FIGURES[self.scenario][figure]
        values = {
            name: [(start, take(run)) for start, other, run in self.runs if other == name] for name in (arm, over)
        }
        means = {name: geometric_means([v for _, v in pairs], [s for s, _ in pairs]) for name, pairs in values.items()}
        return student_ratio(means[arm], means[over])

    @property
    def fixed(self) -> list[str]:
        """The fixed policies that were served."""
        served = {name for _, name, _ in self.runs}
        return [name for name in (RECOMPUTE, SWAP) if name in served]

    @property
    def extra(self) -> list[str]:
        """The arms of ``--arm``, by their texts."""
        return [name for name in dict.fromkeys(name for _, name, _ in self.runs) if name not in (STOCK, *HOWS)]

    def verdicts(self) -> list[Verdict]:
        where = f"scenario {self.scenario}"
        learned = ORDERS[self.scenario][1] + ", learned"
        return [
            Verdict(f"{learned} over unmodified vLLM: {figure}", where, self.ratio(figure, LEARNED), limit, at_most)
            for figure, limit, at_most in BARS[self.scenario]
        ]

    def over_fixed(self) -> list[tuple[str, Ratio, bool]]:
        """The learned policy over each fixed one under the same order: what is compared, by how much, and whether it is
        worse beyond its interval."""
        found = []
        for name in self.fixed:
            for figure, _, less_is_better in BARS[self.scenario]:
                ratio = self.ratio(figure, LEARNED, name)
                worse = ratio.significant and (ratio.value > 1) == less_is_better
                found.append((f"scenario {self.scenario}: learned over {name}: {figure}", ratio, worse))
        return found

    def missed(self) -> list[str]:
        missed = [one.line() for one in self.verdicts() if one.text != MET]
        missed += [f"{what} {ratio.text()}: worse" for what, ratio, worse in self.over_fixed() if worse]
        if not self.comparison.exact:
            missed += self.comparison.wrong[:3] or ["too many ties"]
        if self.price_ratio is None or self.price_ratio < MIN_PRICE_RATIO:
            missed.append(f"p / d is {self.price_ratio}, should be at least {MIN_PRICE_RATIO}")
        return missed


class Bench:
    """One folder, model, policy and link."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._out = options, options.out
        self._llm, _ = made_llm(self._out)
        self._link: SimulatedLink | None = options.link
        self.policy = options.policy or self._trained()
        self._settings = Settings(str(self._llm), True, options.blocks + 1, BLOCK_SIZE, CONTEXT_TOKENS)

    def _trained(self) -> str:
        model = self._out / ("model" if self._link is None else "model-behind-link")
        if not model.exists():
            trace = self._out / ("profile" if self._link is None else "profile-behind-link")
            measurement = Measurement(self._llm, seed=0, link=self._link)
            profile(trace, measurement, extent=EXTENT, is_made=True)
            train([trace], model, force=True, seed=0)
        return f"cheapest:{model}"

    def arm(self, name: str, order: str, policy: str | None, trace: Path | None = None, watermark: float = 0.0) -> Arm:
        extra = () if trace is None else (("trace", trace),)
        link = self._link if policy else None
        return Arm(name, policy, link, HOST_GIB, order=order, extra=extra, own_engine=not policy, watermark=watermark)

    def extra_arms(self) -> list[Arm]:
        """Those of ``--arm``."""
        ways = {LEARNED: self.policy, SWAP: SWAP, RECOMPUTE: RECOMPUTE, "": None}
        return [self.arm(one.text, one.order, ways[one.how], watermark=one.watermark) for one in self._options.extra]

    def workload(self, scenario: str, seed: int, rate_per_s: float) -> Workload:
        batch = at_once(self._options.requests, seed)
        if scenario == ONE_CLASS:
            return arriving(batch, rate_per_s, seed)
        return with_urgent(batch, rate_per_s, self._options.urgent_rate, seed)

    def arrivals(self, scenario: str, load: float) -> str:
        if scenario == "one":
            return f"arrivals at {load:g} of it"
        return f"all there at once, urgent ones {self._options.urgent_rate:.2f}/s, {BURST} at a time"

    def measured(self, scenario: str) -> Found:
        stock_order, order = ORDERS[scenario]
        trace = self._out / f"trace-{scenario}-{int(time.time())}"
        with Arms(self._settings, self._out / "logs") as arms:
            arms.start(self.arm(STOCK, stock_order, None), self.arm(RECOMPUTE, order, RECOMPUTE, trace))
            arms.serve(STOCK, self.workload("one", 20_000, 1e6), -1)
            load = self._options.load if scenario == "one" else 1.0
            works = [at_once(self._options.requests, seed) for seed in range(self._options.seeds)]
            capacities = tuple(capacity_of(arms.serve(STOCK, work, -1)) for work in works)
            arms.serve(RECOMPUTE, self.workload(scenario, 10_001, load * fmean(capacities)), -1)
        won = log_headroom([read(trace)])
        found = Found(scenario, won.price_ratio, won.sentence(), capacities, load, self._options.blocks)
        print(
            f"{scenario}: {self._options.requests} requests, {found.blocks} blocks of {BLOCK_SIZE}, capacity by seed "
            f"{', '.join(f'{rate:.2f}' for rate in capacities)}/s, {self.arrivals(scenario, load)}, host memory "
            f"{HOST_GIB:g} GiB, p / d "
            f"{found.price_ratio}; {found.sentence}",
            flush=True,
        )
        for start in range(self._options.starts):
            self._start(start, stock_order, order, found)
            print("\n".join(table(found)), flush=True)
        return found

    def _start(self, start: int, stock_order: str, order: str, found: Found) -> None:
        rng = random.Random(f"{start}")
        with Arms(self._settings, self._out / "logs") as arms:
            fixed = {} if self._options.learned_only else {RECOMPUTE: RECOMPUTE, SWAP: SWAP}
            hows = {LEARNED: self.policy, **fixed}
            judged = (self.arm(name, order, how) for name, how in hows.items())
            arms.start(self.arm(STOCK, stock_order, None), *judged, *self.extra_arms())
            for name in arms.names:
                arms.serve(name, at_once(WARM_UP_REQUESTS, 20_000), -1)
            for seed in range(self._options.seeds):
                work = self.workload(found.scenario, seed, found.load * found.capacities_per_s[seed])
                runs = {name: arms.serve(name, work, start) for name in rng.sample(arms.names, len(arms.names))}
                for name, run in runs.items():
                    found.runs.append((start, name, run))
                    if name != STOCK:
                        found.comparison += compared(arms, work, runs[STOCK], run)


def table(found: Found) -> list[str]:
    figures = FIGURES[found.scenario]
    cells = [["over unmodified vLLM", *figures, "preempted", "swapped", "recomputed", "moved MB"]]
    names = {STOCK: "unmodified vLLM, means"}
    names |= {name: f"{ORDERS[found.scenario][1]}, {name}" for name in (*found.fixed, LEARNED)}
    for name, shown_name in (names | {name: name for name in found.extra}).items():
        runs = [run for _, other, run in found.runs if other == name]
        shown = [
            f"{fmean(map(take, runs)):.3g}" if name == STOCK else found.ratio(figure, name).text()
            for figure, take in figures.items()
        ]
        cells.append(
            [
                shown_name,
                *shown,
                f"{fmean(sum(run.preemptions.values()) for run in runs):.0f}",
                f"{fmean(run.preemptions['swap'] for run in runs):.0f}",
                f"{fmean(run.recomputed_tokens for run in runs):.0f}",
                f"{fmean(run.moved_bytes for run in runs) / 1e6:.0f}",
            ]
        )
    comparison = found.comparison
    runs_of = sum(name == STOCK for _, name, _ in found.runs)
    return [
        *aligned(cells),
        f"{runs_of} runs of each arm; {comparison.tokens} tokens, {len(comparison.wrong)} differ, "
        f"{comparison.ties} ties; intervals: 95% over starts",
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _arguments(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(options)
    missed, written = [], {}
    for scenario in options.scenario or ORDERS:
        found = bench.measured(scenario)
        print("\n".join(one.line() for one in found.verdicts()))
        print("\n".join(f"{what} {ratio.text()}" for what, ratio, _ in found.over_fixed()))
        missed += found.missed()
        written[scenario] = {
            "price_ratio": found.price_ratio,
            "capacities_per_s": found.capacities_per_s,
            "load": found.load,
            "tokens": found.comparison.tokens,
            "ratios": {
                f"{name}: {figure}": found.ratio(figure, name).to_dict()
                for name in (*found.fixed, LEARNED, *found.extra)
                for figure in FIGURES[scenario]
            },
            "learned over": {
                f"{name}: {figure}": found.ratio(figure, LEARNED, name).to_dict()
                for name in found.fixed
                for figure in FIGURES[scenario]
            },
        }
        (options.out / "live_orders.json").write_text(json.dumps(written, indent=1))
    print("\n".join(missed))
    return 1 if missed else 0


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scenario", choices=ORDERS, action="append", help="only that one")
    parser.add_argument("--policy", help="such as cheapest:FOLDER; without it a cost model is trained in DIR")
    parser.add_argument("--link", dest="link_text", help="simulated link, as BYTES_PER_S,LATENCY_S")
    parser.add_argument("--learned-only", action="store_true", help="leave the fixed policies out")
    parser.add_argument("--arm", action="append", default=[], help="'ORDER, HOW': another arm")
    parser.add_argument("--starts", type=int, default=5, help="of all engines")
    parser.add_argument("--seeds", type=int, default=3, help="workloads of every start")
    parser.add_argument("--requests", type=int, default=160, help="of each workload, urgent ones apart")
    parser.add_argument("--blocks", type=int, default=130, help="of 32 tokens")
    parser.add_argument("--load", type=float, default=1.2, help="of scenario one, as a share of capacity")
    parser.add_argument("--urgent-rate", type=float, default=3.0, help="urgent requests per second")
    options = parser.parse_args(arguments)
    for name, least in (("starts", 2), ("seeds", 1), ("requests", 8), ("blocks", 13)):
        if getattr(options, name) < least:
            parser.error(f"--{name} is {getattr(options, name)}: should be {least} or more")
    for name in ("load", "urgent_rate"):
        if not 0 < getattr(options, name) < float("inf"):
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}: should be above 0")
    try:
        options.extra = [Extra.parse(text) for text in dict.fromkeys(options.arm)]
    except KVPolicyError as error:
        parser.error(f"--{error}")
    options.link = None if options.link_text is None else SimulatedLink.parse(options.link_text)
    return options


if __name__ == "__main__":
    sys.exit(main())
