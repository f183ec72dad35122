"""Replay: evaluation of policies on states that were measured under both options.

An oracle that picks the lower of two noisy means would be biased: no policy could be as good. The oracle therefore
chooses by one half of a state's repeats, and the oracle and all policies are charged the means of the other half. The
halves are then exchanged, and both results averaged. Intervals come from resampling whole states.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import sqrt
from pathlib import Path
from statistics import fmean, variance
from typing import Any

import numpy as np

from kvpolicy.arrays import Flags, Floats, Ints
from kvpolicy.attribution.step_work import BatchPrices
from kvpolicy.cost import CostModel
from kvpolicy.datasets.examples import stratified_folds
from kvpolicy.datasets.profiles import Dataset, Sample, State, one_option_always_wins, read_dataset
from kvpolicy.datasets.quality import DataQuality
from kvpolicy.datasets.threshold import BEST_THRESHOLD, Difference, best_threshold, difference
from kvpolicy.errors import KVPolicyError
from kvpolicy.events import KINDS, Kind
from kvpolicy.fields import WrongValue
from kvpolicy.policy import (
    LearningPolicy,
    Policy,
    feasible_options,
    initial_state_of,
    load_policies,
    load_policy,
    probabilities_of,
    spec_lines,
)
from kvpolicy.policy.cheapest import Always, Coin, Threshold
from kvpolicy.policy.objective import ENGINE, Objective, objective_of
from kvpolicy.trace import TraceError

MIN_STATES = 20
FOLDS = 5
"""Folds of the choice of a threshold where no states were set aside for it."""
RESAMPLES = 2000
NOISE_ERRORS = 2.0
"""Two means closer than this many standard errors of their difference are a tie."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A value with its 95% interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class PolicyScore:
    """Scores of one policy over all states."""

    policy: str
    accuracy: Interval | None
    """Mean probability of the faster option, over states that are no tie; None if all are ties."""
    mean_regret_s: Interval
    p95_regret_s: Interval
    total_s: float
    """Sum over states of the expected ``engine_s``."""
    over_oracle: Interval | None
    """Total divided by the oracle's total, less 1; None if the oracle's total is not above 0."""
    by_length: tuple[tuple[str, int, float, float], ...]
    """(tokens, states, mean regret in seconds, total of the policy in seconds) by powers of two."""
    by_load: tuple[tuple[str, int, float, float], ...]
    """The same by the number of other running requests."""


