"""The matrix in regimes: where to switch kvpolicy on, and where not.

    python benchmarks/matrix_regimes.py [--full] [--hybrid] [--machine M] [--kind K] [--load L] [--caching on|off]
        [--shape S] [--seeds N] [--requests N] [--jobs N] [--json FILE]

Regimes are those of ``regimes.py`` and, simulated by vLLM's own scheduler, ``regimes_hybrid.py``. Without ``--full``
they are a fraction of the crossed axes: one axis at a time around an H100 at 1.2 of its capacity, and the corners in
which most is expected; with it all of them. The two hybrid ones, which take the longest, come with ``--hybrid`` or
``--shape hybrid``. ``--machine`` and the other axes leave those that are asked for. Finished
runs are in ``--cache``: an interrupted matrix goes on where it was.

In each regime, on the same requests: stock vLLM (two classes: its priority scheduling), its watermarks, thresholds by
length, always-swap, the learned policy (cheapest by attributed cost), and the order that suits the regime with each of
the three. The best watermark and the best threshold are those of the lowest headline, chosen with hindsight, which is
in their favour. Everything is a ratio over stock vLLM with a 95% interval over the seeds. The headline is

    one class, decodes alone    mean end-to-end time
    two classes                 99th percentile of the urgent ones' time to first token
    rollouts                    time until all are done

beside the output tokens per second (of two classes, the batch's in its steady part). The bound (``headroom.py``: tax x
p / d) is that of the runs of stock vLLM, in share of its throughput. What the learned policy took of it is its gain in
throughput, where requests come as fast as they can be served or faster; else throughput is that of the arrivals.

The verdict goes by rules:

    on         the headline or tokens/s is better by 1% or more beyond its interval, and neither worse by 1% beyond it
    order      the same of the order with the learned policy, with 5% of the headline
    undecided  the means are so, but their intervals, over so few seeds, do not tell
    do not     else
    as good    a rival whose headline and tokens/s are at most 1% behind

Virtual time: the figures are the same in every run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import nan
from pathlib import Path
from statistics import fmean
from typing import Any

import regimes_hybrid
from order_places import Arm, add_arguments, run_cells
from regimes import (
    BATCH,
    KINDS,
    LATENT,
    LOADS,
    MACHINES,
    PLAIN,
    ROLLOUTS,
    TWO,
    URGENT,
    WINDOWS,
    Regime,
    default_design,
    full_design,
    hardware_of,
    hybrid_design,
)

from kvpolicy.stats import Ratio, student_ratio
from kvpolicy.study.cache import Result
from kvpolicy.study.report import aligned
from kvpolicy.workload import Workload

MIN_GAIN, MIN_ORDER_GAIN, AS_GOOD = 0.01, 0.05, 0.01
CAPACITY_LOAD = 1.0
"""From this share of capacity on, throughput is what the server can do."""
Runs = Mapping[Arm, Sequence[Result]]
Figure = Callable[[Result], float]
ON, ORDER, BOTH, NOT = "on", "only with an order", "on, more with an order", "do not"
MAYBE_ON, MAYBE_ORDER = "undecided", "undecided, with an order"


def headline_of(kind: str) -> tuple[str, Figure]:
    """Its name, and what it is; lower is better."""
    if kind == TWO:
        return "urgent TTFT p99", lambda result: float(result["classes"][URGENT]["ttft_s"]["p99"])
    if kind == ROLLOUTS:
        return "time until all are done", lambda result: float(result["makespan_s"])
    return "mean e2e", lambda result: float(result["e2e_s"]["mean"])


def rate_of(kind: str) -> Figure:
    """Output tokens per second."""
    if kind == TWO:
        return lambda result: float(result["classes"][BATCH]["steady_tok_s"])
    return lambda result: float(result["throughput_tok_s"])


def more_of(kind: str) -> Mapping[str, Figure]:
    """What is told besides."""
    if kind == TWO:
        return {"batch e2e": lambda result: float(result["classes"][BATCH]["e2e_s"]["mean"])}
    return {
        "TTFT": lambda result: float(result["ttft_s"]["mean"]),
        "e2e p99": lambda result: float(result["e2e_s"]["p99"]),
        "longest gap p99": lambda result: float(result["longest_gap_s"]["p99"] or nan),
    }


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one arm, over stock vLLM."""

    arm: Arm
    headline: Ratio
    rate: Ratio
    more: Mapping[str, Ratio]
    longest_pause_s: float
    preemptions: float

    def gains(self, least: float) -> bool:
        """Beyond its interval, with nothing lost beyond another."""
        better = _below(self.headline, 1 - least) or _above(self.rate, 1 + MIN_GAIN)
        return better and not (_worse(self.headline) or _slower(self.rate))

    def may_gain(self, least: float) -> bool:
        """Whether the means are better, and neither is worse."""
        better = self.headline.value <= 1 - least or self.rate.value >= 1 + MIN_GAIN
        return better and self.headline.value < 1 + MIN_GAIN and self.rate.value > 1 - MIN_GAIN

    def as_good_as(self, other: Figures) -> bool:
        behind = self.headline.value / other.headline.value - 1
        return behind <= AS_GOOD and self.rate.value >= other.rate.value * (1 - AS_GOOD)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"arm": self.arm.text()}


