"""Explore, estimate, then do it: what two policies would cost by a log, compared with serving under them. Simulated.

    python benchmarks/exploration.py [--requests N] [--workloads N] [--replays N] [--json FILE]

The built-in simulator serves a made-up overload on made-up hardware (no device is measured here):
1. once with a coin, from whose log alone a cost model is trained (one option seen per situation);
2. with `explore` by that model: as if it knew nothing of its errors (every interval infinite: a coin wherever both
   options are feasible), the same within a budget of predicted regret, as trained, and as trained by the same log with
   made-up noise on its costs, whose honest intervals leave a real band to chance;
3. with always-recompute and always-swap.
From each log of 2, both policies of 3 are estimated, or refused. What is estimated is their cost *in the states of the
log*: "same states". Where the policy does what the log did, that is the log's own cost; elsewhere, for decisions drawn
at random, the whole run is simulated again with that one decision turned, and its cost there is read. The model of 1
stands in for decisions that were not drawn, less what it missed of those that were: +/- is the drawing's 95%.
Serving with a policy brings about other states: "served" is what it cost then, and no estimate owes agreement with it.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from kvpolicy import cost, policy
from kvpolicy.arrays import Floats
from kvpolicy.cost import CostModel, FittedModel
from kvpolicy.cost.intervals import unbounded
from kvpolicy.evaluation.decision_log import Log, log_from_traces
from kvpolicy.evaluation.estimation import Estimation
from kvpolicy.evaluation.offpolicy import Estimate, Judgement, judge
from kvpolicy.events import KINDS, Decision, Option, Preemption
from kvpolicy.hardware import Geometry
from kvpolicy.policy import Assessment, Policy, PolicyState
from kvpolicy.policy.base import certain_choice
from kvpolicy.simulator import Builtin, ConstantTimes, Link, MemorySink, Run, Server
from kvpolicy.trace import Header, Trace, from_rows, with_core
from kvpolicy.training.log_fits import train_logged
from kvpolicy.training.reports import LogTrainReport
from kvpolicy.workload import DEEPSEEK_R1, Workload, all_at_once, random_arrivals

GEOMETRY = Geometry(
    layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=14336, vocab=128256, weight_bytes=2,
    kv_bytes=2, dtype="bfloat16",
)  # fmt: skip
BLOCK_SIZE = 16
SERVER = Server(
    block_size=BLOCK_SIZE,
    block_bytes=BLOCK_SIZE * GEOMETRY.kv_bytes_per_token,
    device_blocks=1500,
    host_blocks=6000,
    token_budget=1024,
    prefix_caching=False,
    link=Link(overlapped=False),
    geometry=GEOMETRY.to_dict(),
)
TIMES = ConstantTimes(
    fixed_s=8e-3, per_part_s=(3e-5, 2e-5, 2e-8, 4e-9, 0.0, 0.0), copy_latency_s=2e-3, copy_bytes_per_s=1.2e10
)
CONTEXT_TOKENS = 4096
RATE_PER_S = 12.0
FIXED = ("always-recompute", "always-swap")
ESTIMATORS = ("cross-fitted-dr", "snips")
BUDGET = "2%"
NOISE = 0.5
"""Standard deviation of the log of costs, where training is made to see noise."""


@dataclass(frozen=True)
class Way:
    """One way of exploring."""

    name: str
    spec: str
    model: FittedModel


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=_at_least_one, default=2000)
    parser.add_argument("--workloads", type=_at_least_one, default=5, help="that many, each of other requests")
    parser.add_argument("--replays", type=_at_least_one, default=20, help="decisions turned, by log and policy")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        try:
            report, model = teach(Path(scratch, "exact"), options.requests, 0.0)
            _, unsure = teach(Path(scratch, "noisy"), options.requests, NOISE)
        except ValueError as error:
            parser.exit(2, f"exploration.py: error: --requests {options.requests}: too few to train on: {error}\n")
    print(report.text(), end="\n\n")
    ways = (
        Way("nothing known", "explore:MODEL", replace(model, intervals=unbounded())),
        Way(f"within {BUDGET}", f"explore:MODEL,budget={BUDGET}", replace(model, intervals=unbounded())),
        Way("as trained", "explore:MODEL", model),
        Way("trained on noise", "explore:MODEL", unsure),
    )
    rows = []
    for seed in track(range(1, options.workloads + 1), "workloads", console=Console(stderr=True)):
        rows += compare(made_up(seed, options.requests), ways, seed, model, options.replays)
    show(rows)
    if options.json:
        options.json.write_text(json.dumps({"trained": report.to_dict(), "rows": rows}, indent=2) + "\n")
    return 0


def _at_least_one(text: str) -> int:
    """Requests without a preemption teach nothing."""
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r}, should be a whole number, 1 or more")
    return int(text)


def made_up(seed: int, requests: int) -> Workload:
    """An overload: lengths of reasoning, which grows while it is served, and Poisson arrivals."""
    workload = all_at_once(DEEPSEEK_R1, requests, seed, CONTEXT_TOKENS, scale=0.3)
    return workload.arriving(random_arrivals(requests, RATE_PER_S, random.Random(seed)))


def asked_for(spec: str, model: CostModel | None = None) -> Policy:
    def loader(_: str) -> CostModel:
        assert model is not None
        return model

    return policy.load(spec, loader)


def served(workload: Workload, spec: str, seed: int, model: CostModel | None = None) -> tuple[Run, Trace]:
    run = Builtin().run(workload, asked_for(spec, model), SERVER, TIMES, seed, MemorySink())
    assert run.trace is not None
    return run, run.trace


def teach(folder: Path, requests: int, noise: float) -> tuple[LogTrainReport, FittedModel]:
    """A cost model from the log of a coin, with that noise on its costs."""
    _, trace = served(made_up(0, requests), "random:0.5", 0)
    rng = random.Random(0)
    outcomes = [
        {name: value for name, value in row.items() if name != "core"}
        | {"engine_s": row["engine_s"] * rng.lognormvariate(0.0, noise)}
        for row in trace.rows("outcomes")
    ]
    (core,) = trace.headers
    noisy = {"outcomes": with_core(from_rows("outcomes", outcomes), core)}
    Trace(trace.headers, dict(trace.tables) | noisy).write(folder / "log")
    report = train_logged([folder / "log"], folder / "model", "analytic", 0, False)
    model = cost.load(report.out)
    assert isinstance(model, FittedModel)
    return report, model


def compare(
    workload: Workload, ways: Sequence[Way], seed: int, model: FittedModel, replays: int
) -> list[dict[str, Any]]:
    really = {}
    for name in FIXED:
        run, trace = served(workload, name, seed)
        really[name] = log_from_traces({name: trace}), run
    rows = []
    for way in ways:
        run, trace = served(workload, way.spec, seed, way.model)
        log = log_from_traces({way.name: trace})
        targets = {name: log.targets(policy.load(name)) for name in FIXED}
        report = judge(log, targets, seed, Estimation(ESTIMATORS))
        for judgement in report.policies:
            same = None
            if judgement.estimates:
                turn = ReplayedRun(workload, asked_for(way.spec, way.model), seed, _numbers(trace))
                same = in_these_states(turn, model, log, targets[judgement.policy], replays)
            rows.append(
                row_of(way, seed, log, trace, judgement, same, really[judgement.policy])
                | {"throughput_tok_s": _rate(run)}
            )
    return rows


@dataclass(frozen=True, slots=True)
class CountedState:
    """Another policy's state, and how many decisions were taken."""

    inner: PolicyState
    made: int = 0

    def to_json(self) -> str:
        return self.inner.to_json()