@dataclass(frozen=True, slots=True)
class ThresholdScore:
    """The best rule by length alone, chosen on other states than it is judged on."""

    rules: tuple[str, ...]
    """Policies that were chosen: one where a model's training states are in the traces, else one per fold."""
    chosen_on: str
    score: PolicyScore
    against: tuple[Difference, ...]
    """The policies that do not decide by length alone, compared with it."""

    def choice(self) -> str:
        """The rules and what they were chosen on, as text."""
        return f"{BEST_THRESHOLD}: {', '.join(self.rules)}, chosen on {self.chosen_on}"


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """Scores of several policies on the same states."""

    states: int
    ties: int
    unseen_only: bool
    """Whether states were left out because a policy's model was trained on them."""
    oracle_total_s: float
    swap_faster: int
    """States in which swap has the lower mean."""
    always_wins: Kind | None
    policies: tuple[PolicyScore, ...]
    left_out: Mapping[str, int]
    floor: DataQuality
    """Quality of the costs that the traces hold."""
    prices: BatchPrices
    """What a recomputed token costs beside the measured batches, over a decoded one."""
    threshold: ThresholdScore
    objective: str = ENGINE.text
    """Objective that costs, regret and totals are measured by, seconds."""
    learning: tuple[str, ...] = ()
    """Policies that learn while they serve. A replay evaluates them in their initial state throughout."""
    specs: Mapping[str, str] = field(default_factory=dict, compare=False)
    """By label, what was given where the label does not say it; see :func:`kvpolicy.policy.specs_by_label`."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def text(self) -> str:
        lines = [
            f"{self.states} states, {self.ties} of them ties; swap is faster in {self.swap_faster}",
            f"oracle: {self.oracle_total_s:.4g} s in total",
            *([] if self.objective == ENGINE.text else [f"judged by {self.objective}"]),
            "",
            f"{'policy':<34} {'accuracy':>22} {'mean regret, ms':>26} {'p95 regret, ms':>26} {'over the oracle':>24}",
        ]
        for score in (*self.policies, self.threshold.score):
            lines.append(
                f"{score.policy:<34} {_percent(score.accuracy):>22} {_ms(score.mean_regret_s):>26} "
                f"{_ms(score.p95_regret_s):>26} {_percent(score.over_oracle):>24}"
            )
        lines.append("brackets: 95% intervals, states resampled")
        lines += spec_lines(self.specs)
        if any(score.mean_regret_s.value < 0 for score in (*self.policies, self.threshold.score)):
            lines.append(
                "below zero: the oracle chooses by half of the repeats and pays the others, so noise misleads it"
            )
        lines += [self.threshold.choice(), *(compared.text() for compared in self.threshold.against)]
        if self.always_wins:
            lines.append(f"{self.always_wins} costs less in every state: here always choosing it is optimal")
        lines += [f"{name}: a replay has no outcomes to learn from; {_judged(name)}" for name in self.learning]
        lines += [*self.floor.lines(), self.prices.sentence()]
        return "\n".join(lines + [f"left out: {count} {reason}" for reason, count in self.left_out.items() if count])


def _judged(name: str) -> str:
    """How a policy that learns is judged; one that ships is that of another name, before it has learned anything."""
    return "judged as without online=on" if "online=on" in name else "judged in its initial state"


def _percent(value: Interval | None) -> str:
    return "-" if value is None else f"{value.value:.1%} [{value.low:.1%}, {value.high:.1%}]"


def _ms(value: Interval) -> str:
    return f"{value.value * 1e3:.3f} [{value.low * 1e3:.3f}, {value.high * 1e3:.3f}]"


@dataclass(frozen=True, slots=True)
class StatePrices:
    """Costs in one state by the split-half rule, seconds."""

    oracle_s: float
    policy_s: tuple[float, ...]
    """Per policy."""
    right: tuple[float, ...]
    """Per policy, the probability of the option with the lower mean over all repeats."""
    tie: bool


def evaluate(
    traces: Sequence[Path | str], policies: Sequence[str | Policy], seed: int = 0, objective: Objective | str = ENGINE
) -> EvaluationReport:
    """Evaluate ``policies``, given by name or as objects, on the states of ``traces``.

    ``objective``: what costs are measured by, whatever each policy minimises (see :class:`kvpolicy.policy.Objective`).

    Uses the states that no policy's cost model was trained on, with both options measured at least twice. Raises
    TraceError if fewer than 20 are left, ModelError for a cost model that does not fit the traces' engines.
    """
    if seed < 0:
        raise WrongValue("seed", f"is {seed}, should be 0 or above")
    parsed_objective = objective_of(objective)
    loaded = load_policies(policies)
    dataset = of_models(read_dataset(traces), [policy.cost_model for policy in loaded])
    _check_fit(loaded, dataset)
    trained_on = _trained_on(dataset, loaded)
    usable, left_out = _usable(dataset, trained_on)
    states, trained_on = (
        [with_objective_costs(state, parsed_objective) for state in part] for part in (usable, trained_on)
    )
    rules, chosen_on = _thresholds(states, trained_on, seed)
    prices = [price(state, [*loaded, load_policy(rule)]) for state, rule in zip(states, rules, strict=True)]
    rng = np.random.default_rng(seed)
    resamples = rng.integers(0, len(states), (RESAMPLES, len(states)))
    oracle = np.array([cost.oracle_s for cost in prices])
    return EvaluationReport(
        states=len(states),
        ties=sum(cost.tie for cost in prices),
        unseen_only=left_out["states a policy's model was trained on"] > 0,
        oracle_total_s=float(oracle.sum()),
        swap_faster=sum(state.faster == "swap" for state in states),
        always_wins=one_option_always_wins(states),
        policies=tuple(_score(policy.label, i, prices, states, resamples) for i, policy in enumerate(loaded)),
        left_out=left_out,
        objective=parsed_objective.text,
        floor=dataset.floor,
        threshold=ThresholdScore(
            rules=tuple(sorted(set(rules))),
            chosen_on=chosen_on,
            score=_score(BEST_THRESHOLD, len(loaded), prices, states, resamples),
            against=_against_threshold(loaded, prices),
        ),
        learning=tuple(policy.label for policy in loaded if isinstance(policy, LearningPolicy)),
        prices=dataset.prices,
    )


def _thresholds(states: Sequence[State], trained_on: Sequence[State], seed: int) -> tuple[list[str], str]:
    """Name of the best threshold for each state, never chosen on that state; and what it was chosen on, in words.

    Chosen on the states that the models were trained on, if there are enough; else by cross-fitting.
    """
    if len(trained_on) >= MIN_STATES:
        return [best_threshold(trained_on).policy] * len(
            states
        ), f"{len(trained_on)} states that a model was trained on"
    fold_of = stratified_folds(states, FOLDS, random.Random(f"threshold {seed}"))
    rules = [
        best_threshold([state for state, number in zip(states, fold_of, strict=True) if number != fold]).policy
        for fold in range(FOLDS)
    ]
    return [rules[fold] for fold in fold_of], f"the states of the other folds, {FOLDS} folds"


def _against_threshold(policies: Sequence[Policy], prices: Sequence[StatePrices]) -> tuple[Difference, ...]:
    threshold_s = [cost.policy_s[-1] for cost in prices]
    return tuple(
        difference(policy.label, [cost.policy_s[number] for cost in prices], threshold_s)
        for number, policy in enumerate(policies)
        if not isinstance(policy, Always | Coin | Threshold)
    )


def price(state: State, policies: Sequence[Policy]) -> StatePrices:
    """Costs of the oracle and of the policies in one state by the split-half rule; each option measured at least twice.

    A policy's cost is the mean of the options' costs in the other half, weighted by the policy's probabilities. These
    are averaged over the state's windows.
    """
    shares = [_shares(state, policy) for policy in policies]
    oracle_costs, costs = [], []
    for choosing, paying in ((0, 1), (1, 0)):
        choosing_means = {kind: fmean(_half(state, kind, choosing)) for kind in KINDS}
        paying_means = {kind: fmean(_half(state, kind, paying)) for kind in KINDS}
        oracle_costs.append(paying_means[min(KINDS, key=choosing_means.__getitem__)])
        costs.append([sum(share[kind] * paying_means[kind] for kind in KINDS) for share in shares])
    return StatePrices(
        oracle_s=fmean(oracle_costs),
        policy_s=tuple(map(fmean, zip(*costs, strict=True))),
        right=tuple(share[state.faster] for share in shares),
        tie=is_tie(state),
    )


def is_tie(state: State) -> bool:
    """Whether the difference of the options' means is below two of its standard errors."""
    costs = [[sample.engine_s for sample in state.samples[kind]] for kind in KINDS]
    error = sqrt(sum(variance(values) / len(values) for values in costs))
    return abs(fmean(costs[0]) - fmean(costs[1])) < NOISE_ERRORS * error