def _below(ratio: Ratio, limit: float) -> bool:
    return ratio.high is not None and ratio.high < 1 and ratio.value <= limit


def _above(ratio: Ratio, limit: float) -> bool:
    return ratio.low is not None and ratio.low > 1 and ratio.value >= limit


def _worse(headline: Ratio) -> bool:
    return _above(headline, 1 + MIN_GAIN)


def _slower(rate: Ratio) -> bool:
    return _below(rate, 1 - MIN_GAIN)


@dataclass(frozen=True, slots=True)
class Row:
    """A regime and what was found in it."""

    regime: Regime
    simulator: str
    seeds: int
    rate_per_s: float
    preemptions: float
    tax: float
    price_ratio: float | None
    bound: float
    share_of_bound: float | None
    """What the learned policy took of it; None below capacity, and without a bound of 0.1% at least."""
    arms: Mapping[str, Figures]
    """``watermark``, ``threshold`` (the best ones), ``swap``, ``learned``, ``order, recompute``, ``order, learned``,
    and, of a hybrid model, vLLM's flags."""
    verdict: str
    as_good: tuple[str, ...]
    """Rivals that do as well as what is recommended."""

    def to_dict(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in ("regime", "arms")}
        return {
            "regime": asdict(self.regime) | {"order": self.regime.order},
            "headline": headline_of(self.regime.kind)[0],
            **values,
            "arms": {name: one.to_dict() for name, one in self.arms.items()},
        }


MIN_BOUND = 1e-3
STOCK, WATERMARK, THRESHOLD, SWAP, LEARNED = "stock", "watermark", "threshold", "swap", "learned"
ORDERED, ORDER_SWAP, ORDER_RECOMPUTE = "order, learned", "order, swap", "order, recompute"


def row_of(regime: Regime, simulator: str, rate_per_s: float, runs: Runs) -> Row:
    stock = runs[regime.stock]
    arms = {name: figures_of(regime, arm, runs) for name, arm in named(regime, runs).items()}
    said = [result["headroom"] for result in stock]
    bound = fmean(one["bound"] for one in said)
    gain = fmean(
        result["throughput_tok_s"] / other["throughput_tok_s"] - 1
        for result, other in zip(runs[arms[LEARNED].arm], stock, strict=True)
    )
    told = bound >= MIN_BOUND and (regime.load >= CAPACITY_LOAD or (regime.load == 0 and regime.kind != TWO))
    verdict = verdict_of(arms)
    return Row(
        regime, simulator, len(stock), rate_per_s, fmean(sum(one["preemptions"].values()) for one in stock),
        fmean(one["tax"] for one in said), _mean([one["price_ratio"] for one in said]), bound,
        gain / bound if told else None, arms, verdict, as_good(arms, verdict),
    )  # fmt: skip


def named(regime: Regime, runs: Runs) -> dict[str, Arm]:
    """The arms by what they are, of watermarks and thresholds the best."""
    take, stock = headline_of(regime.kind)[1], regime.stock

    def best(arms: Sequence[Arm]) -> Arm:
        return min(arms, key=lambda arm: fmean(map(take, runs[arm])))

    found = {
        WATERMARK: best([arm for arm in runs if arm.watermark]),
        THRESHOLD: best([arm for arm in runs if arm.how.startswith("threshold:")]),
    }
    for arm in runs:
        if arm.order == stock.order and arm != stock and arm not in found.values() and not arm.watermark:
            if not arm.how.startswith("threshold:"):
                found[arm.how] = arm
        elif arm.order != stock.order:
            found[f"order, {arm.how}"] = arm
    return found


