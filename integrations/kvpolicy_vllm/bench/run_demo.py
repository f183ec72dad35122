"""`kvpolicy demo`: measures, trains and evaluates, then serves the same overload with and without the plugin.

Everything is done twice: over the native link, and over a simulated one on which a copy takes about as long as what
swap saves. (Without an accelerator copies are so cheap that swap nearly always wins: the best policy is then a
constant.)
"""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from kvpolicy.datasets.profiles import read_dataset
from kvpolicy.datasets.threshold import BEST_THRESHOLD
from kvpolicy.errors import InputError
from kvpolicy.evaluation.replay import evaluate
from kvpolicy.hardware.link import SimulatedLink, header_link
from kvpolicy.settings import Measurement
from kvpolicy.stats import mean_and_percentiles
from kvpolicy.training import train
from kvpolicy.workload import DEEPSEEK_R1, Workload, all_at_once
from kvpolicy_vllm.bench.demo_report import DemoReport, LinkReport
from kvpolicy_vllm.bench.engine_process import EngineProcess
from kvpolicy_vllm.bench.exactness import Comparison, compare
from kvpolicy_vllm.bench.overload import (
    STOCK,
    STOCK_ORDER,
    Arm,
    Arms,
    ProgressCallback,
    Run,
    Settings,
    Targets,
    alternate,
    by_arm,
    summary,
    throughput_ratio,
    ttft_ratio,
)
from kvpolicy_vllm.bench.profile_parts import Extent
from kvpolicy_vllm.bench.progress import Bar
from kvpolicy_vllm.bench.run_profile import profile
from kvpolicy_vllm.bench.slow_link import Costs, slow_link

FIXED = ("always-recompute", "always-swap")
LEARNED = "learned"
REFERENCE = "memory enough"
ITL_FACTOR = 1.25
DEMO_JSON = "demo.json"
PARTS = ("llm", "traces", "models", "logs")
"""Entries that a demo writes into its folder besides demo.json."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much the demo does."""

    extent: Extent
    blocks: int
    """Blocks of the overload. A block is one workload that all arms serve, in random order."""
    requests: int
    """Requests per block."""
    warm_up_requests: int
    pairs: int
    """Pairs of runs without memory pressure, plugin off and on."""
    calm_requests: int
    """Requests per run without memory pressure."""
    context_tokens: int
    scale: float
    """Factor on the lengths of the public trace."""
    memory_share: float
    """Device memory of the overload, as a share of what all its requests would take at their longest."""


SHAPE = {"hidden": 512, "intermediate": 1536, "layers": 2, "spread": 0.1}
"""Shape of the demo's model, 8.4 million parameters. It is wide and flat: in a narrower, deeper model the fixed cost of
a step in Python would hide the cost of recomputed tokens, unlike in real models."""
# Lengths and loads match the overload's, so that the policy is trained on the range in which it will serve.
_EXTENT = {
    "passes": 2,
    "repeats": 1,
    "max_tokens": 512,
    "max_batch_tokens": 4000,
    "model_tokens": 2048,
    "max_extra": 1,
}
FULL = Plan(
    extent=Extent((32,), states=64, check_pairs=5, max_others=15, **_EXTENT),
    blocks=10,
    requests=48,
    warm_up_requests=32,
    pairs=8,
    calm_requests=6,
    context_tokens=384,
    scale=0.12,
    memory_share=0.33,
)
QUICK = Plan(
    extent=Extent((32,), states=52, check_pairs=2, max_others=8, **_EXTENT),
    blocks=2,
    requests=24,
    warm_up_requests=16,
    pairs=2,
    calm_requests=3,
    context_tokens=512,
    scale=0.15,
    memory_share=0.3,
)


