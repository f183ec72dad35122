"""Does a policy that corrects its cost model while serving notice what changed, and leave alone what did not?

    python benchmarks/online_adaptation.py [--trace traces/NAME --model NAME]... [--seeds N] [--json FILE]

Streams of preemptions are made of a trace's measured states: each draws a state, the policy decides, and the cost it
is told is one of that state's own measured windows of the executed option, times what changed. Only the executed option
is ever told. Costs paid are the state's means. Judged, over seeds:

- a link 5 times slower, and another tenant that makes recomputing twice as slow: after 50 preemptions the drifted
  option's corrected predictions are off, the mean of |log| over all states, by less than 25% beyond what those of the
  undrifted model are (one factor per size cannot undo a model's scatter), or the next 50 decisions cost within 5% of
  those of a model told the change (what is no longer chosen is no longer measured) where those of a model that learns
  nothing do not; in at least 95% of seeds. What the 300 after them cost is within 5% of that model's in the mean;
- one outcome in twenty 20 times as large, on top of a learned drift (recompute or the link twice as fast): no
  correction leaves 0.8 to 1.25 of what it is without them, and the drifted option's predictions are as near with them,
  in at least 95% of seeds;
- nothing drifts: never over 1% more in total than without correction;
- the link recovers: while it was slow decisions cost, but for the first 50, within 5% of those of a model told so, and
  1000 preemptions later within 5% of those of a model that never saw it slow; in the mean.

Each demand is put to a policy that learns nothing as well. All but the one that nothing drifts must be beyond it: where
it meets one, the trace says nothing of that demand, and neither does it where fewer than one in ten preemptions take
the drifted option (for outliers: still take it, once drifted), or, where predictions are judged, where those of the
undrifted model are off by 25% themselves. Every demand must be judged on some trace.

Exits with status 1 where one of these is missed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import exp, log
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

from kvpolicy import cost
from kvpolicy.cost.model import CostModel
from kvpolicy.cost.online import Online, corrected_costs
from kvpolicy.datasets.profiles import State, read_dataset
from kvpolicy.events import KINDS, Kind, Preemption
from kvpolicy.policy import Feedback, LearningPolicy, feasible_options
from kvpolicy.policy.cheapest import CheapestOnline

ROOT = Path(__file__).resolve().parents[1]
BEFORE, WITHIN, AFTER, LONG, RECOVERY = 200, 50, 300, 2000, 1000
MAX_LOG_ERROR, MAX_EXCESS, MAX_LOSS, OUTLIER_BAND = log(1.25), 0.05, 0.01, (0.8, 1.25)
OUTLIER_SHARE, OUTLIER = 0.05, 20.0
MAX_SEEDS, MIN_TAKEN = 0.95, 0.1

Factors = Mapping[Kind, float]
SAME: Factors = {"recompute": 1.0, "swap": 1.0}
SLOW_LINK: Factors = {"recompute": 1.0, "swap": 5.0}
FAST_LINK: Factors = {"recompute": 1.0, "swap": 0.5}
TENANT: Factors = {"recompute": 2.0, "swap": 1.0}
TENANT_LEFT: Factors = {"recompute": 0.5, "swap": 1.0}


@dataclass(frozen=True)
class Field:
    """States to draw from, and the model that predicts them."""

    name: str
    model: CostModel
    states: tuple[State, ...]


@dataclass(frozen=True)
class Step:
    """One preemption of a stream."""

    state: State
    situation: Preemption
    told: Mapping[Kind, float]
    """What either option would be measured to cost."""
    paid: Mapping[Kind, float]
    """What it costs in the mean."""


class Deaf(CheapestOnline):
    """Learns nothing, but says so in the same way: what every demand but one must be beyond."""

    def observe(self, state: Online, feedback: Feedback) -> Online:
        return state


@dataclass(frozen=True)
class Answer:
    """What one policy made of a demand."""

    figure: str
    met: bool


@dataclass(frozen=True)
class Verdict:
    """One demand on one trace."""

    trace: str
    demand: str
    figure: str
    met: bool
    without: str = ""
    """The figure of a policy that learns nothing."""
    void: str = ""
    """Why the trace says nothing of this demand; empty where it does."""

    @property
    def told(self) -> str:
        return f"says nothing: {self.void}" if self.void else "met" if self.met else "MISSED"


def stream(field: Field, factors: Sequence[Factors], rng: random.Random, outliers: float = 0.0) -> list[Step]:
    """One preemption per entry of ``factors``, which multiply its costs."""
    steps = []
    for factor in factors:
        state = rng.choice(field.states)
        told = {}
        for kind in KINDS:
            by = OUTLIER if rng.random() < outliers else 1.0
            told[kind] = rng.choice(state.samples[kind]).engine_s * factor[kind] * by
        situation = rng.choice(state.samples[rng.choice(KINDS)]).situation
        steps.append(Step(state, situation, told, {kind: state.mean_s[kind] * factor[kind] for kind in KINDS}))
    return steps


def serve(policy: LearningPolicy, steps: Sequence[Step], state: Online | None) -> tuple[list[Kind], Online | None]:
    """What is executed at each step, and what was learned by the end."""
    now = policy.initial_state() if state is None else policy.resume(state)
    done: list[Kind] = []
    for step in steps:
        options = feasible_options(step.situation)
        shares, _ = policy.assess(step.situation, options, now)
        option = options[shares.index(max(shares))]
        done.append(option.kind)
        now = policy.observe(now, Feedback(step.situation, option, step.told[option.kind], None))
    return done, policy.learned(now)


def chosen_knowing(field: Field, steps: Sequence[Step], factors: Factors) -> list[Kind]:
    """What the model would choose, were it told by what its predictions are to be multiplied."""
    found: list[Kind] = []
    for step in steps:
        options = feasible_options(step.situation)
        costs = field.model.predict(step.situation, options)
        priced = [cost.engine_s * factors[option.kind] for option, cost in zip(options, costs, strict=True)]
        found.append(options[priced.index(min(priced))].kind)
    return found


def paid_s(steps: Sequence[Step], done: Sequence[Kind]) -> float:
    return sum(step.paid[kind] for step, kind in zip(steps, done, strict=True))


def learned_from(policy: LearningPolicy, steps: Sequence[Step], state: Online | None = None) -> Online:
    """The state after these steps."""
    _, online = serve(policy, steps, state)
    assert online is not None
    return online


def off(field: Field, online: Online, kind: Kind, factor: float) -> list[float]:
    """By state, log(corrected prediction / typical cost now)."""
    found = []
    for state in field.states:
        situation = state.samples[kind][0].situation
        options = feasible_options(situation)
        which = [option.kind for option in options].index(kind)
        costs = corrected_costs(field.model.predict(situation, options), options, situation.computed_tokens, online)
        floor = field.model.floor_s[kind]
        found.append(log(costs[which].engine_s / max(state.typical_s[kind] * factor, floor)))
    return found


def missed_by(found: Sequence[float]) -> float:
    """Mean of |log|, so that states predicted too high do not make up for those too low."""
    return fmean(map(abs, found))


def undrifted(field: Field, kind: Kind) -> float:
    """What the model misses by itself."""
    return missed_by(off(field, Online(), kind, 1.0))


def near(field: Field, kind: Kind, miss: float) -> bool:
    """Whether no more of a drift is left than the model misses by itself, and 25%."""
    return miss <= undrifted(field, kind) + MAX_LOG_ERROR


def over_knowing(field: Field, steps: Sequence[Step], done: Sequence[Kind], factors: Factors) -> float:
    """Share paid beyond what a model told the change would have."""
    return paid_s(steps, done) / paid_s(steps, chosen_knowing(field, steps, factors)) - 1


def noticed(
    field: Field, policy: LearningPolicy, online: Online, kind: Kind, factors: Factors, rest: Sequence[Step]
) -> bool:
    """Whether predictions are right, or decisions on ``rest`` where those of a policy that learns nothing are not."""
    if near(field, kind, missed_by(off(field, online, kind, factors[kind]))):
        return True
    over = over_knowing(field, rest, serve(policy, rest, online)[0], factors)
    return over <= MAX_EXCESS < over_knowing(field, rest, serve(deaf(field), rest, None)[0], factors)


def deaf(field: Field) -> LearningPolicy:
    return Deaf("deaf", field.model)


def learning(field: Field) -> LearningPolicy:
    return CheapestOnline("learning", field.model)


def taken(field: Field, kind: Kind, factors: Factors) -> float:
    """Share of preemptions at which a model told ``factors`` takes the option."""
    done = chosen_knowing(field, stream(field, [factors] * LONG, random.Random("taken")), factors)
    return done.count(kind) / len(done)


# ---- demands: each judges one policy ----


def caught(field: Field, policy: LearningPolicy, name: str, kind: Kind, factors: Factors, seeds: int) -> Answer:
    count, misses = 0, []
    for online, rest in drifted(field, policy, name, factors, seeds):
        count += noticed(field, policy, online, kind, factors, rest[:WITHIN])
        misses.append(missed_by(off(field, online, kind, factors[kind])))
    figure = (
        f"in {count} of {seeds} seeds; predictions off by {exp(fmean(misses)) - 1:.0%} "
        f"(worst {exp(max(misses)) - 1:.0%}; undrifted {exp(undrifted(field, kind)) - 1:.0%})"
    )
    return Answer(figure, count >= MAX_SEEDS * seeds)


def paid_afterwards(field: Field, policy: LearningPolicy, name: str, factors: Factors, seeds: int) -> Answer:
    overs = []
    for online, rest in drifted(field, policy, name, factors, seeds):
        overs.append(over_knowing(field, rest, serve(policy, rest, online)[0], factors))
    figure = f"{fmean(overs):+.1%} over a model told the change (worst {max(overs):+.1%})"
    return Answer(figure, fmean(overs) <= MAX_EXCESS)


def drifted(
    field: Field, policy: LearningPolicy, name: str, factors: Factors, seeds: int
) -> Iterator[tuple[Online, list[Step]]]:
    """By seed: what was learned :data:`WITHIN` preemptions after the change, and those that follow."""
    for seed in range(seeds):
        rng = random.Random(f"{name} {seed}")
        online = learned_from(policy, stream(field, [SAME] * BEFORE, rng))
        online = learned_from(policy, stream(field, [factors] * WITHIN, rng), online)
        yield online, stream(field, [factors] * AFTER, rng)


def outliers(field: Field, policy: LearningPolicy, kind: Kind, factors: Factors, seeds: int) -> Answer:
    """The same drifted stream with and without outliers: by how much corrections differ at the end."""
    ratios, misses = [], []
    for seed in range(seeds):
        ends = []
        for share in (0.0, OUTLIER_SHARE):
            steps = stream(field, [factors] * AFTER, random.Random(f"outliers {seed}"), share)
            online = learned_from(policy, steps)
            ends.append([fmean(off(field, online, one, factors[one])) for one in KINDS])
        ratios += [exp(with_them - without) for without, with_them in zip(*ends, strict=True)]
        misses.append(missed_by(off(field, online, kind, factors[kind])))
    low, high = OUTLIER_BAND
    right = sum(near(field, kind, miss) for miss in misses)
    figure = (
        f"corrections {min(ratios):.2f} to {max(ratios):.2f} of those without; predictions right in {right} of "
        f"{seeds} seeds, off by {exp(fmean(misses)) - 1:.0%} (worst {exp(max(misses)) - 1:.0%})"
    )
    return Answer(figure, low <= min(ratios) <= max(ratios) <= high and right >= MAX_SEEDS * seeds)


def nothing(field: Field, policy: LearningPolicy, seeds: int) -> Answer:
    worse = []
    for seed in range(seeds):
        steps = stream(field, [SAME] * LONG, random.Random(f"nothing {seed}"))
        without_s = paid_s(steps, serve(deaf(field), steps, None)[0])
        worse.append(paid_s(steps, serve(policy, steps, None)[0]) / without_s - 1)
    return Answer(f"{fmean(worse):+.2%} in total (worst {max(worse):+.2%})", max(worse) <= MAX_LOSS)


def recovery(field: Field, policy: LearningPolicy, seeds: int) -> Answer:
    slowed, again = [], []
    for seed in range(seeds):
        rng = random.Random(f"recovery {seed}")
        online = learned_from(policy, stream(field, [SLOW_LINK] * WITHIN, rng))
        slow = stream(field, [SLOW_LINK] * (BEFORE - WITHIN), rng)
        done, now = serve(policy, slow, online)
        slowed.append(over_knowing(field, slow, done, SLOW_LINK))
        online = learned_from(policy, stream(field, [SAME] * RECOVERY, rng), now)
        rest = stream(field, [SAME] * AFTER, rng)
        again.append(over_knowing(field, rest, serve(policy, rest, online)[0], SAME))
    figure = (
        f"while slow {fmean(slowed):+.1%} over a model told it; then {fmean(again):+.1%} over one never slowed "
        f"(worst {max(again):+.1%})"
    )
    return Answer(figure, max(fmean(slowed), fmean(again)) <= MAX_EXCESS)


@dataclass(frozen=True)
class Demand:
    """``taken``: the option without which a trace says nothing, and the change it must be taken under."""

    name: str
    judge: Callable[[Field, LearningPolicy, int], Answer]
    taken: tuple[Kind, Factors] | None = None
    beyond_deaf: bool = True
    of_predictions: bool = False


def drift_demands(name: str, kind: Kind, factors: Factors) -> tuple[Demand, Demand]:
    return (
        Demand(
            f"{name}: caught within {WITHIN}",
            lambda field, policy, seeds: caught(field, policy, name, kind, factors, seeds),
            (kind, SAME),
            of_predictions=True,
        ),
        Demand(
            f"{name}: paid afterwards",
            lambda field, policy, seeds: paid_afterwards(field, policy, name, factors, seeds),
            (kind, SAME),
        ),
    )


def outlier_demand(name: str, kind: Kind, factors: Factors) -> Demand:
    return Demand(
        f"{name}, {OUTLIER_SHARE:.0%} outliers x{OUTLIER:g}",
        lambda field, policy, seeds: outliers(field, policy, kind, factors, seeds),
        (kind, factors),
        of_predictions=True,
    )


DEMANDS = (
    *drift_demands("link 5x slower", "swap", SLOW_LINK),
    *drift_demands("recompute 2x slower", "recompute", TENANT),
    outlier_demand("recompute 2x faster", "recompute", TENANT_LEFT),
    outlier_demand("link 2x faster", "swap", FAST_LINK),
    Demand(f"nothing drifts, {LONG} preemptions", nothing, beyond_deaf=False),
    Demand(f"link slow and back, {RECOVERY} later", recovery, ("swap", SAME)),
)


def judged(field: Field, demand: Demand, learner: Callable[[Field], LearningPolicy], seeds: int) -> Verdict:
    if demand.taken is not None:
        kind, factors = demand.taken
        share = taken(field, kind, factors)
        if share < MIN_TAKEN:
            return Verdict(field.name, demand.name, "", False, void=f"{kind} is right in {share:.0%}")
        if demand.of_predictions and undrifted(field, kind) > MAX_LOG_ERROR:
            miss = exp(undrifted(field, kind)) - 1
            return Verdict(field.name, demand.name, "", False, void=f"undrifted {kind} is missed by {miss:.0%}")
    answer = demand.judge(field, learner(field), seeds)
    verdict = Verdict(field.name, demand.name, answer.figure, answer.met)
    if not demand.beyond_deaf:
        return verdict
    without = demand.judge(field, deaf(field), seeds)
    void = "met without learning" if without.met else ""
    return replace(verdict, without=without.figure, void=void)


def passed(verdicts: Sequence[Verdict]) -> bool:
    """Whether every demand is judged somewhere and met wherever it is."""
    said = {one.demand for one in verdicts if not one.void}
    return all(one.met for one in verdicts if not one.void) and said == {one.demand for one in verdicts}


def main() -> int:
    wanted = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    wanted.add_argument("--trace", action="append", type=Path, help="a trace's folder; default: those that ship")
    wanted.add_argument("--model", action="append", help="the cost model for it, in the same order")
    wanted.add_argument("--seeds", type=int, default=20)
    wanted.add_argument("--json", type=Path, metavar="FILE", help="write the verdicts there")
    given = wanted.parse_args()
    folders = given.trace or [ROOT / "traces" / name for name in ("cpu-llama-native", "cpu-llama-simulated-link")]
    models = given.model or [str(folder.name) for folder in folders]
    fields = [
        Field(folder.name, cost.load(model), read_dataset([folder]).states)
        for folder, model in zip(folders, models, strict=True)
    ]
    verdicts = [judged(field, demand, learning, given.seeds) for field in fields for demand in DEMANDS]
    table = Table("trace", "demand", "found", "learning nothing", "")
    for one in verdicts:
        table.add_row(one.trace, one.demand, one.figure, one.without, one.told)
    Console(width=200).print(table)
    for name in sorted({one.demand for one in verdicts} - {one.demand for one in verdicts if not one.void}):
        print(f"{name}: judged on no trace", file=sys.stderr)
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps({"verdicts": [asdict(one) for one in verdicts]}, indent=2) + "\n")
    return 0 if passed(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