def figures_of(regime: Regime, arm: Arm, runs: Runs) -> Figures:
    results, stock = runs[arm], runs[regime.stock]

    def over(take: Figure) -> Ratio:
        return student_ratio(list(map(take, results)), list(map(take, stock)))

    return Figures(
        arm, over(headline_of(regime.kind)[1]), over(rate_of(regime.kind)),
        {name: over(take) for name, take in more_of(regime.kind).items()},
        max(float(one["longest_pause_s"] or 0.0) for one in results),
        fmean(sum(one["preemptions"].values()) for one in results),
    )  # fmt: skip


def verdict_of(arms: Mapping[str, Figures]) -> str:
    learned, order = arms[LEARNED], arms[ORDERED]
    adds = order.headline.value < learned.headline.value - MIN_ORDER_GAIN
    on, ordered = learned.gains(MIN_GAIN), adds and order.gains(MIN_ORDER_GAIN)
    if on or ordered:
        return BOTH if on and ordered else ON if on else ORDER
    if learned.may_gain(MIN_GAIN):
        return MAYBE_ON
    return MAYBE_ORDER if adds and order.may_gain(MIN_ORDER_GAIN) else NOT


def as_good(arms: Mapping[str, Figures], verdict: str) -> tuple[str, ...]:
    """Rivals of the arm that the verdict is about: with an order, the same order with a fixed action, too."""
    if verdict == NOT:
        return ()
    ours = arms[ORDERED if verdict in (ORDER, BOTH, MAYBE_ORDER) else LEARNED]
    rivals = [name for name in arms if name not in (LEARNED, ORDERED)]
    return tuple(name for name in rivals if arms[name].as_good_as(ours))


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


# ---- runs ----


def measured(regime: Regime, options: argparse.Namespace) -> Row:
    """Capacity first, then all arms on the same requests."""
    if regime.shape == WINDOWS:
        return _by_scheduler(regime, options)
    hardware, seeds = hardware_of(regime, options.cache / "configs"), range(options.seeds)
    plain = Arm()
    whole = [regime.together(seed) for seed in seeds]
    runs = run_cells(
        [{plain: [regime.cell(plain, hardware, one, seed) for seed, one in zip(seeds, whole, strict=True)]}],
        options.jobs, options.cache, options.fresh,
    )  # fmt: skip
    rates = [capacity_of(result, one) for result, one in zip(runs[0][plain], whole, strict=True)]
    works = [regime.workload(seed, rate) for seed, rate in zip(seeds, rates, strict=True)]
    wanted = {
        arm: [regime.cell(arm, hardware, work, seed) for seed, work in zip(seeds, works, strict=True)]
        for arm in regime.arms()
    }
    (found,) = run_cells([wanted], options.jobs, options.cache, options.fresh)
    return row_of(regime, "builtin", regime.load * fmean(rates), found)


def capacity_of(result: Result, whole: Workload) -> float:
    """Requests per second, of one seed's own requests."""
    return float(result["steady_tok_s"]) / fmean(request.output_tokens for request in whole)


def _by_scheduler(regime: Regime, options: argparse.Namespace) -> Row:
    seeds = range(options.seeds)
    whole = [regime.together(seed) for seed in seeds]

    def run(arms: Sequence[Arm], works: Sequence[Any]) -> dict[Arm, list[Result]]:
        tasks = [regimes_hybrid.Task(regime, arm, work) for arm in arms for work in works]
        results = regimes_hybrid.run_all(tasks, options.jobs, options.cache, options.fresh)
        return {arm: results[at * len(works) : (at + 1) * len(works)] for at, arm in enumerate(arms)}

    alone = run([regime.stock], whole)[regime.stock]
    rates = [capacity_of(result, one) for result, one in zip(alone, whole, strict=True)]
    works = [regime.workload(seed, rate) for seed, rate in zip(seeds, rates, strict=True)]
    found = run(regimes_hybrid.arms(regime), works)
    return row_of(regime, "vLLM's scheduler", regime.load * fmean(rates), found)


# ---- for a person ----

HEAD = [
    "regime", "preempted", "tax", "p/d", "bound", "taken", "best watermark", "best threshold", "always-swap",
    "learned", "order, recompute", "order, learned", "verdict", "as good",
]  # fmt: skip


