"""`kvpolicy demo --offline`: the demo without an engine: a shipped trace evaluated, and both of its loads simulated.

The simulated machine is that of the shipped trace, with a small Llama on a CPU. Simulated times are the same in every
run; rounds differ in arrivals and in the order of requests.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from statistics import fmean
from typing import Any

from kvpolicy.datasets.threshold import BEST_THRESHOLD
from kvpolicy.errors import InputError
from kvpolicy.evaluation.replay import evaluate
from kvpolicy.fields import AMOUNT, WrongValue, refuse_no_path, refuse_non_integer, refuse_other
from kvpolicy.headroom import Headroom, mean
from kvpolicy.order import load_order
from kvpolicy.settings import DEMO_ORDER
from kvpolicy.simulator import MemorySink, Summary
from kvpolicy.simulator.builtin import Builtin
from kvpolicy.study.cell import Cell
from kvpolicy.study.config import Serving
from kvpolicy.study.demo_report import DEMO_JSON, STOCK_ORDERS, DemoReport, ScenarioReport
from kvpolicy.study.run_cell import machine_of, numbers, policy_of, server_of, times_of
from kvpolicy.version import __version__
from kvpolicy.workload import Workload
from kvpolicy.workload.near_capacity import (
    BATCH,
    CONTEXT_TOKENS,
    URGENT,
    arriving,
    at_once,
    middle_rate,
    shuffled,
    with_urgent,
)

TRACE = "cpu-llama-native"
"""The shipped trace, and the shipped model that was trained on it."""
FIXED = ("always-recompute", "always-swap")
STOCK, PRICED = "vllm", "learned"
BLOCK_SIZE, BLOCKS, HOST_GIB = 32, 70, 2.0
LOAD, URGENT_PER_S = 1.3, 3.0
ONE_CLASS, TWO_CLASSES = "one class above capacity", "urgent requests beside a batch"


@dataclass(frozen=True, slots=True)
class Amount:
    """How much is simulated."""

    requests: int
    rounds: int


FULL, QUICK = Amount(160, 6), Amount(64, 2)


@dataclass(frozen=True, slots=True)
class Arm:
    """A policy and an order of service."""

    policy: str
    order: str

    def cell(self, workload: Workload, seed: int) -> Cell:
        order, scheduling = ("fcfs", "priority") if self.order == "priority" else (self.order, "fcfs")
        serving = Serving(block_size=BLOCK_SIZE, host_gib=HOST_GIB, order=order, scheduling=scheduling).on("cpu")
        return Cell(workload.name, self.policy, BLOCKS, "native", seed, TRACE, serving=serving)


def offline_demo(
    out: Path | str = Path("out/demo"), quick: bool = False, seed: int = 0, order: str = DEMO_ORDER
) -> DemoReport:
    """Evaluate a shipped trace, simulate the demo's two loads, and write ``out/demo.json``. No engine is needed.

    ``order``: the order of service that requests of one class are served by last. Raises WrongValue for a wrong
    argument, InputError where ``out`` holds something else than an offline demo.
    """
    refuse_no_path("out", out)
    refuse_non_integer("seed", seed, AMOUNT)
    refuse_other("order", order, str, "a name")
    load_order(order)
    if order in STOCK_ORDERS:
        raise WrongValue("order", f"is {order}, which other arms have: should be another, as {DEMO_ORDER}")
    folder, amount = Path(out), QUICK if quick else FULL
    _refuse_other_contents(folder)
    began_s = time.monotonic()
    evaluated = evaluate([shipped_trace()], [*FIXED, f"cheapest:{TRACE}"], seed=seed)
    evaluated_s = time.monotonic()
    threshold = next(iter(evaluated.threshold.rules))
    capacity = _capacity(amount, seed)
    scenarios = (_one_class(amount, capacity, seed, order, threshold), _two_classes(amount, capacity, seed))
    report = DemoReport(
        kind="offline",
        scenarios=tuple(scenario for scenario, _ in scenarios),
        bound=scenarios[0][1],
        seconds={"evaluate": evaluated_s - began_s, "simulate": time.monotonic() - evaluated_s},
        out=str(folder),
        details={
            "seed": seed,
            "versions": {"kvpolicy": __version__},
            "capacity_per_s": capacity,
            "trace": TRACE,
            "evaluate": evaluated.to_dict(),
        },
        notes=(evaluated.text(),),
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / DEMO_JSON).write_text(json.dumps(report.to_dict(), indent=2) + "\n")
    return report


def shipped_trace() -> Path:
    """The trace's folder: in an installed package, or in the checkout of this file. Raises InputError where it is in
    neither."""
    shelves = (Path(str(resources.files("kvpolicy"))) / "shipped" / "traces", Path(__file__).parents[2] / "traces")
    for shelf in shelves:
        if (shelf / TRACE).is_dir():
            return shelf / TRACE
    raise InputError(f"the shipped trace {TRACE} is neither in the package nor in a checkout: install kvpolicy again")


def _refuse_other_contents(folder: Path) -> None:
    """Raise InputError unless the folder is new, or holds an offline demo alone."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: is a file, should be a folder")
    strange = {path.name for path in folder.iterdir()} - {DEMO_JSON, "demo.html"} if folder.exists() else set()
    if strange:
        raise InputError(f"{folder}: holds {min(strange)}, which no offline demo writes: give a new folder")


# ---- the loads ----