@dataclass(frozen=True)
class WithChangedDecision(Policy[CountedState]):
    """Another policy, but with a certain option at one decision, counted from 1."""

    policy: Policy
    number: int
    action: int
    """Of :data:`KINDS`."""
    name: str = "turned"

    def initial_state(self) -> CountedState:
        return CountedState(self.policy.initial_state())

    def assess(self, situation: Preemption, options: Sequence[Option], state: CountedState) -> Assessment:
        assessment = self.policy.assess(situation, options, state.inner)
        if state.made + 1 != self.number:
            return assessment
        kinds = [option.kind for option in options]
        return certain_choice(kinds.index(KINDS[self.action]), len(options)), assessment[1]

    def probabilities(self, situation: Preemption, options: Sequence[Option], state: CountedState) -> tuple[float, ...]:
        return self.assess(situation, options, state)[0]

    def next_state(self, state: CountedState, decision: Decision) -> CountedState:
        return CountedState(self.policy.next_state(state.inner, decision), state.made + 1)


@dataclass(slots=True)
class OneOutcome:
    """A sink for the cost of one preemption alone."""

    number: int
    engine_s: float | None = None

    def begin(self, core: str, header: Header) -> None:
        """The header is not about one preemption."""

    def add(self, table: str, rows: list[dict[str, Any]]) -> None:
        for row in rows if table == "outcomes" else ():
            if _number(row) == self.number:
                self.engine_s = row["engine_s"]

    def finish(self) -> None:
        return None