def demo(
    out: Path | None = None,
    quick: bool = False,
    seed: int = 0,
    plan: Plan | None = None,
    order: str = STOCK_ORDER,
) -> DemoReport:
    """Run the whole loop on a small model and write ``out/demo.json``; ``out`` is by default ``out/demo``.

    ``order``: the order of service of the arms with the plugin; with another one than ``fcfs`` the arm without it is an
    engine of its own.

    An unfinished demo in ``out`` is resumed with its unfinished profile; a finished one is replaced. Raises InputError
    where ``out`` holds something else, EngineFailed where an engine fails.
    """
    out = Path("out/demo") if out is None else Path(out)
    plan = (QUICK if quick else FULL) if plan is None else plan
    _clear_folder(out)
    console = Console(stderr=True)
    console.rule("a small Llama, made from a seed")
    with EngineProcess("kvpolicy_vllm.bench.inspect_model", out / "logs" / "preparing.log") as process:
        answer = process.ask({"llm": None, "make": str(out / "llm"), "seed": seed, "shape": SHAPE})
    loop = Loop(out, Path(answer["llm"]), not answer["device"], plan, seed, console, order)
    native = loop.measure("native", None)
    link = loop.simulated_link()
    results = [native] if link is None else [native, loop.measure("simulated", link)]
    report = DemoReport(tuple(loop.overload(results)), str(out / DEMO_JSON))
    (out / DEMO_JSON).write_text(json.dumps(report.to_dict(), indent=2) + "\n")
    return report


def _clear_folder(out: Path) -> None:
    """Remove a finished demo from ``out``. Raises InputError where ``out`` holds something else."""
    strange = (
        sorted(path.name for path in out.iterdir() if path.name not in (*PARTS, DEMO_JSON)) if out.is_dir() else []
    )
    if strange:
        raise InputError(f"{out}: holds {strange[0]}, which is not from a demo; give a new folder")
    if (out / DEMO_JSON).exists():
        for part in PARTS:
            shutil.rmtree(out / part, ignore_errors=True)
        (out / DEMO_JSON).unlink()
    out.mkdir(parents=True, exist_ok=True)


@dataclass(frozen=True, slots=True)
class LinkResult:
    """Results over one link: profile, training and evaluation."""

    name: str
    link: SimulatedLink | None
    header: dict[str, Any]
    """The link as in a trace's header."""
    learned: str
    """Spec of the learned policy."""
    train: dict[str, Any]
    evaluate: dict[str, Any]

    order: str = STOCK_ORDER
    """Order of service of the arms with the plugin."""

    def arms(self) -> tuple[Arm, ...]:
        """Stock vLLM, the fixed policies, the learned one, and the best threshold unless it is one of the fixed."""
        policies = {name: name for name in FIXED} | {LEARNED: self.learned}
        threshold = self.train["best_threshold"]
        if threshold not in FIXED:
            policies[BEST_THRESHOLD] = threshold
        ours = (Arm(name, policy, self.link, order=self.order) for name, policy in policies.items())
        return (Arm(STOCK, None, self.link), *ours)


