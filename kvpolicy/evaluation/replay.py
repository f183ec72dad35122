"""Replay: policies priced on states that were measured under both options.

An oracle that picks the lower of two noisy means would look better than any policy can be. So it chooses by one half
of a state's repeats, and it and every policy are priced on the other half; the halves change places and the two are
averaged. Intervals come from resampling whole states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import sqrt
from pathlib import Path
from statistics import fmean, variance
from typing import Any

import numpy as np

from kvpolicy.arrays import Flags, Floats, Ints
from kvpolicy.datasets.profiles import Dataset, Sample, State, measured, one_option_always_wins
from kvpolicy.datasets.quality import Floor
from kvpolicy.errors import KVPolicyError
from kvpolicy.events import KINDS, Kind
from kvpolicy.fields import WrongValue, parsed
from kvpolicy.policy import LearningPolicy, Policy, feasible_options, load_policies, probabilities_of
from kvpolicy.policy.objective import ENGINE, Objective
from kvpolicy.trace import TraceError

MIN_STATES = 20
RESAMPLES = 2000
NOISE_ERRORS = 2.0
"""Two means closer than that many standard errors of their difference are a tie."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A value with its 95% interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class PolicyScore:
    """One policy over all states."""

    policy: str
    accuracy: Interval | None
    """Probability put on the faster option, over states that are no tie; None where all are ties."""
    mean_regret_s: Interval
    p95_regret_s: Interval
    total_s: float
    """Sum over states of the expected ``engine_s``."""
    over_oracle: Interval | None
    """Total over the oracle's, less 1; None where the oracle's total is not above 0."""
    by_length: tuple[tuple[str, int, float, float], ...]
    """(tokens, states, mean regret in seconds, total of the policy in seconds) by powers of two."""
    by_load: tuple[tuple[str, int, float, float], ...]
    """The same by the number of requests running beside the victim."""


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """Policies side by side, on the same states."""

    states: int
    ties: int
    unseen_only: bool
    """Whether states that a policy's model was trained on had to be left out."""
    oracle_total_s: float
    swap_faster: int
    """States in which swap has the lower mean."""
    always_wins: Kind | None
    policies: tuple[PolicyScore, ...]
    left_out: Mapping[str, int]
    floor: Floor
    """What the traces say of the costs that policies are priced with."""
    objective: str = ENGINE.text
    """What costs, regret and totals are of; seconds."""
    learning: tuple[str, ...] = ()
    """Policies that learn while they serve. A replay asks them in their first state throughout: nothing is learned."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def text(self) -> str:
        lines = [
            f"{self.states} states, {self.ties} of them ties; swap is faster in {self.swap_faster}",
            f"oracle: {self.oracle_total_s:.4g} s in all",
            *([] if self.objective == ENGINE.text else [f"judged by {self.objective}"]),
            "",
            f"{'policy':<34} {'accuracy':>22} {'mean regret, ms':>26} {'p95 regret, ms':>26} {'over the oracle':>24}",
        ]
        for score in self.policies:
            lines.append(
                f"{score.policy:<34} {_percent(score.accuracy):>22} {_ms(score.mean_regret_s):>26} "
                f"{_ms(score.p95_regret_s):>26} {_percent(score.over_oracle):>24}"
            )
        lines.append("brackets: 95%, states resampled")
        if self.always_wins:
            lines.append(f"{self.always_wins} costs less in every state: here the cheapest policy is a constant")
        lines += [
            f"{name}: corrected by no outcome in this replay, judged as without online=on" for name in self.learning
        ]
        lines += self.floor.lines()
        return "\n".join(lines + [f"left out: {count} {reason}" for reason, count in self.left_out.items() if count])


def _percent(value: Interval | None) -> str:
    return "-" if value is None else f"{value.value:.1%} [{value.low:.1%}, {value.high:.1%}]"


def _ms(value: Interval) -> str:
    return f"{value.value * 1e3:.3f} [{value.low * 1e3:.3f}, {value.high * 1e3:.3f}]"


@dataclass(frozen=True, slots=True)
class StatePrices:
    """One state under the split-half rule, seconds."""

    oracle_s: float
    policy_s: tuple[float, ...]
    """Per policy."""
    right: tuple[float, ...]
    """Per policy, the probability of the option with the lower mean over all repeats."""
    tie: bool


def evaluate(
    traces: Sequence[Path | str], policies: Sequence[str | Policy], seed: int = 0, objective: Objective | str = ENGINE
) -> EvaluationReport:
    """Price ``policies``, each by its name or itself, on the states of ``traces``.

    ``objective`` is what they are judged by, whatever each of them minimises (see
    :class:`kvpolicy.policy.Objective`).

    Only states that no policy's cost model was trained on, with both options measured at least twice. Raises
    TraceError where fewer than 20 are left, ModelError for a model that is not for these traces' engines.
    """
    if seed < 0:
        raise WrongValue("seed", f"is {seed}, should be 0 or above")
    judging = parsed("objective", objective, Objective)
    loaded = load_policies(policies)
    dataset = measured(traces)
    _check_fit(loaded, dataset)
    usable, left_out = _usable(dataset, loaded)
    states = [judged_by(state, judging) for state in usable]
    prices = [price(state, loaded) for state in states]
    rng = np.random.default_rng(seed)
    resampled = rng.integers(0, len(states), (RESAMPLES, len(states)))
    oracle = np.array([one.oracle_s for one in prices])
    return EvaluationReport(
        states=len(states),
        ties=sum(one.tie for one in prices),
        unseen_only=left_out["states a policy's model was trained on"] > 0,
        oracle_total_s=float(oracle.sum()),
        swap_faster=sum(state.faster == "swap" for state in states),
        always_wins=one_option_always_wins(states),
        policies=tuple(_score(one.label, i, prices, states, resampled) for i, one in enumerate(loaded)),
        left_out=left_out,
        objective=judging.text,
        floor=dataset.floor,
        learning=tuple(one.label for one in loaded if isinstance(one, LearningPolicy)),
    )


def price(state: State, policies: Sequence[Policy]) -> StatePrices:
    """The split-half rule for one state; each option measured at least twice.

    A policy's price is that of the other half's means weighted with its probabilities, these averaged over the state's
    windows.
    """
    shares = [_shares(state, policy) for policy in policies]
    oracle, paid = [], []
    for choosing, paying in ((0, 1), (1, 0)):
        chosen_by = {kind: fmean(_half(state, kind, choosing)) for kind in KINDS}
        paid_s = {kind: fmean(_half(state, kind, paying)) for kind in KINDS}
        oracle.append(paid_s[min(KINDS, key=chosen_by.__getitem__)])
        paid.append([sum(share[kind] * paid_s[kind] for kind in KINDS) for share in shares])
    return StatePrices(
        oracle_s=fmean(oracle),
        policy_s=tuple(map(fmean, zip(*paid, strict=True))),
        right=tuple(share[state.faster] for share in shares),
        tie=is_tie(state),
    )


def is_tie(state: State) -> bool:
    """Whether the options' means are closer than two standard errors of their difference."""
    costs = [[sample.engine_s for sample in state.samples[kind]] for kind in KINDS]
    error = sqrt(sum(variance(some) / len(some) for some in costs))
    return abs(fmean(costs[0]) - fmean(costs[1])) < NOISE_ERRORS * error