def _half(state: State, kind: Kind, half: int) -> list[float]:
    """Every second repeat, so that both halves have the same drift."""
    return [sample.engine_s for sample in state.samples[kind][half::2]]


def _shares(state: State, policy: Policy) -> dict[Kind, float]:
    """The policy's probability of each kind, averaged over the situations of the state's windows."""
    windows = [sample for kind in KINDS for sample in state.samples[kind]]
    total, initial_state = dict.fromkeys(KINDS, 0.0), initial_state_of(policy)
    for sample in windows:
        options = feasible_options(sample.situation)
        shares = probabilities_of(policy, sample.situation, options, initial_state)
        for option, share in zip(options, shares, strict=True):
            total[option.kind] += share
    return {kind: share / len(windows) for kind, share in total.items()}


def of_models(dataset: Dataset, models: Sequence[CostModel | None]) -> Dataset:
    """The dataset without the states over another kind of host memory than that of the models, if they agree on one."""
    kinds = {model.pinned for model in models if model is not None and model.pinned is not None}
    return dataset.of_host_memory(kinds.pop() if len(kinds) == 1 else None)


def _check_fit(policies: Sequence[Policy], dataset: Dataset) -> None:
    for policy in policies:
        for core, header in dataset.headers.items() if policy.cost_model is not None else ():
            assert policy.cost_model is not None
            policy.cost_model.check_fit(replace(header.engine_spec, pinned=dataset.pinned_by_core.get(core)))


def _trained_on(dataset: Dataset, policies: Sequence[Policy]) -> list[State]:
    """States that a policy's cost model was trained on."""
    models = [policy.cost_model for policy in policies if policy.cost_model is not None]
    training_ids = frozenset().union(*(model.state_ids for model in models))
    return [state for state in dataset.states if state.ids & training_ids]