class Loop:
    """The steps of the demo, in the order of the methods."""

    def __init__(
        self,
        out: Path,
        llm: Path,
        on_cpu: bool,
        plan: Plan,
        seed: int,
        console: Console,
        order: str = STOCK_ORDER,
    ) -> None:
        self._out = out
        self._llm = llm
        self._on_cpu = on_cpu
        self._plan = plan
        self._seed = seed
        self._console = console
        self._order = order

    def measure(self, name: str, link: SimulatedLink | None) -> LinkResult:
        """Profile, train, evaluate."""
        trace, model = self._out / "traces" / name, self._out / "models" / name
        link_text = "the native link" if link is None else f"a simulated link, --link {link.text}"
        self._console.rule(f"profile, train, evaluate: {link_text}")
        profiled = profile(trace, Measurement(self._llm, link=link, seed=self._seed), extent=self._plan.extent)
        shutil.rmtree(model, ignore_errors=True)
        # Noise appears in the training report; it must not end the demo.
        trained = train([trace], model, force=True, seed=self._seed)
        learned = f"cheapest:{model}"
        evaluated = evaluate([trace], [*FIXED, learned], seed=self._seed)
        for report in (profiled, trained, evaluated):
            self._console.print(report.text(), highlight=False, markup=False, soft_wrap=True)
        return LinkResult(name, link, header_link(link), learned, trained.to_dict(), evaluated.to_dict(), self._order)

    def simulated_link(self) -> SimulatedLink | None:
        """A link on which a copy takes as long as what swap saves; None where it saves nothing over the native link."""
        native = read_dataset([self._out / "traces" / "native"])
        costs = [
            Costs(state.computed_tokens, state.mean_s["recompute"], state.mean_s["swap"]) for state in native.states
        ]
        return slow_link(costs, native.kv_bytes_per_token)

    def overload(self, links: Sequence[LinkResult]) -> list[LinkReport]:
        """Serve the same blocks by every arm of every link, and pairs of runs without memory pressure."""
        blocks = [self._workload(self._seed + 1 + block, self._plan.requests) for block in range(self._plan.blocks)]
        settings = self._settings(blocks)
        self._console.rule(
            f"overload: {len(blocks)} blocks of {self._plan.requests} requests, {blocks[0].name} lengths"
        )
        with Arms(settings, self._out / "logs") as arms, Bar("overload") as bar:
            references = self._references(arms, blocks, bar.tell)
            targets = targets_of(references)
            reports = []
            for link in links:
                self._start(arms, link, bar.tell)
                rng = random.Random(f"{self._seed}/order/{link.name}")
                runs = by_arm(alternate(arms, [arm.name for arm in link.arms()], blocks, rng, bar.tell))
                calm_runs = self._calm(arms, rng, bar.tell)
                comparison = _compare_all(references, runs)
                reports.append(self._report(link, settings, blocks, runs, calm_runs, comparison, targets))
        return reports

    def _workload(self, seed: int, requests: int) -> Workload:
        return all_at_once(DEEPSEEK_R1, requests, seed, self._plan.context_tokens, self._plan.scale)

    def _settings(self, blocks: Sequence[Workload]) -> Settings:
        size = self._plan.extent.block_sizes[0]
        needed = max(_blocks_of(workload, size) for workload in blocks)
        longest = math.ceil(self._plan.context_tokens / size) + 1
        return Settings(
            model=str(self._llm),
            on_cpu=self._on_cpu,
            device_blocks=max(longest, round(self._plan.memory_share * needed)) + 1,
            block_size=size,
            context_tokens=self._plan.context_tokens,
            step_tokens=2048 if self._on_cpu else 8192,
        )

    def _references(self, arms: Arms, blocks: Sequence[Workload], tell: ProgressCallback) -> list[Run]:
        """Serve every block by stock vLLM with memory for all requests, for reference tokens and undisturbed times."""
        tell("enough memory for all", 0, 0)
        ample_blocks = (
            max(_blocks_of(workload, arms.settings.block_size) for workload in blocks) + self._plan.requests + 1
        )
        arms.start(Arm(REFERENCE, None, device_blocks=ample_blocks))
        self._warm_up(arms, REFERENCE, tell)
        runs = [arms.serve(REFERENCE, workload, block, True, tell) for block, workload in enumerate(blocks)]
        arms.stop(REFERENCE)
        preempted = sum(sum(run.preemptions.values()) for run in runs)
        if preempted:
            raise RuntimeError(f"{preempted} preemptions with enough memory for all: the run cannot be a reference")
        return runs

    def _start(self, arms: Arms, link: LinkResult, tell: ProgressCallback) -> None:
        arms.stop(*arms.names)
        tell(f"{link.name} link", 0, 0)
        arms.start(*link.arms())
        for arm in link.arms():
            self._warm_up(arms, arm.name, tell)

    def _warm_up(self, arms: Arms, name: str, tell: ProgressCallback) -> None:
        """Serve enough requests to cause preemptions, uncounted, so that one-time work is not measured."""
        arms.serve(name, self._workload(self._seed, self._plan.warm_up_requests), -1, progress=tell)

    def _calm(self, arms: Arms, rng: random.Random, tell: ProgressCallback) -> dict[str, list[Run]]:
        """Serve requests that fit into memory together, by stock vLLM and by the learned policy."""
        capacity = arms.settings.device_blocks - 1
        workloads = []
        for pair in range(self._plan.pairs):
            workload = self._workload(self._seed + 1000 + pair, self._plan.calm_requests * 4)
            workloads.append(_fitting_requests(workload, arms.settings.block_size, capacity, self._plan.calm_requests))
        return by_arm(alternate(arms, (STOCK, LEARNED), workloads, rng, tell))

    def _report(
        self,
        link: LinkResult,
        settings: Settings,
        blocks: Sequence[Workload],
        runs: dict[str, list[Run]],
        calm_runs: dict[str, list[Run]],
        comparison: Comparison,
        targets: Targets,
    ) -> LinkReport:
        rng = random.Random(f"{self._seed}/bootstrap/{link.name}")
        rules = [name for name in (*FIXED, BEST_THRESHOLD) if name in runs]
        pairs = [(LEARNED, other) for other in (STOCK, *rules)] + [(rule, STOCK) for rule in rules]
        ratios = {f"throughput {a} / {b}": throughput_ratio(runs[a], runs[b], rng) for a, b in pairs}
        ratios |= {f"ttft {a} / {b}": ttft_ratio(runs[a], runs[b], rng) for a, b in pairs if a == LEARNED}
        return LinkReport(
            name=link.name,
            link=link.header,
            policies={arm: summary(arm_runs, targets) for arm, arm_runs in runs.items()},
            ratios=ratios,
            no_pressure_ratio=throughput_ratio(calm_runs[LEARNED], calm_runs[STOCK], rng),
            no_pressure_preemptions=sum(
                sum(run.preemptions.values()) for arm_runs in calm_runs.values() for run in arm_runs
            ),
            evaluate=link.evaluate,
            train=link.train,
            comparison=comparison,
            targets=asdict(targets)
            | {
                "from": "the same blocks with memory for all: ttft_s is the 99th percentile of their times to first "
                f"token, itl_s is {ITL_FACTOR:g} times their mean time between tokens"
            },
            workload={
                "source": blocks[0].source,
                "scale": self._plan.scale,
                "requests": self._plan.requests,
                "arrivals": "all at once",
                "order": link.order,
                "device_blocks": settings.device_blocks,
                "block_size": settings.block_size,
            },
            makespan_s={arm: tuple(run.makespan_s for run in arm_runs) for arm, arm_runs in runs.items()},
        )