def _half(state: State, kind: Kind, half: int) -> list[float]:
    """Every second repeat, so that both halves see the same drift."""
    return [sample.engine_s for sample in state.samples[kind][half::2]]


def _shares(state: State, policy: Policy) -> dict[Kind, float]:
    """The policy's probability of each kind, averaged over the situations of the state's windows."""
    windows = [sample for kind in KINDS for sample in state.samples[kind]]
    total = dict.fromkeys(KINDS, 0.0)
    for sample in windows:
        options = feasible_options(sample.situation)
        shares = probabilities_of(policy, sample.situation, options, policy.initial_state())
        for option, share in zip(options, shares, strict=True):
            total[option.kind] += share
    return {kind: share / len(windows) for kind, share in total.items()}


def _check_fit(policies: Sequence[Policy], dataset: Dataset) -> None:
    for policy in policies:
        for header in dataset.headers.values() if policy.cost_model is not None else ():
            assert policy.cost_model is not None
            policy.cost_model.check_fit(header.engine_spec)


def _usable(dataset: Dataset, policies: Sequence[Policy]) -> tuple[list[State], dict[str, int]]:
    seen = frozenset().union(*(policy.cost_model.state_ids for policy in policies if policy.cost_model is not None))
    trained_on = [state for state in dataset.states if state.ids & seen]
    unseen = [state for state in dataset.states if not state.ids & seen]
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
    name: str, number: int, prices: Sequence[StatePrices], states: Sequence[State], resampled: Ints
) -> PolicyScore:
    paid_s, oracle_s = np.array([one.policy_s[number] for one in prices]), np.array([one.oracle_s for one in prices])
    right = np.array([one.right[number] for one in prices])
    regret_s = paid_s - oracle_s
    decided = np.array([not one.tie for one in prices])
    return PolicyScore(
        policy=name,
        accuracy=_accuracy(right, decided, resampled),
        mean_regret_s=_interval(float(regret_s.mean()), regret_s[resampled].mean(axis=1)),
        p95_regret_s=_interval(float(np.quantile(regret_s, 0.95)), np.quantile(regret_s[resampled], 0.95, axis=1)),
        total_s=float(paid_s.sum()),
        over_oracle=_over(paid_s, oracle_s, resampled),
        by_length=_cells(regret_s, paid_s, [_length(state) for state in states]),
        by_load=_cells(regret_s, paid_s, [_load(state) for state in states]),
    )