@dataclass(frozen=True, slots=True)
class ReplayedRun:
    """A run that can be simulated again with one decision changed."""

    workload: Workload
    policy: Policy
    seed: int
    numbers: tuple[int, ...]
    """Of its preemptions, in the order of the log's records."""

    def cost_s(self, record: int, action: int) -> float:
        """What the preemption of that record costs the engine if this is done; all coins fall as they did."""
        sink = OneOutcome(self.numbers[record])
        turned = WithChangedDecision(self.policy, sink.number, action)
        Builtin().run(self.workload, turned, SERVER, TIMES, self.seed, sink)
        assert sink.engine_s is not None
        return sink.engine_s


def _number(row: dict[str, Any]) -> int:
    return int(row["preemption_id"].rsplit("-", 1)[1])


def _numbers(trace: Trace) -> tuple[int, ...]:
    return tuple(map(_number, trace.rows("decisions", ("preemption_id",))))


def in_these_states(
    turn: ReplayedRun, model: FittedModel, log: Log, target: Floats, replays: int
) -> tuple[float, float]:  # fmt: skip
    """Mean cost of what a policy without chance does in a log's situations, and its 95% by drawing; seconds."""
    assert log.known.all() and len(turn.numbers) == len(log)
    target_action = target.argmax(axis=1)
    others = [int(number) for number in (target_action != log.action).nonzero()[0]]
    total_s = float(log.cost_s[target_action == log.action].sum())
    predicted_s = {number: _predicted_s(model, log, number, int(target_action[number])) for number in others}
    total_s += sum(predicted_s.values())
    sampled = random.Random(turn.seed).sample(others, min(replays, len(others)))
    missed_s = [turn.cost_s(number, int(target_action[number])) - predicted_s[number] for number in sampled]
    total_s += len(others) * fmean(missed_s or [0.0])
    error_s = stdev(missed_s) / len(missed_s) ** 0.5 if 1 < len(missed_s) < len(others) else 0.0
    return total_s / len(log), 1.96 * error_s * len(others) / len(log)


def _predicted_s(model: FittedModel, log: Log, record: int, action: int) -> float:
    options = log.options[record]
    costs = model.predict(log.situations[record], options)
    return next(
        option_cost.engine_s for option_cost, option in zip(costs, options, strict=True) if option.kind == KINDS[action]
    )


