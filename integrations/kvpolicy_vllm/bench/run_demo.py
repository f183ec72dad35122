"""`kvpolicy demo`: measure, train and evaluate here, then the same overload with and without the plugin.

Everything is done twice: over the native link, and over a simulated one that puts break-even inside the measured
lengths (without an accelerator copies are so cheap that swap nearly always wins, and a policy is then a constant).
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

from kvpolicy.datasets.profiles import measured
from kvpolicy.errors import InputError
from kvpolicy.evaluation.replay import evaluate
from kvpolicy.hardware.link import SimulatedLink, header_link
from kvpolicy.settings import Measurement
from kvpolicy.training import train
from kvpolicy.workload import DEEPSEEK_R1, Workload, all_at_once
from kvpolicy_vllm.bench.breakeven import Costs, break_even_link
from kvpolicy_vllm.bench.demo_report import DemoReport, LinkReport
from kvpolicy_vllm.bench.engine_process import EngineProcess
from kvpolicy_vllm.bench.exactness import Comparison, compare
from kvpolicy_vllm.bench.overload import (
    STOCK,
    Arm,
    Arms,
    Run,
    Settings,
    Targets,
    Told,
    alternate,
    by_arm,
    summary,
    throughput_ratio,
    ttft_ratio,
)
from kvpolicy_vllm.bench.profile_parts import Extent
from kvpolicy_vllm.bench.progress import Bar
from kvpolicy_vllm.bench.ratios import mean_and_percentiles
from kvpolicy_vllm.bench.run_profile import profile

FIXED = ("always-recompute", "always-swap")
LEARNED = "learned"
REFERENCE = "memory enough"
ITL_FACTOR = 1.25
DEMO_JSON = "demo.json"
PARTS = ("llm", "traces", "models", "logs")
"""What a demo writes into its folder besides demo.json."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much the demo does."""

    extent: Extent
    blocks: int
    """Of the overload, each through all arms in an order of its own."""
    requests: int
    """Per block of the overload."""
    warm_up_requests: int
    pairs: int
    """Of runs without pressure, plugin off and on."""
    calm_requests: int
    context_tokens: int
    scale: float
    """What the public trace's lengths are multiplied by."""
    memory_share: float
    """Device memory of the overload, as a share of what all its requests would take at their longest."""


SHAPE = {"hidden": 512, "intermediate": 1536, "layers": 2, "spread": 0.1}
"""Of the demo's model, 8.4 million parameters. Wide and flat: in a narrower, deeper one a step's fixed cost in Python
is so much of its time that recomputed tokens hardly show, which is not how real models are."""
# As long and as many as the overload's requests: a policy is to be trained where it will serve.
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


def demo(out: Path | None = None, quick: bool = False, seed: int = 0, plan: Plan | None = None) -> DemoReport:
    """Run the whole loop on a small model and write ``out/demo.json``; ``out`` is by default ``out/demo``.

    An unfinished demo in ``out`` is taken up at the profile it was in; a finished one is replaced. Raises ValueError
    where ``out`` holds something else, EngineFailed where an engine ends badly.
    """
    out = Path("out/demo") if out is None else Path(out)
    plan = (QUICK if quick else FULL) if plan is None else plan
    _make_room(out)
    show = Console(stderr=True)
    show.rule("a small Llama, made from a seed")
    with EngineProcess("kvpolicy_vllm.bench.inspect_model", out / "logs" / "preparing.log") as process:
        found = process.ask({"llm": None, "make": str(out / "llm"), "seed": seed, "shape": SHAPE})
    loop = Loop(out, Path(found["llm"]), not found["device"], plan, seed, show)
    native = loop.measure("native", None)
    link = loop.simulated_link()
    measures = [native] if link is None else [native, loop.measure("simulated", link)]
    report = DemoReport(tuple(loop.overload(measures)), str(out / DEMO_JSON))
    (out / DEMO_JSON).write_text(json.dumps(report.to_dict(), indent=2) + "\n")
    return report