def _interval(value: float, resampled: Floats) -> Interval:
    low, high = np.quantile(resampled, (0.025, 0.975))
    return Interval(value, float(low), float(high))


def _accuracy(right: Floats, decided: Flags, resampled: Ints) -> Interval | None:
    if not decided.any():
        return None
    drawn = decided[resampled]
    some = drawn.any(axis=1)
    means = (right[resampled] * drawn).sum(axis=1)[some] / drawn.sum(axis=1)[some]
    return _interval(float(right[decided].mean()), means)


def _over(paid_s: Floats, oracle_s: Floats, resampled: Ints) -> Interval | None:
    totals = oracle_s[resampled].sum(axis=1)
    if oracle_s.sum() <= 0 or (totals <= 0).any():
        return None
    return _interval(float(paid_s.sum() / oracle_s.sum() - 1), paid_s[resampled].sum(axis=1) / totals - 1)


def _length(state: State) -> tuple[int, str]:
    octave = int(state.computed_tokens).bit_length()
    return octave, f"{1 << (octave - 1)}-{(1 << octave) - 1}"


def _load(state: State) -> tuple[int, str]:
    running = round(fmean(sample.situation.running_requests for sample in _samples(state)))
    octave = running.bit_length()
    return octave, "0" if not running else f"{1 << (octave - 1)}-{(1 << octave) - 1}"


def _cells(
    regret_s: Floats, paid_s: Floats, groups: Sequence[tuple[int, str]]
) -> tuple[tuple[str, int, float, float], ...]:
    found = []
    for group in sorted(set(groups)):
        mine = np.array([one == group for one in groups])
        found.append((group[1], int(mine.sum()), float(regret_s[mine].mean()), float(paid_s[mine].sum())))
    return tuple(found)


def judged_by(state: State, objective: Objective) -> State:
    """The state as if what the objective weighs were its engine time: all that prices options looks at that alone.

    Raises TraceError, naming the preemption, where a delay that counts was not measured.
    """
    if objective == ENGINE:
        return state
    samples = {
        kind: tuple(replace(sample, engine_s=_weighed(sample, objective)) for sample in some)
        for kind, some in state.samples.items()
    }
    return State(state.name, state.ids, samples)


def _weighed(sample: Sample, objective: Objective) -> float:
    try:
        return objective.weigh(sample.engine_s, sample.victim_delay_s, sample.others_delay_s)
    except KVPolicyError as error:
        raise TraceError(f"table outcomes, preemption {sample.preemption_id}: {error}") from error