def _usable(dataset: Dataset, trained_on: Sequence[State]) -> tuple[list[State], dict[str, int]]:
    training_ids = frozenset().union(*(state.ids for state in trained_on))
    unseen = [state for state in dataset.states if not state.ids & training_ids]
    repeated = [state for state in unseen if all(len(state.samples[kind]) > 1 for kind in KINDS)]
    usable = [state for state in repeated if all(map(_both_feasible, _samples(state)))]
    left_out = dict(dataset.left_out) | {
        "states a policy's model was trained on": len(trained_on),
        "states with an option measured only once": len(unseen) - len(repeated),
        "states in which the host pool had no room": len(repeated) - len(usable),
    }
    if len(usable) < MIN_STATES:
        reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.items() if count) or "nothing left out"
        raise TraceError(
            f"{len(usable)} states can be priced, at least {MIN_STATES} are needed ({reasons}); "
            "let `kvpolicy profile` measure more; of 40 states or more, training holds out at least 20"
        )
    return usable, left_out


def _samples(state: State) -> list[Sample]:
    return [sample for kind in KINDS for sample in state.samples[kind]]


def _both_feasible(sample: Sample) -> bool:
    return len(feasible_options(sample.situation)) == len(KINDS)


def _score(
    name: str, number: int, prices: Sequence[StatePrices], states: Sequence[State], resamples: Ints
) -> PolicyScore:
    policy_s, oracle_s = (
        np.array([cost.policy_s[number] for cost in prices]),
        np.array([cost.oracle_s for cost in prices]),
    )
    accuracy_by_state = np.array([cost.right[number] for cost in prices])
    regret_s = policy_s - oracle_s
    untied = np.array([not cost.tie for cost in prices])
    return PolicyScore(
        policy=name,
        accuracy=_accuracy(accuracy_by_state, untied, resamples),
        mean_regret_s=_interval(float(regret_s.mean()), regret_s[resamples].mean(axis=1)),
        p95_regret_s=_interval(float(np.quantile(regret_s, 0.95)), np.quantile(regret_s[resamples], 0.95, axis=1)),
        total_s=float(policy_s.sum()),
        over_oracle=_over(policy_s, oracle_s, resamples),
        by_length=_cells(regret_s, policy_s, [_length(state) for state in states]),
        by_load=_cells(regret_s, policy_s, [_load(state) for state in states]),
    )


def _interval(value: float, resampled_values: Floats) -> Interval:
    low, high = np.quantile(resampled_values, (0.025, 0.975))
    return Interval(value, float(low), float(high))


def _accuracy(right: Floats, untied: Flags, resamples: Ints) -> Interval | None:
    if not untied.any():
        return None
    untied_draws = untied[resamples]
    valid = untied_draws.any(axis=1)
    means = (right[resamples] * untied_draws).sum(axis=1)[valid] / untied_draws.sum(axis=1)[valid]
    return _interval(float(right[untied].mean()), means)


def _over(policy_s: Floats, oracle_s: Floats, resamples: Ints) -> Interval | None:
    totals = oracle_s[resamples].sum(axis=1)
    if oracle_s.sum() <= 0 or (totals <= 0).any():
        return None
    return _interval(float(policy_s.sum() / oracle_s.sum() - 1), policy_s[resamples].sum(axis=1) / totals - 1)


def _length(state: State) -> tuple[int, str]:
    octave = int(state.computed_tokens).bit_length()
    return octave, f"{1 << (octave - 1)}-{(1 << octave) - 1}"


def _load(state: State) -> tuple[int, str]:
    running = round(fmean(sample.situation.running_requests for sample in _samples(state)))
    octave = running.bit_length()
    return octave, "0" if not running else f"{1 << (octave - 1)}-{(1 << octave) - 1}"


def _cells(
    regret_s: Floats, policy_s: Floats, groups: Sequence[tuple[int, str]]
) -> tuple[tuple[str, int, float, float], ...]:
    cells = []
    for group in sorted(set(groups)):
        members = np.array([label == group for label in groups])
        cells.append((group[1], int(members.sum()), float(regret_s[members].mean()), float(policy_s[members].sum())))
    return tuple(cells)


def with_objective_costs(state: State, objective: Objective) -> State:
    """The state with the objective's cost in place of ``engine_s``, the only cost that the replay reads.

    Raises TraceError, naming the preemption, if a delay that the objective needs was not measured.
    """
    if objective == ENGINE:
        return state
    samples = {
        kind: tuple(replace(sample, engine_s=_objective_cost_s(sample, objective)) for sample in samples)
        for kind, samples in state.samples.items()
    }
    return State(state.name, state.ids, samples)


def _objective_cost_s(sample: Sample, objective: Objective) -> float:
    try:
        return objective.weigh(sample.engine_s, sample.victim_delay_s, sample.others_delay_s)
    except KVPolicyError as error:
        raise TraceError(f"table outcomes, preemption {sample.preemption_id}: {error}") from error