def _make_room(out: Path) -> None:
    """Remove a finished demo; refuse to mix with anything that is none."""
    strange = (
        sorted(path.name for path in out.iterdir() if path.name not in (*PARTS, DEMO_JSON)) if out.is_dir() else []
    )
    if strange:
        raise InputError(f"{out}: holds {strange[0]}, which no demo wrote; give a new folder")
    if (out / DEMO_JSON).exists():
        for part in PARTS:
            shutil.rmtree(out / part, ignore_errors=True)
        (out / DEMO_JSON).unlink()
    out.mkdir(parents=True, exist_ok=True)


@dataclass(frozen=True, slots=True)
class Measured:
    """One link, measured, learned and judged."""

    name: str
    link: SimulatedLink | None
    header: dict[str, Any]
    """As traces name it."""
    learned: str
    """The learned policy's name."""
    train: dict[str, Any]
    evaluate: dict[str, Any]

    def arms(self) -> tuple[Arm, ...]:
        policies = {name: name for name in FIXED} | {LEARNED: self.learned}
        return (Arm(STOCK, None, self.link), *(Arm(name, policy, self.link) for name, policy in policies.items()))


class Loop:
    """The demo's steps, in the order of its methods."""

    def __init__(self, out: Path, llm: Path, on_cpu: bool, plan: Plan, seed: int, show: Console) -> None:
        self._out = out
        self._llm = llm
        self._on_cpu = on_cpu
        self._plan = plan
        self._seed = seed
        self._show = show

    def measure(self, name: str, link: SimulatedLink | None) -> Measured:
        """Profile, train, evaluate."""
        trace, model = self._out / "traces" / name, self._out / "models" / name
        told = "the native link" if link is None else f"a simulated link, --link {link.text}"
        self._show.rule(f"profile, train, evaluate: {told}")
        profiled = profile(trace, Measurement(self._llm, link=link, seed=self._seed), extent=self._plan.extent)
        shutil.rmtree(model, ignore_errors=True)
        # A noisy machine is told of, in what training reports; it does not end the demo.
        trained = train([trace], model, force=True, seed=self._seed)
        learned = f"cheapest:{model}"
        judged = evaluate([trace], [*FIXED, learned], seed=self._seed)
        for report in (profiled, trained, judged):
            self._show.print(report.text(), highlight=False, markup=False, soft_wrap=True)
        return Measured(name, link, header_link(link), learned, trained.to_dict(), judged.to_dict())

    def simulated_link(self) -> SimulatedLink | None:
        """None where natively swap does not win at the median length."""
        native = measured([self._out / "traces" / "native"])
        costs = [Costs(one.computed_tokens, one.mean_s["recompute"], one.mean_s["swap"]) for one in native.states]
        return break_even_link(costs, native.kv_bytes_per_token)

    def overload(self, links: Sequence[Measured]) -> list[LinkReport]:
        """The same blocks through every arm, link after link, and pairs without pressure."""
        blocks = [self._workload(self._seed + 1 + block, self._plan.requests) for block in range(self._plan.blocks)]
        settings = self._settings(blocks)
        self._show.rule(f"overload: {len(blocks)} blocks of {self._plan.requests} requests, {blocks[0].name} lengths")
        with Arms(settings, self._out / "logs") as arms, Bar("overload") as bar:
            references = self._references(arms, blocks, bar.tell)
            targets = targets_of(references)
            reports = []
            for link in links:
                self._start(arms, link, bar.tell)
                rng = random.Random(f"{self._seed}/order/{link.name}")
                runs = by_arm(alternate(arms, [arm.name for arm in link.arms()], blocks, rng, bar.tell))
                calm = self._calm(arms, rng, bar.tell)
                compared = _compare_all(references, runs)
                reports.append(self._report(link, settings, blocks, runs, calm, compared, targets))
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

    def _references(self, arms: Arms, blocks: Sequence[Workload], tell: Told) -> list[Run]:
        """Every block with memory for all its requests, by stock vLLM: the right tokens, and undisturbed times."""
        tell("memory enough for all", 0, 0)
        enough = max(_blocks_of(workload, arms.settings.block_size) for workload in blocks) + self._plan.requests + 1
        arms.start(Arm(REFERENCE, None, device_blocks=enough))
        self._warm_up(arms, REFERENCE, tell)
        runs = [arms.serve(REFERENCE, workload, block, True, tell) for block, workload in enumerate(blocks)]
        arms.stop(REFERENCE)
        preempted = sum(sum(run.preemptions.values()) for run in runs)
        if preempted:
            raise RuntimeError(f"{preempted} preemptions with memory enough for all: that is no reference")
        return runs

    def _start(self, arms: Arms, link: Measured, tell: Told) -> None:
        arms.stop(*arms.names)
        tell(f"{link.name} link", 0, 0)
        arms.start(*link.arms())
        for arm in link.arms():
            self._warm_up(arms, arm.name, tell)

    def _warm_up(self, arms: Arms, name: str, tell: Told) -> None:
        """Whatever an engine does only once it does here; not counted. Enough requests to bring preemptions."""
        arms.serve(name, self._workload(self._seed, self._plan.warm_up_requests), -1, told=tell)

    def _calm(self, arms: Arms, rng: random.Random, tell: Told) -> dict[str, list[Run]]:
        """Stock vLLM and the learned policy on requests that fit into memory together."""
        room = arms.settings.device_blocks - 1
        workloads = []
        for pair in range(self._plan.pairs):
            workload = self._workload(self._seed + 1000 + pair, self._plan.calm_requests * 4)
            workloads.append(_that_fit(workload, arms.settings.block_size, room, self._plan.calm_requests))
        return by_arm(alternate(arms, (STOCK, LEARNED), workloads, rng, tell))

    def _report(
        self,
        link: Measured,
        settings: Settings,
        blocks: Sequence[Workload],
        runs: dict[str, list[Run]],
        calm: dict[str, list[Run]],
        compared: Comparison,
        targets: Targets,
    ) -> LinkReport:
        rng = random.Random(f"{self._seed}/bootstrap/{link.name}")
        pairs = [(LEARNED, other) for other in (STOCK, *FIXED)] + [(fixed, STOCK) for fixed in FIXED]
        ratios = {f"throughput {a} / {b}": throughput_ratio(runs[a], runs[b], rng) for a, b in pairs}
        ratios |= {f"ttft {a} / {b}": ttft_ratio(runs[a], runs[b], rng) for a, b in pairs[:3]}
        return LinkReport(
            name=link.name,
            link=link.header,
            policies={arm: summary(mine, targets) for arm, mine in runs.items()},
            ratios=ratios,
            no_pressure_ratio=throughput_ratio(calm[LEARNED], calm[STOCK], rng),
            no_pressure_preemptions=sum(sum(run.preemptions.values()) for some in calm.values() for run in some),
            evaluate=link.evaluate,
            train=link.train,
            comparison=compared,
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
                "device_blocks": settings.device_blocks,
                "block_size": settings.block_size,
            },
            makespan_s={arm: tuple(run.makespan_s for run in mine) for arm, mine in runs.items()},
        )


