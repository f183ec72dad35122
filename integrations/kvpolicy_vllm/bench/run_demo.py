"""`kvpolicy demo`: what preemptions cost on this machine, and two loads served by unmodified vLLM and with the plugin.

A model is made from a seed. Its capacity and what preemptions cost are measured, and a cost model is trained on a
profile of little more than a minute. Then requests that come faster than they can be served, and urgent requests beside
a batch, are served in alternating rounds. The headline is fixed beforehand (:data:`HEADLINES`), and every token is
compared with unmodified vLLM's.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from kvpolicy.datasets.threshold import BEST_THRESHOLD
from kvpolicy.errors import InputError
from kvpolicy.evaluation.log_headroom import log_headroom
from kvpolicy.evaluation.replay import evaluate
from kvpolicy.fields import WrongValue
from kvpolicy.headroom import Headroom
from kvpolicy.settings import DEMO_ORDER, Measurement
from kvpolicy.stored_values import read_json
from kvpolicy.study.demo_report import DEMO_JSON, TITLES, DemoReport, ScenarioReport, bound_line
from kvpolicy.trace import TraceError, read
from kvpolicy.training import train
from kvpolicy.workload import Workload
from kvpolicy.workload.near_capacity import (
    BURST,
    CONTEXT_TOKENS,
    SCALE,
    URGENT_TOKENS,
    arriving_within,
    at_once,
    shuffled,
    with_bursts,
)
from kvpolicy_vllm.bench.demo_rounds import ROUNDS, STATE, Measured
from kvpolicy_vllm.bench.exactness import Comparison
from kvpolicy_vllm.bench.live_scenarios import (
    BLOCK_SIZE,
    FIGURES,
    HOST_GIB,
    ONE_CLASS,
    SHAPE,
    TWO_CLASSES,
    Figure,
    capacity_of,
    compared,
    made_llm,
)
from kvpolicy_vllm.bench.overload import STOCK, Arm, Arms, Run, Settings, Targets, by_arm, summary
from kvpolicy_vllm.bench.profile_parts import Extent
from kvpolicy_vllm.bench.profile_results import ProfileReport
from kvpolicy_vllm.bench.progress import Bar
from kvpolicy_vllm.bench.resumed_inputs import versions
from kvpolicy_vllm.bench.run_profile import profile

FIXED = ("always-recompute", "always-swap")
LEARNED, RECORDED = "learned", "recorded"
URGENT_ORDER = "urgent"
STOCK_ORDERS: Mapping[str, str] = {ONE_CLASS: "fcfs", TWO_CLASSES: "priority"}
"""Unmodified vLLM's scheduling policy, and the order of the arms without one of the plugin's own."""
NAMES: Mapping[str, str] = {ONE_CLASS: "one class above capacity", TWO_CLASSES: "urgent requests beside a batch"}
HEADLINES: Mapping[str, str] = {ONE_CLASS: "TTFT", TWO_CLASSES: "urgent TTFT"}
TTFT_TARGET_S = 1.0
MIN_STATES = 12
"""Of the profile; its time is a multiple of the plan's, by :data:`TIME_FACTORS`, until there are so many."""
TIME_FACTORS = (1.0, 0.5, 1.0, 2.0, 4.0)
ITL_FACTOR = 2.0
PAGE = "demo.html"
PARTS = ("llm", "traces", "models", "logs", ROUNDS, STATE, f".{STATE}", PAGE)
"""Entries that a demo writes into its folder besides demo.json."""
OWN: Mapping[str, Sequence[str]] = {"traces": ("profile", "above-capacity"), "models": ("learned",)}
"""What it writes into those that have the names of a user's own folders, which are not to be removed."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much the demo does."""

    extent: Extent
    minutes: float
    """Of the profile."""
    requests: int
    """Of one class, per round."""
    batch_requests: int
    """Beside the urgent ones."""
    bursts: int
    """Of urgent requests, per round."""
    blocks: int
    """KV blocks that requests can have."""
    load: float
    """Arrivals of one class, as a share of the capacity."""
    rounds: int
    warm_up_requests: int
    shape: Mapping[str, object]


# Lengths and loads match the scenarios', so that the policy is trained on the range in which it will serve.
_EXTENT = Extent(
    (BLOCK_SIZE,), states=52, passes=1, repeats=1, check_pairs=2, max_tokens=512, max_others=15, max_batch_tokens=4000,
    model_tokens=2048, max_extra=1,
)  # fmt: skip
FULL = Plan(
    _EXTENT, minutes=1.25, requests=36, batch_requests=22, bursts=3, blocks=56, load=1.7, rounds=4,
    warm_up_requests=8, shape=SHAPE,
)  # fmt: skip
QUICK = Plan(
    _EXTENT, minutes=1.25, requests=28, batch_requests=20, bursts=3, blocks=48, load=1.7, rounds=2,
    warm_up_requests=8, shape=SHAPE,
)  # fmt: skip