def cells_of(row: Row) -> list[str]:
    def both(name: str) -> str:
        if name not in row.arms:
            return "-"
        one = row.arms[name]
        return f"{one.headline.value:.3f}; {one.rate.value:.3f}"

    share = "-" if row.share_of_bound is None else f"{row.share_of_bound:.0%}"
    return [
        row.regime.text(), f"{row.preemptions:.0f}", f"{row.tax:.2f}",
        "-" if row.price_ratio is None else f"{row.price_ratio:.3f}", f"{row.bound:.1%}", share,
        *(both(name) for name in (WATERMARK, THRESHOLD, SWAP, LEARNED, ORDER_RECOMPUTE, ORDERED)),
        row.verdict, ", ".join(row.as_good) or "-",
    ]  # fmt: skip


def lines_of(row: Row) -> list[str]:
    """A regime's arms with intervals, one line each."""
    head = f"{row.regime.text()}; {row.simulator}; bound {row.bound:.2%}; {row.verdict}"
    return [head] + [
        f"  {one.arm.text():48} {headline_of(row.regime.kind)[0]} {one.headline.text()}, tokens/s {one.rate.text()}, "
        + ", ".join(f"{name} {ratio.value:.3g}" for name, ratio in one.more.items())
        + f", longest pause {one.longest_pause_s:.0f} s"
        for one in row.arms.values()
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _arguments(arguments)
    design = chosen(options)
    rows = []
    for number, regime in enumerate(design, 1):
        if regime.shape == WINDOWS and not regimes_hybrid.installed():
            print(f"left out: {regime.text()}: vLLM, whose scheduler simulates it, is not installed", flush=True)
            continue
        rows.append(measured(regime, options))
        print(f"[{number}/{len(design)}] " + "\n".join(lines_of(rows[-1])), flush=True)
        if options.json:
            write(options.json, rows)
    print("\nheadline and tokens/s over stock vLLM")
    print("\n".join(aligned([HEAD, *map(cells_of, rows)])))
    return 0


def write(path: Path, rows: Sequence[Row]) -> None:
    """All rows, one a line; after every regime, so that an interrupted matrix leaves what it has."""
    lines = ",\n".join(json.dumps(_rounded(row.to_dict())) for row in rows)
    path.write_text(f'{{"rows": [\n{lines}\n]}}\n', encoding="utf-8")


def _rounded(value: Any) -> Any:
    """Four significant digits; None for nan, which stands for what no request had."""
    if isinstance(value, float):
        return None if value != value else float(f"{value:.4g}")
    if isinstance(value, Mapping):
        return {name: _rounded(one) for name, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list | tuple) else value


def chosen(options: argparse.Namespace) -> list[Regime]:
    design = (full_design if options.full else default_design)(options.requests)
    if options.hybrid or WINDOWS in (options.shape or ()):
        design = list(dict.fromkeys([*design, *hybrid_design(options.requests)]))
    caching = {"on": (True,), "off": (False,), None: (True, False)}[options.caching]
    asked = {
        "machine": options.machine or MACHINES, "kind": options.kind or KINDS, "load": options.load or LOADS,
        "caching": caching, "shape": options.shape or SHAPES_SHOWN,
    }  # fmt: skip
    found = [regime for regime in design if all(getattr(regime, name) in values for name, values in asked.items())]
    if not found:
        where = "the full design" if options.full else "the default design; try --full"
        raise SystemExit(f"no regime with these axes in {where}")
    return found


SHAPES_SHOWN = (PLAIN, LATENT, WINDOWS)


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="all regimes, not a fraction of them")
    parser.add_argument("--hybrid", action="store_true", help="also hybrid models on an H100 and an H20, at once")
    parser.add_argument("--machine", choices=MACHINES, action="append", help="only that one")
    parser.add_argument("--kind", choices=KINDS, action="append", help="only what is served so")
    parser.add_argument("--load", type=float, choices=LOADS, action="append", help="only that; 0: all at once")
    parser.add_argument("--caching", choices=("on", "off"), help="only with prefix caching on, or off")
    parser.add_argument("--shape", choices=SHAPES_SHOWN, action="append", help="only that one")
    parser.add_argument("--requests", type=int, default=300, help="of a run of one class")
    add_arguments(parser)
    parser.set_defaults(seeds=3, jobs=0)
    options = parser.parse_args(arguments)
    for name, least in (("seeds", 2), ("requests", 16)):
        if getattr(options, name) < least:
            parser.error(f"--{name} is {getattr(options, name)}: should be {least} or more")
    return options


if __name__ == "__main__":
    sys.exit(main())