def targets_of(references: Sequence[Run]) -> Targets:
    """Goodput targets from runs of the same requests without preemptions.

    Time to first token: their 99th percentile. Mean time between tokens: a quarter above their mean.
    """
    ttft_s = mean_and_percentiles([wait_s for run in references for wait_s in run.ttft_s])
    itl_s = mean_and_percentiles([gap for run in references for request in run.itl_s for gap in request])
    return Targets(ttft_s["p99"], ITL_FACTOR * itl_s["mean"])


def _blocks_of(workload: Workload, block_size: int) -> int:
    return sum(math.ceil(request.total_tokens / block_size) for request in workload.requests)


def _fitting_requests(workload: Workload, block_size: int, capacity: int, max_requests: int) -> Workload:
    """The workload's first requests that fit into ``capacity`` blocks together, from 1 to ``max_requests``."""
    count, blocks = 0, 0
    for request in workload.requests[:max_requests]:
        blocks += math.ceil(request.total_tokens / block_size) + 1
        if blocks > capacity:
            break
        count += 1
    return workload.first(max(1, count))


def _compare_all(references: Sequence[Run], runs: dict[str, list[Run]]) -> Comparison:
    total = Comparison()
    for arm, arm_runs in runs.items():
        for reference, run in zip(references, arm_runs, strict=True):
            total += compare(reference.tokens, reference.gaps, run.tokens, f"{arm}, block {run.block}")
    return total