def demo(
    out: Path | None = None,
    quick: bool = False,
    seed: int = 0,
    plan: Plan | None = None,
    order: str = DEMO_ORDER,
) -> DemoReport:
    """Run the demo on a small model and write ``out/demo.json``; ``out`` is by default ``out/demo``.

    ``order``: the order of service of the first scenario's last arm.

    An unfinished demo in ``out`` is resumed; a finished one is replaced. Raises InputError where ``out`` holds
    something else, or a demo that was begun with other arguments, WrongValue for stock vLLM's order, EngineFailed where
    an engine fails.
    """
    if order in STOCK_ORDERS.values():
        raise WrongValue("order", f"is {order}, which other arms have: should be another, as {DEMO_ORDER}")
    out = Path("out/demo") if out is None else Path(out)
    plan = (QUICK if quick else FULL) if plan is None else plan
    _clear_folder(out)
    measured = Measured.opened(out, {"seed": seed, "order": order, **asdict(plan), "versions": versions()})
    report = Loop(out, plan, seed, order, measured, Console(stderr=True)).run()
    (out / DEMO_JSON).write_text(json.dumps(report.to_dict(), indent=2) + "\n")
    return report


def _clear_folder(out: Path) -> None:
    """Remove a finished demo from ``out``, and say what goes. Raises InputError where ``out`` holds something else."""
    if out.exists() and not out.is_dir():
        raise InputError(f"{out}: is a file, should be a folder")
    held = [path for path in out.glob("*") if path.name not in (*PARTS, DEMO_JSON)]
    for part, names in OWN.items():
        held += [path for path in (out / part).glob("*") if path.name.lstrip(".").split(".")[0] not in names]
    if held:
        raise InputError(f"{out}: holds {min(held).relative_to(out)}, which is not from a demo; give a new folder")
    if (out / DEMO_JSON).exists():
        print(f"kvpolicy demo: replaces the finished {_kind_of(out / DEMO_JSON)} demo in {out}", file=sys.stderr)
        for part in PARTS:
            shutil.rmtree(out / part, ignore_errors=True)
            (out / part).unlink(missing_ok=True)
        (out / DEMO_JSON).unlink()
    out.mkdir(parents=True, exist_ok=True)


def _kind_of(file: Path) -> str:
    """Live or offline, as a finished demo says it; "unreadable" where it does not."""
    try:
        return str(read_json(file)["kind"])
    except (OSError, ValueError, KeyError, TypeError):
        return "unreadable"


def arms_of(scenario: str, order: str, learned: str, threshold: str) -> tuple[Arm, ...]:
    """Unmodified vLLM, rules of the plugin under vLLM's order, and last the learned policy with an order of its own.

    ``learned`` and ``threshold``: policies. The best threshold is served to one class alone.
    """
    stock_order = STOCK_ORDERS[scenario]
    rules = {BEST_THRESHOLD: threshold, LEARNED: learned} if scenario == ONE_CLASS else {LEARNED: learned}
    return (
        Arm(STOCK, None, order=stock_order, own_engine=True),
        *(Arm(name, policy, None, HOST_GIB, order=stock_order) for name, policy in rules.items()),
        Arm(f"{LEARNED}, {order}", learned, None, HOST_GIB, order=order),
    )


def shown(scenario: str) -> Mapping[str, Figure]:
    """The figures that are reported, in the order of columns and rows: "its p99" follows its mean."""
    return {name: FIGURES[scenario][name] for name in TITLES if name in FIGURES[scenario]}


