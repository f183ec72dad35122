"""The plugin with a learned policy against unmodified vLLM on the real CPU engine, short of memory, in pairs.

    python benchmarks/live_pairs.py --out DIR [--policy SPEC] [--caching on|off] [--requests N] [--memory-share S]
        [--pairs-per-start N] [--max-pairs N] [--half-width W] [--seed N]

Both engines are processes of their own; the one without the plugin is started as anybody would start it. Each pair is
one workload that both serve, in random order; engines are started anew every ``--pairs-per-start`` pairs, because two
processes of the same program differ in speed for as long as they live. The interval is therefore over starts. Pairs are
added until its half width is at most ``--half-width`` (after five starts), or there are ``--max-pairs``. Compared is
the CPU time of the engine's process per workload, which other work on the machine disturbs less than wall time, and
throughput. The tokens of a pair have to be the same, but for ties.

The model is a Llama of 26 million float32 parameters, made from a seed, on which a recomputed token costs a good part
of a decoded one. How much, p / d at the batch that runs (``kvpolicy/headroom.py``), is measured from a recorded trace
and printed; it should be at least 0.2, or there is little to win. Without ``--policy`` a cost model is profiled and
trained first, once for DIR. That trace is of a server in shadow mode with the same policy: what ``kvpolicy shadow``
says of it, as a ratio of engine time, stands beside the measured ratio. The same requests are replayed by the built-in
simulator, with step and copy times fitted on the recorded traces, and its ratio stands there, too.

Writes ``live_pairs.json`` into DIR. Exits 1 where tokens differ, p / d is below 0.2, or the learned policy takes
significantly more CPU time.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from fidelity_real import FittedTimes, calibrate

from kvpolicy import policy
from kvpolicy.evaluation.intended_swaps import HOUR_S
from kvpolicy.evaluation.log_headroom import log_headroom
from kvpolicy.evaluation.shadow_run import ShadowSavings, savings_of
from kvpolicy.settings import Measurement
from kvpolicy.simulator import Link, Server
from kvpolicy.simulator.builtin import Builtin
from kvpolicy.stats import Ratio, geometric_means, student_ratio
from kvpolicy.study.report import aligned
from kvpolicy.trace import Header, read
from kvpolicy.training import train
from kvpolicy.workload import Workload
from kvpolicy.workload.near_capacity import CONTEXT_TOKENS, at_once
from kvpolicy_vllm.bench.exactness import Comparison
from kvpolicy_vllm.bench.live_scenarios import BLOCK_SIZE, compared, made_llm
from kvpolicy_vllm.bench.overload import STOCK, Arm, Arms, Settings
from kvpolicy_vllm.bench.profile_parts import Extent
from kvpolicy_vllm.bench.run_profile import profile

EXTENT = Extent(
    (32,), states=52, passes=2, repeats=1, check_pairs=2, max_tokens=512, max_others=15, max_batch_tokens=4000,
    model_tokens=2048, max_extra=1,
)  # fmt: skip
RUNNING, STEP_TOKENS = 128, 2048
CACHING = {"on": True, "off": False}
LEARNED, RECOMPUTE, SWAP, SHADOW = "learned", "always-recompute", "always-swap", "shadow"
MIN_PRICE_RATIO = 0.2
MIN_STARTS = 5
"""Fewer starts give intervals that are too narrow, as it is they that say when it is enough."""
WARM_UP_REQUESTS = 16


@dataclass(frozen=True, slots=True)
class CachingArm(Arm):
    """An arm whose engine has prefix caching or not, records a trace or not, and executes what it chooses or not."""

    prefix_caching: bool = True
    trace: str = ""
    shadow: bool = False

    def arguments(self) -> dict[str, Any]:
        values = Arm.arguments(self) | {"enable_prefix_caching": self.prefix_caching}
        if self.trace:
            values["kv_transfer_config"]["kv_connector_extra_config"] |= {"trace": self.trace, "shadow": self.shadow}
        return values


@dataclass(frozen=True, slots=True)
class Pair:
    """One workload, served by both and replayed."""

    start: int
    seed: int
    cpu_s: dict[str, float]
    makespan_s: dict[str, float]
    preemptions: dict[str, dict[str, int]]
    replayed_s: dict[str, float]
    wall_s: float
    """Of the pair in all."""


@dataclass(slots=True)
class Figures:
    """With prefix caching, or without."""

    prefix_caching: bool
    price_ratio: float | None
    sentence: str
    """What there was to win under recompute."""
    forecast: tuple[float, float, float] | None
    """Engine time with the policy over that without, and its 95% interval, as ``kvpolicy shadow`` says of a run in
    shadow mode; None where it cannot tell."""
    device_blocks: int
    pairs: list[Pair] = field(default_factory=list)
    comparison: Comparison = field(default_factory=Comparison)

    def ratio(self, name: str) -> Ratio:
        """The learned policy over unmodified vLLM, over starts; below 1 the learned one takes less time."""
        starts = [pair.start for pair in self.pairs]
        values = {
            arm: geometric_means([getattr(pair, name)[arm] for pair in self.pairs], starts) for arm in (LEARNED, STOCK)
        }
        return student_ratio(values[LEARNED], values[STOCK])

    def half_width(self) -> float | None:
        """None before there are enough starts."""
        ratio = self.ratio("cpu_s")
        return None if ratio.low is None or ratio.high is None or ratio.pairs < MIN_STARTS else ratio.high - ratio.value

    def wide(self, half_width: float) -> str:
        """What to say where the pairs did not suffice for an interval as narrow as that; empty where they did."""
        reached = self.half_width()
        if reached is not None and reached <= half_width:
            return ""
        shown = "unknown" if reached is None else f"{reached:.3f}"
        return f"the interval's half width is {shown}, not {half_width:g}: take more pairs (--max-pairs)"

    def missed(self) -> list[str]:
        """What is not as it should be, in words."""
        missed = [] if self.comparison.exact else list(self.comparison.wrong[:3]) or ["too many ties"]
        if self.price_ratio is None or self.price_ratio < MIN_PRICE_RATIO:
            ratio_text = "unknown" if self.price_ratio is None else f"{self.price_ratio:.3f}"
            missed.append(f"p / d is {ratio_text}, should be at least {MIN_PRICE_RATIO}")
        ratio = self.ratio("cpu_s")
        if ratio.significant and ratio.value > 1:
            missed.append(f"the learned policy takes {ratio.text()} times the CPU time")
        return missed


class Bench:
    """One folder, model and policy."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._out: Path = options.out
        self._llm, _ = made_llm(self._out)
        self.policy = options.policy or self._trained()

    def _trained(self) -> str:
        model = self._out / "model"
        if not model.exists():
            trace = self._out / "profile"
            profile(trace, Measurement(self._llm, seed=self._options.seed), extent=EXTENT, is_made=True)
            train([trace], model, force=True, seed=self._options.seed)
        return f"cheapest:{model}"

    def _workload(self, seed: int, requests: int | None = None) -> Workload:
        return at_once(requests or self._options.requests, seed)

    def _settings(self) -> Settings:
        needed = sum(math.ceil(one.total_tokens / BLOCK_SIZE) for one in self._workload(0).requests)
        blocks = max(math.ceil(CONTEXT_TOKENS / BLOCK_SIZE) + 1, round(self._options.memory_share * needed)) + 1
        return Settings(str(self._llm), True, blocks, BLOCK_SIZE, CONTEXT_TOKENS, RUNNING, STEP_TOKENS)

    def measured(self, prefix_caching: bool) -> Figures:
        settings = self._settings()
        name = "on" if prefix_caching else "off"
        header, times, figures = self._recorded(settings, prefix_caching, name)
        server = Server(
            BLOCK_SIZE, header.block_bytes, header.device_blocks - 1, header.host_blocks, STEP_TOKENS, RUNNING,
            CONTEXT_TOKENS, prefix_caching, link=Link(overlapped=False), hardware=header.hardware,
            geometry=header.geometry,
        )  # fmt: skip
        price_ratio = "unknown" if figures.price_ratio is None else f"{figures.price_ratio:.3f}"
        print(f"prefix caching {name}: p / d {price_ratio}; {figures.sentence}", flush=True)
        start = 0
        while not self._enough(figures):
            self._start(start, settings, server, times, figures)
            start += 1
            print(f"  {len(figures.pairs)} pairs: CPU time {figures.ratio('cpu_s').text()}", flush=True)
        return figures

    def _enough(self, figures: Figures) -> bool:
        if len(figures.pairs) >= self._options.max_pairs:
            return True
        half_width = figures.half_width() if figures.pairs else None
        return half_width is not None and half_width <= self._options.half_width

    def _recorded(self, settings: Settings, caching: bool, name: str) -> tuple[Header, FittedTimes, Figures]:
        """What steps and copies take here, and p / d, from runs of other requests under recompute and under swap."""
        folders = {one: self._out / f"trace-{name}-{one}-{int(time.time())}" for one in (SHADOW, SWAP)}
        arms = [
            CachingArm(SHADOW, self.policy, prefix_caching=caching, trace=str(folders[SHADOW]), shadow=True),
            CachingArm(SWAP, SWAP, prefix_caching=caching, trace=str(folders[SWAP])),
        ]
        with Arms(settings, self._out / "logs") as engines:
            engines.start(*arms)
            for seed in (1, 2):
                for arm in arms:
                    engines.serve(arm.name, self._workload(10_000 + seed), seed)
        recomputed, swapped = (read(folder) for folder in folders.values())
        (header,) = recomputed.headers.values()
        won = log_headroom([recomputed])
        times = calibrate(recomputed.rows("steps") + swapped.rows("steps"), swapped.rows("transfers"))
        savings = savings_of({SHADOW: recomputed})
        (self._out / f"shadow-{name}.json").write_text(json.dumps(savings.to_dict(), indent=1))
        figures = Figures(caching, won.price_ratio, won.sentence(), forecast_of(savings), settings.device_blocks)
        return header, times, figures

    def _start(self, start: int, settings: Settings, server: Server, times: FittedTimes, figures: Figures) -> None:
        """Two new engines, and the pairs that they serve."""
        rng = random.Random(f"{self._options.seed}/{figures.prefix_caching}/{start}")
        stock = CachingArm(STOCK, None, own_engine=True, prefix_caching=figures.prefix_caching)
        learned = CachingArm(LEARNED, self.policy, prefix_caching=figures.prefix_caching)
        with Arms(settings, self._out / "logs") as arms:
            arms.start(stock, learned)
            for name in arms.names:
                arms.serve(name, self._workload(20_000, WARM_UP_REQUESTS), -1)
            for _ in range(min(self._options.pairs_per_start, self._options.max_pairs - len(figures.pairs))):
                began_s = time.monotonic()
                work = self._workload(self._options.seed * 1000 + len(figures.pairs))
                runs = {name: arms.serve(name, work, start) for name in rng.sample(arms.names, 2)}
                figures.comparison += compared(arms, work, runs[STOCK], runs[LEARNED])
                figures.pairs.append(
                    Pair(
                        start,
                        work.seed,
                        {name: run.cpu_s for name, run in runs.items()},
                        {name: run.makespan_s for name, run in runs.items()},
                        {name: dict(run.preemptions) for name, run in runs.items()},
                        {
                            name: Builtin().run(work, policy.load(spec), server, times).summary.makespan_s
                            for name, spec in ((STOCK, RECOMPUTE), (LEARNED, self.policy))
                        },
                        time.monotonic() - began_s,
                    )
                )