def row_of(
    way: Way, seed: int, log: Log, trace: Trace, judgement: Judgement, same: tuple[float, float] | None,
    really: tuple[Log, Run],
) -> dict[str, Any]:  # fmt: skip
    served_log, run = really
    served_s = float(served_log.cost_s[served_log.known].mean())
    estimates = {
        estimate.estimator: {
            "value_s": estimate.value_s, "low_s": estimate.low_s, "high_s": estimate.high_s,
            "off": estimate.value_s / same[0] - 1, "off_served": estimate.value_s / served_s - 1,
            "holds": _holds(estimate, same[0]), "holds_served": _holds(estimate, served_s),
        }
        for estimate in judgement.estimates
        if same is not None
    }  # fmt: skip
    last = json.loads(trace.rows("decisions", ("state",))[-1]["state"])
    return {
        "way": way.name, "workload": seed, "policy": judgement.policy, "preemptions": len(log),
        "left_to_chance": float((log.probability.max(axis=1) < 1).mean()), "budget": last,
        "mean_cost_s": float(log.cost_s[log.known].mean()), "estimates": estimates, "refused": list(judgement.refused),
        "same_states_s": same and same[0], "same_states_95_s": same and same[1],
        "served_s": served_s, "served_preemptions": len(served_log),
        "served_throughput_tok_s": _rate(run),
    }  # fmt: skip


def _holds(estimate: Estimate, value_s: float) -> bool:
    return (
        estimate.low_s is not None
        and estimate.high_s is not None
        and bool(estimate.low_s <= value_s <= estimate.high_s)
    )


def _rate(run: Run) -> float:
    return run.summary.throughput_tok_s


def show(rows: Sequence[dict[str, Any]]) -> None:
    table = Table(title="mean cost per preemption, ms: estimated from an explored log, and really served")
    for name in ("explored", "workload", "preemptions", "by chance", "its cost", "policy"):
        table.add_column(name)
    for name in (*ESTIMATORS, "same states", "served", "its preemptions"):
        table.add_column(name)
    for row in rows:
        cells = [_interval_cell(row["estimates"].get(name)) for name in ESTIMATORS]
        table.add_row(
            row["way"], str(row["workload"]), str(row["preemptions"]), f"{row['left_to_chance']:.0%}",
            f"{1e3 * row['mean_cost_s']:.2f}", row["policy"], *cells, _same(row),
            f"{1e3 * row['served_s']:.2f}", str(row["served_preemptions"]),
        )  # fmt: skip
    Console(width=180).print(table)
    for why in sorted({re.sub(r"[-\d.,%\[\] ]+", " ", why.split(";")[0].split(":")[0]) for why in _refusals(rows)}):
        print(f"refused: {why.strip()}")
    for row in rows:
        if "spent_s" in row["budget"] and row["policy"] == FIXED[0]:
            costs, cheapest = row["budget"]["spent_s"], row["budget"]["cheapest_s"]
            print(
                f"budget, workload {row['workload']}: spent {costs:.4g} s, {costs / cheapest:.2%} of {cheapest:.4g} s"
            )
    for name in ESTIMATORS:
        estimates = [row["estimates"][name] for row in rows if name in row["estimates"]]
        for what, suffix in (("what the same states cost", ""), ("what was served", "_served")):
            if estimates:
                off = median(abs(estimate[f"off{suffix}"]) for estimate in estimates)
                held_count = sum(estimate[f"holds{suffix}"] for estimate in estimates)
                print(f"{name}: {held_count} of {len(estimates)} intervals hold {what}, median off {off:.1%}")


def _same(row: dict[str, Any]) -> str:
    if row["same_states_s"] is None:
        return "-"
    return f"{1e3 * row['same_states_s']:.2f} +/- {1e3 * row['same_states_95_s']:.2f}"


def _refusals(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    return (why for row in rows for why in row["refused"])


def _interval_cell(estimate: dict[str, Any] | None) -> str:
    if estimate is None:
        return "refused"
    return f"{1e3 * estimate['value_s']:.2f} [{1e3 * estimate['low_s']:.2f}, {1e3 * estimate['high_s']:.2f}]"


if __name__ == "__main__":
    sys.exit(main())