class Loop:
    """The steps of the demo, in the order of the methods."""

    def __init__(self, out: Path, plan: Plan, seed: int, order: str, measured: Measured, console: Console) -> None:
        self._out, self._plan, self._seed, self._order = out, plan, seed, order
        self._measured, self._console = measured, console

    def run(self) -> DemoReport:
        measured, before = self._measured, os.getloadavg()[0]
        with measured.phase("model"):
            llm, on_cpu = made_llm(self._out, self._seed, self._plan.shape)
        self._settings = Settings(str(llm), on_cpu, self._plan.blocks + 1, BLOCK_SIZE, CONTEXT_TOKENS)
        with measured.phase("capacity and bound"):
            self._find_bound()
        self._learn(llm)
        reports, total = [], Comparison()
        for scenario in (ONE_CLASS, TWO_CLASSES):
            with measured.phase(NAMES[scenario]):
                report, comparison = self._scenario(scenario)
            reports.append(report)
            total += comparison
        machine = {"cpus": os.cpu_count(), "load_before": before, "load_after": os.getloadavg()[0]}
        values = measured.values
        return DemoReport(
            kind="live",
            scenarios=tuple(reports),
            bound=Headroom(**values["bound"]),
            seconds=dict(measured.seconds),
            out=str(self._out),
            exactness={"exact": total.exact, "tokens": total.tokens, "ties": total.ties, "wrong": list(total.wrong)},
            details={
                "seed": self._seed,
                "versions": versions(),  # those it was begun with: with others it is not resumed
                "machine": machine,
                "link": {"kind": "native"},
                "capacity_per_s": values["capacity_per_s"],
                "train": values["train"],
                "evaluate": values["evaluate"],
            },
        )

    # ---- before anything is compared ----

    def _learn(self, llm: Path) -> None:
        """Profile, train, evaluate."""
        trace, model, measured = self._out / "traces" / "profile", self._out / "models" / "learned", self._measured
        if "train" in measured.values:
            return
        self._console.rule(f"profile, {60 * self._plan.minutes:.0f} seconds")
        with measured.phase("profile"):
            profiled = self._profiled(llm, trace)
        self._say(profiled.text())
        with measured.phase("train, evaluate"):
            shutil.rmtree(model, ignore_errors=True)
            # Noise appears in the training report; it must not end the demo.
            trained = train([trace], model, force=True, seed=self._seed)
            self._say(trained.text())
            measured.values["policy"] = f"cheapest:{model}"
            measured.values["evaluate"] = self._evaluated(trace)
        measured.keep("train", trained.to_dict())

    def _profiled(self, llm: Path, trace: Path) -> ProfileReport:
        """The profile, which is given more time on a machine on which too few states were measured."""
        for factor in TIME_FACTORS:
            how = Measurement(llm, seed=self._seed, minutes=factor * self._plan.minutes)
            with suppress(WrongValue):  # the time was over before any state was measured
                report = profile(trace, how, extent=self._plan.extent, is_made=True)
                if report.states >= MIN_STATES:
                    return report
        raise InputError(
            f"{how.minutes:g} minutes were too few for {MIN_STATES} states of the profile: the machine is too busy, or "
            "too slow for this demo; the same command goes on"
        )

    def _evaluated(self, trace: Path) -> dict[str, Any]:
        """The policies on states that the model has not seen, where enough of them were measured."""
        try:
            evaluated = evaluate([trace], [*FIXED, self._measured.values["policy"]], seed=self._seed)
        except TraceError as error:
            self._say(f"not evaluated offline: {error}")
            return {"unknown": str(error)}
        self._say(evaluated.text())
        return evaluated.to_dict()

    def _find_bound(self) -> None:
        """The capacity, and what there was to win at a load above it, from a recorded run of vLLM's own decisions."""
        if "bound" in self._measured.values:
            return
        self._console.rule("capacity, and what preemptions cost")
        trace = self._out / "traces" / "above-capacity"
        shutil.rmtree(trace, ignore_errors=True)
        recorded = Arm(RECORDED, FIXED[0], None, HOST_GIB, extra=(("trace", trace),))
        with Arms(self._settings, self._out / "logs") as arms, Bar("capacity") as bar:
            arms.start(Arm(STOCK, None, own_engine=True), recorded)
            arms.serve(STOCK, at_once(self._plan.warm_up_requests, self._seed + 20_000), -1, progress=bar.tell)
            run = arms.serve(STOCK, self._requests(ONE_CLASS), -1, progress=bar.tell)
            self._measured.values["itl_target_s"] = ITL_FACTOR * fmean(gap for request in run.itl_s for gap in request)
            self._measured.values["capacity_per_s"] = capacity_of(run)
            arms.serve(RECORDED, self._workload(ONE_CLASS, -1), -1, progress=bar.tell)
        won = log_headroom([read(trace)], None)
        self._measured.keep("bound", asdict(won))
        self._say(bound_line(won))

    def _requests(self, scenario: str) -> Workload:
        plan = self._plan
        return at_once(plan.requests if scenario == ONE_CLASS else plan.batch_requests, self._seed)

    def _workload(self, scenario: str, number: int) -> Workload:
        """The requests of a round: the same lengths in every round, in another order and with other texts."""
        capacity = float(self._measured.values["capacity_per_s"])
        requests = shuffled(self._requests(scenario), self._seed * 1000 + number + 1)
        if scenario == ONE_CLASS:
            return arriving_within(requests, len(requests.requests) / (self._plan.load * capacity), requests.seed)
        return with_bursts(requests, capacity, self._plan.bursts, requests.seed)

    # ---- the comparison ----

    def _scenario(self, scenario: str) -> tuple[ScenarioReport, Comparison]:
        order, values = self._order if scenario == ONE_CLASS else URGENT_ORDER, self._measured.values
        arms = arms_of(scenario, order, values["policy"], values["train"]["best_threshold"])
        self._console.rule(NAMES[scenario])
        works = [self._workload(scenario, number) for number in range(self._plan.rounds)]
        rounds = [self._measured.round(scenario, number, work) for number, work in enumerate(works)]
        if None in rounds:
            self._serve(scenario, arms, works, rounds)
        whole = [runs for runs in rounds if runs is not None]
        runs = by_arm(run for one in whole for run in one.values())
        comparison = sum((self._measured.comparison(scenario, number) for number in range(len(works))), Comparison())
        return self._report(scenario, arms, works, {arm.name: runs[arm.name] for arm in arms}, comparison), comparison

    def _serve(
        self, scenario: str, arms: Sequence[Arm], works: Sequence[Workload], rounds: list[dict[str, Run] | None]
    ) -> None:
        """Serve the rounds that are missing, by all arms in random order, and fill them in."""
        headline, judged = FIGURES[scenario][HEADLINES[scenario]], arms[-1].name
        with Arms(self._settings, self._out / "logs") as engines, Bar(scenario) as bar:
            engines.start(*arms)
            for arm in arms:
                engines.serve(arm.name, at_once(self._plan.warm_up_requests, 20_000), -1, progress=bar.tell)
            for number, work in enumerate(works):
                if rounds[number] is not None:
                    continue
                names = random.Random(f"{self._seed}/{scenario}/{number}").sample(engines.names, len(arms))
                runs = {name: engines.serve(name, work, number, progress=bar.tell) for name in names}
                found = Comparison()
                for name in names:
                    found += Comparison() if name == STOCK else compared(engines, work, runs[STOCK], runs[name])
                self._measured.keep_round(scenario, number, runs, found)
                rounds[number] = runs
                ratio = headline(runs[judged]) / headline(runs[STOCK])
                self._say(f"round {number + 1}: {TITLES[HEADLINES[scenario]]}: x{ratio:.3g}, {judged} over {STOCK}")

    def _report(
        self,
        scenario: str,
        arms: Sequence[Arm],
        works: Sequence[Workload],
        runs: Mapping[str, Sequence[Run]],
        comparison: Comparison,
    ) -> ScenarioReport:
        targets = Targets(TTFT_TARGET_S, self._measured.values["itl_target_s"])
        figures = shown(scenario)
        return ScenarioReport(
            name=NAMES[scenario],
            served=self._served(scenario),
            headline=HEADLINES[scenario],
            arms={arm.name: f"{arm.policy or 'unmodified vLLM'}, order {arm.order}" for arm in arms},
            figures={
                arm: {name: [take(run) for run in own] for name, take in figures.items()} for arm, own in runs.items()
            },
            policies={arm: summary(own, targets) for arm, own in runs.items()},
            details={
                "exact": comparison.exact,
                "targets": asdict(targets)
                | {"from": f"itl_s: {ITL_FACTOR:g} times the mean of the run that gave the capacity"},
                "workload": {
                    "source": works[0].source,
                    "scale": SCALE,
                    "requests": [len(work.requests) for work in works],
                    "device_blocks": self._settings.device_blocks,
                    "block_size": BLOCK_SIZE,
                },
                "makespan_s": {arm: [run.makespan_s for run in own] for arm, own in runs.items()},
            },
        )

    def _served(self, scenario: str) -> str:
        plan, capacity = self._plan, self._measured.values["capacity_per_s"]
        memory = f"{plan.blocks} blocks of {BLOCK_SIZE} tokens"
        if scenario == ONE_CLASS:
            load = f"{plan.load * capacity:.2f} a second (Poisson), {plan.load:g} of the capacity of {capacity:.2f}"
            return f"{plan.requests} requests a round, {load}, {memory}"
        prompt, output = URGENT_TOKENS
        return (
            f"a batch of {plan.batch_requests} requests that is there from the beginning, and {plan.bursts * BURST} "
            f"urgent ones a round ({prompt} tokens in, {output} out), {BURST} at a time, {memory}"
        )

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)