def targets_of(references: Sequence[Run]) -> Targets:
    """What counts as served well, from how the same requests are served when nobody is disturbed.

    First token no later than the 99th percentile there; mean time between tokens at most a quarter above the mean.
    """
    ttft_s = mean_and_percentiles([one for run in references for one in run.ttft_s])
    itl_s = mean_and_percentiles([gap for run in references for request in run.itl_s for gap in request])
    return Targets(ttft_s["p99"], ITL_FACTOR * itl_s["mean"])


def _blocks_of(workload: Workload, block_size: int) -> int:
    return sum(math.ceil(request.total_tokens / block_size) for request in workload.requests)


def _that_fit(workload: Workload, block_size: int, room: int, most: int) -> Workload:
    """The workload's first requests that have room together, ``most`` at most, one at least."""
    count, taken = 0, 0
    for request in workload.requests[:most]:
        taken += math.ceil(request.total_tokens / block_size) + 1
        if taken > room:
            break
        count += 1
    return workload.first(max(1, count))


def _compare_all(references: Sequence[Run], runs: dict[str, list[Run]]) -> Comparison:
    total = Comparison()
    for arm, mine in runs.items():
        for reference, run in zip(references, mine, strict=True):
            total += compare(reference.tokens, reference.gaps, run.tokens, f"{arm}, block {run.block}")
    return total