def forecast_of(savings: ShadowSavings) -> tuple[float, float, float] | None:
    """Engine time with the policy over that without, with its interval."""
    saving = savings.per_hour
    if saving is None or not savings.busy_hours or savings.hours is None:
        return None
    busy_s = savings.busy_hours / savings.hours * HOUR_S
    return 1 - saving.mean_s / busy_s, 1 - saving.high_s / busy_s, 1 - saving.low_s / busy_s


def main(arguments: Sequence[str] | None = None) -> int:
    options = _arguments(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(options)
    found = [bench.measured(CACHING[name]) for name in options.caching or CACHING]
    print("\n".join(table(found)))
    values = [
        asdict(one) | {name: one.ratio(name).to_dict() for name in ("cpu_s", "makespan_s", "replayed_s")}
        for one in found
    ]
    (options.out / "live_pairs.json").write_text(json.dumps({"policy": bench.policy, "settings": values}, indent=1))
    missed = [f"caching {'on' if one.prefix_caching else 'off'}: {words}" for one in found for words in one.missed()]
    wide = [f"caching {'on' if one.prefix_caching else 'off'}: {one.wide(options.half_width)}" for one in found]
    print("\n".join([*missed, *(line for line in wide if not line.endswith(": "))]))
    return 1 if missed else 0


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--policy", help="such as cheapest:FOLDER; without it a cost model is trained in DIR")
    parser.add_argument("--caching", choices=CACHING, action="append", help="only with prefix caching on, or off")
    parser.add_argument("--requests", type=int, default=48, help="of each workload")
    parser.add_argument("--memory-share", type=float, default=0.33, help="of what the requests would take in all")
    parser.add_argument("--pairs-per-start", type=int, default=4)
    parser.add_argument("--max-pairs", type=int, default=80)
    parser.add_argument("--half-width", type=float, default=0.02, help="of the interval at which it is enough")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    for name in ("requests", "pairs_per_start", "max_pairs"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}: should be 1 or more")
    if not 0 < options.memory_share <= 1:
        parser.error(f"--memory-share is {options.memory_share}: should be above 0, up to 1")
    return options


def table(found: Sequence[Figures]) -> list[str]:
    cells = [["caching", "p/d", "pairs", "starts", "CPU time", "makespan", "replayed makespan", "shadow's forecast"]]
    cells[0] += ["preemptions", "swapped", "tokens, differences, ties", "s a pair"]
    for one in found:
        ratios = {name: one.ratio(name) for name in ("cpu_s", "makespan_s", "replayed_s")}
        swapped = [pair.preemptions[LEARNED]["swap"] for pair in one.pairs]
        preempted = [sum(pair.preemptions[STOCK].values()) for pair in one.pairs]
        cells.append(
            [
                "on" if one.prefix_caching else "off",
                "?" if one.price_ratio is None else f"{one.price_ratio:.2f}",
                str(len(one.pairs)),
                str(ratios["cpu_s"].pairs),
                *(ratio.text() for ratio in ratios.values()),
                "?" if one.forecast is None else "{:.3f} ({:.3f}-{:.3f})".format(*one.forecast),
                f"{fmean(preempted):.0f}",
                f"{fmean(swapped):.0f}",
                f"{one.comparison.tokens}, {len(one.comparison.wrong)}, {one.comparison.ties}",
                f"{fmean(pair.wall_s for pair in one.pairs):.0f}",
            ]
        )
    return ["learned policy over unmodified vLLM; intervals: 95% over starts", *aligned(cells)]


if __name__ == "__main__":
    sys.exit(main())