def _capacity(amount: Amount, seed: int) -> float:
    """Requests per second under vLLM's own decisions."""
    work = at_once(amount.requests, seed)
    cell = Arm(FIXED[0], "fcfs").cell(work, seed)
    machine = machine_of(cell)
    run = Builtin().run(work, policy_of(cell)[0], server_of(cell, machine), times_of(cell, machine), sink=MemorySink())
    assert run.trace is not None
    return middle_rate([row["last_token_s"] for row in run.trace.rows("requests")])


def _one_class(
    amount: Amount, capacity: float, seed: int, order: str, threshold: str
) -> tuple[ScenarioReport, Headroom]:
    requests = at_once(amount.requests, seed)
    works = [arriving(shuffled(requests, number), LOAD * capacity, number) for number in _numbers(amount, seed)]
    learned = f"cheapest:{TRACE}"
    arms = {
        STOCK: Arm(FIXED[0], "fcfs"),
        BEST_THRESHOLD: Arm(threshold, "fcfs"),
        PRICED: Arm(learned, "fcfs"),
        f"{PRICED}, {order}": Arm(learned, order),
    }
    runs = _runs(arms, works)
    served = (
        f"simulated: {amount.requests} requests a round, {LOAD * capacity:.2f} a second (Poisson), {LOAD:g} of the "
        f"capacity of {capacity:.2f}, {BLOCKS} blocks of {BLOCK_SIZE} tokens"
    )
    figures = {
        arm: {
            "TTFT": [run.ttft_s.mean for run in own],
            "e2e per token": [run.e2e_per_token_s.mean for run in own],
            "e2e": [run.e2e_s.mean for run in own],
            "e2e p99": [run.e2e_s.p99 for run in own],
            "tok/s": [run.throughput_tok_s for run in own],
        }
        for arm, own in runs.items()
    }
    won = mean([run.headroom for run in runs[STOCK] if run.headroom is not None])
    return _scenario(ONE_CLASS, served, "TTFT", arms, figures, runs), won


def _two_classes(amount: Amount, capacity: float, seed: int) -> tuple[ScenarioReport, None]:
    requests = at_once(amount.requests, seed)
    works = [
        with_urgent(shuffled(requests, number), capacity, URGENT_PER_S, number) for number in _numbers(amount, seed)
    ]
    learned = f"cheapest:{TRACE}"
    arms = {
        STOCK: Arm(FIXED[0], "priority"),
        PRICED: Arm(learned, "priority"),
        f"{PRICED}, urgent": Arm(learned, "urgent"),
    }
    runs = _runs(arms, works)
    urgent = fmean(len(work.requests) for work in works) - amount.requests
    served = (
        f"simulated: a batch of {amount.requests} requests that is there from the beginning, and {urgent:.0f} urgent "
        f"ones a round, {URGENT_PER_S:g} a second, {BLOCKS} blocks of {BLOCK_SIZE} tokens"
    )
    figures = {
        arm: {
            "urgent TTFT": [run.classes[URGENT].ttft_s.mean for run in own],
            "urgent TTFT p99": [run.classes[URGENT].ttft_s.p99 for run in own],
            "batch tok/s": [run.classes[BATCH].steady_tok_s for run in own],
            "batch e2e": [run.classes[BATCH].e2e_s.mean for run in own],
        }
        for arm, own in runs.items()
    }
    return _scenario(TWO_CLASSES, served, "urgent TTFT", arms, figures, runs), None


def _numbers(amount: Amount, seed: int) -> range:
    return range(1000 * seed, 1000 * seed + amount.rounds)


def _runs(arms: Mapping[str, Arm], works: Sequence[Workload]) -> dict[str, list[Summary]]:
    """Each workload under each arm."""
    return {name: [_simulated(arm, work) for work in works] for name, arm in arms.items()}


def _simulated(arm: Arm, work: Workload) -> Summary:
    cell = arm.cell(work, work.seed)
    machine = machine_of(cell)
    policy, _ = policy_of(cell)
    return Builtin().run(work, policy, server_of(cell, machine), times_of(cell, machine), seed=work.seed).summary


def _scenario(
    name: str,
    served: str,
    headline: str,
    arms: Mapping[str, Arm],
    figures: Mapping[str, Mapping[str, Sequence[float]]],
    runs: Mapping[str, Sequence[Summary]],
) -> ScenarioReport:
    return ScenarioReport(
        name=name,
        served=served,
        headline=headline,
        arms={arm: f"{one.policy}, order {one.order}" for arm, one in arms.items()},
        figures=figures,
        policies={arm: _policy(own) for arm, own in runs.items()},
        details={
            "workload": {"blocks": BLOCKS, "block_size": BLOCK_SIZE, "context_tokens": CONTEXT_TOKENS},
            "makespan_s": {arm: [run.makespan_s for run in own] for arm, own in runs.items()},
        },
    )


def _policy(runs: Sequence[Summary]) -> dict[str, Any]:
    """An arm's counts, summed over rounds, and the summary of each."""
    kinds = runs[0].preemptions
    return {
        "preemptions": {kind: sum(run.preemptions[kind] for run in runs) for kind in kinds},
        "recomputed_tokens": sum(run.recomputed_tokens for run in runs),
        "moved_bytes": sum(run.moved_bytes for run in runs),
        "runs": len(runs),
        "rounds": [numbers(run) for run in runs],
    }
