"""Evaluation of policies on a production log, in which only one action was taken in each situation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvpolicy.arrays import Floats
from kvpolicy.datasets.threshold import BEST_THRESHOLD, PREEMPTION, Difference
from kvpolicy.evaluation import bounds, victim_rules
from kvpolicy.evaluation.bounds import Resamples, Terms
from kvpolicy.evaluation.decision_log import Log, attributed_log, read_traces
from kvpolicy.evaluation.diagnostics import Calibration, Support, calibration, known_by_action, log_refusals, support
from kvpolicy.evaluation.direct_model import Design, DirectCosts, folds_of
from kvpolicy.evaluation.displacements import Displacements, displacements_of
from kvpolicy.evaluation.estimation import Estimation
from kvpolicy.evaluation.estimators import ESTIMATORS, Records, TunedTerms, cross_fitted_dr, importance_weights
from kvpolicy.evaluation.log_headroom import log_headroom
from kvpolicy.evaluation.log_service import log_service, service_lines
from kvpolicy.evaluation.log_threshold import ChosenRules, choose_rules
from kvpolicy.evaluation.victim_rules import VictimRule
from kvpolicy.events import KINDS
from kvpolicy.fields import WrongValue
from kvpolicy.headroom import Headroom
from kvpolicy.json_values import finite
from kvpolicy.latency import NO_SLO, ClassSummary
from kvpolicy.policy import Policy, initial_state_of, load_policies, spec_lines
from kvpolicy.policy.cheapest import Always, Coin, Threshold
from kvpolicy.policy.objective import ENGINE, Objective, objective_of

BOUNDED = frozenset({"ips", "dr", "cross-fitted-dr", "switch-dr", "dros"})
"""Estimators whose terms have known limits; the ratio of SNIPS and the fit of the direct method have none."""
ESTIMAND = (
    "estimated: mean cost per preemption in the states that the logging policy reached, by intended action; effects of "
    "an action on later states are not included, for these use a simulator"
)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimate of a policy's mean cost per preemption, seconds."""

    estimator: str
    value_s: float
    low_s: float | None
    """95%; None if the interval is not defined for this estimator."""
    high_s: float | None
    n: int
    effective: float
    tuning: float | None
    """SWITCH's threshold or DRos's shrinkage; infinite if the weights are unchanged."""
    bias_s: float
    """Upper bound on the bias that the tuning introduces; the interval is wider by it to either side."""

    def line(self) -> str:
        span = "-" if self.low_s is None or self.high_s is None else f"[{_ms(self.low_s)}, {_ms(self.high_s)}]"
        tuned = "" if self.tuning is None else f"  tuned to {self.tuning:.3g}"
        return f"  {self.estimator:<18} {_ms(self.value_s):>9} ms  {span:<24} effective {self.effective:.0f}{tuned}"


@dataclass(frozen=True, slots=True)
class Judgement:
    """Result for one policy: estimates, or the reasons why there are none."""

    policy: str
    support: Support
    estimates: tuple[Estimate, ...]
    """Empty if the estimate was refused."""
    refused: tuple[str, ...]

    def lines(self) -> list[str]:
        if self.refused:
            return [f"{self.policy}: refused", *(f"  because {why}" for why in self.refused)]
        return [
            f"{self.policy}: mean weight {self.support.mean_weight:.3f}, effective sample "
            f"{self.support.effective_share:.1%} of the records",
            *(estimate.line() for estimate in self.estimates),
        ]


@dataclass(frozen=True, slots=True)
class LogThreshold:
    """The best rule by length alone, chosen on other records than it is judged on."""

    rules: tuple[str, ...]
    """Policies that were chosen: one where the records a model was trained on are in the log, else one per fold."""
    choice: str
    """The rules and what they were chosen on, as text."""
    judgement: Judgement
    against: tuple[Difference, ...]
    """The policies that do not decide by length alone, compared with it by cross-fitted-dr; without refused ones."""

    def lines(self) -> list[str]:
        lines = [*self.judgement.lines(), f"  {self.choice}", *(compared.text() for compared in self.against)]
        return [*lines, "  no policy is compared with it"] if self.judgement.refused else lines


@dataclass(frozen=True, slots=True)
class OffPolicyReport:
    """Results for several policies on one log."""

    n: int
    clusters: int
    cluster: str
    interval: str
    objective: str
    logged: Estimate | None
    """Estimate for the logging policy itself; None if the log is refused."""
    refused: tuple[str, ...]
    """Reasons why the log supports no estimate at all, not even for the logging policy."""
    policies: tuple[Judgement, ...]
    calibration: Calibration
    known: Mapping[str, tuple[int, int]]
    """By action, the number of records, and of those with a known cost."""
    counts: Mapping[str, int]
    """See :class:`kvpolicy.evaluation.decision_log.Log`."""
    learning: tuple[str, ...]
    """Policies with a state; they are evaluated in their initial state throughout."""
    headroom: Headroom | None = None
    """What there was to win by choosing better than the logging policy; None for a log without its traces."""
    threshold: LogThreshold | None = None
    """None for a log that supports no estimate, or that was given without a choice of rules."""
    classes: Mapping[str, ClassSummary] = field(default_factory=dict)
    """The service that the log's requests got, by class; empty for a log without its traces."""
    displacements: Displacements | None = None
    """What the log says of the requests that its order of service displaced; None where none is recorded."""
    victims: tuple[VictimRule, ...] = ()
    """Rules for victims among equals; empty for a log in which none were left to chance."""
    specs: Mapping[str, str] = field(default_factory=dict)
    """By label, what was given where the label does not say it; see :func:`kvpolicy.policy.specs_by_label`."""

    def to_dict(self) -> dict[str, Any]:
        return {name: finite(value) for name, value in asdict(self).items()}

    def text(self) -> str:
        took = ", ".join(f"{kind} {count} ({known} with a known cost)" for kind, (count, known) in self.known.items())
        lines = [
            f"{self.n} decisions in {self.clusters} clusters ({self.cluster}): {took}",
            ESTIMAND,
            *([] if self.objective == ENGINE.text else [f"judged by {self.objective}"]),
            f"brackets: 95% intervals, {self.interval}",
            "",
            *self._logged_lines(),
            *([] if self.headroom is None else [self.headroom.sentence()]),
            *service_lines(self.classes),
            *([] if self.displacements is None else self.displacements.lines()),
            *(line for rule in self.victims for line in rule.lines()),
            *(line for judgement in self.policies for line in judgement.lines()),
            *spec_lines(self.specs),
            *([] if self.threshold is None else self.threshold.lines()),
            "",
            *_calibration_lines(self.calibration),
        ]
        lines += [f"{count} {what}" for what, count in self.counts.items() if count]
        return "\n".join([*lines, *(f"{name}: evaluated in its initial state throughout" for name in self.learning)])

    def _logged_lines(self) -> list[str]:
        if self.logged is None:
            return ["as logged: refused", *(f"  because {why}" for why in self.refused)]
        return ["as logged:", self.logged.line()]


def _calibration_lines(calibrated: Calibration) -> list[str]:
    if calibrated.chance is None:
        return ["logged probabilities: too few decisions were random to check them"]
    lines = [f"logged probability of swap, and share of swaps chosen (p {calibrated.chance:.2g}):"]
    for row in calibrated.bins:
        span = f"{row.low:.3g}" if row.low == row.high else f"{row.low:.3g} to {row.high:.3g}"
        lines.append(f"  {span:<16} {row.expected_share:.1%} {row.chosen_share:.1%} of {row.decisions}")
    return lines


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g}"


def estimate(
    traces: Sequence[Path | str],
    policies: Sequence[str | Policy],
    seed: int = 0,
    objective: Objective | str = ENGINE,
    how: Estimation = Estimation(),
    between: tuple[str, str] | None = None,
) -> OffPolicyReport:
    """Estimate the cost of ``policies``, given by name or as objects, in the states of production logs.

    ``between``: what was recorded between two times alone, as for :func:`kvpolicy.trace.read_between`. Raises
    TraceError as it and as :func:`kvpolicy.evaluation.decision_log.read_log`, ModelError for a cost model that does not
    fit the logs' engines, WrongValue for an unknown name.
    """
    if seed < 0:
        raise WrongValue("seed", f"is {seed}, should be 0 or above")
    parsed_objective = objective_of(objective)
    loaded = load_policies(policies)
    trained_on = frozenset().union(*(policy.cost_model.state_ids for policy in loaded if policy.cost_model is not None))
    by_folder = read_traces(traces, between)
    full = attributed_log(by_folder, parsed_objective, how.cluster)
    log = full.without(trained_on, "records that a policy's model was trained on")
    for policy in loaded:
        _check_fit(policy, log)
    targets = {policy.label: log.targets(policy) for policy in loaded}
    learning = tuple(policy.name for policy in loaded if not _is_stateless(policy))
    report = judge(log, targets, seed, how, parsed_objective.text, learning)
    if not report.refused:
        rules = choose_rules(full, log, np.random.default_rng(seed))
        by_more = [policy.label for policy in loaded if not isinstance(policy, Always | Coin | Threshold)]
        report = replace(
            report, threshold=judge_rules(log, rules, {name: targets[name] for name in by_more}, seed, how)
        )
    cost_model = next((policy.cost_model for policy in loaded if policy.cost_model is not None), None)
    recorded = list(by_folder.values())
    return replace(
        report,
        headroom=log_headroom(recorded, cost_model),
        classes=log_service(recorded, how.slo or NO_SLO),
        displacements=displacements_of(recorded),
        victims=victim_rules.judge_rules(recorded, seed),
    )


def judge(
    log: Log,
    targets: Mapping[str, Floats],
    seed: int,
    how: Estimation = Estimation(),
    objective: str = ENGINE.text,
    learning: tuple[str, ...] = (),
) -> OffPolicyReport:
    """As :func:`estimate`, for policies given by their probabilities (``targets``), (n, K) each."""
    prepared = _Prepared.of(log, seed, how)
    resamples, calibrated = prepared.resamples, calibration(log.probability, log.action)
    reasons = log_refusals(calibrated, int(log.cluster.max()) + 1, log.known)
    as_logged = prepared.records(log.probability)
    judgements = [prepared.judgement(name, target, reasons) for name, target in targets.items()]
    return OffPolicyReport(
        n=len(log),
        clusters=int(log.cluster.max()) + 1,
        cluster=how.cluster,
        interval=how.interval,
        objective=objective,
        logged=None if reasons else _estimate("ips", as_logged, log, resamples, how),
        refused=reasons,
        policies=tuple(judgements),
        calibration=calibrated,
        known=known_by_action(log.action, log.known),
        counts=log.counts,
        learning=learning,
    )


def judge_rules(
    log: Log, rules: ChosenRules, targets: Mapping[str, Floats], seed: int, how: Estimation = Estimation()
) -> LogThreshold:
    """Judge the best threshold as :func:`judge` does a policy, and compare the policies of ``targets`` with it."""
    prepared = _Prepared.of(log, seed, how)
    target = rules.targets(log)
    judgement = prepared.judgement(BEST_THRESHOLD, target, ())
    against = []
    if not judgement.refused:
        of_rules = cross_fitted_dr(prepared.records(target)).terms.value
        for name, other in targets.items():
            if not prepared.judgement(name, other, ()).refused:
                of_policy = cross_fitted_dr(prepared.records(other)).terms.value
                against.append(prepared.difference(name, of_policy - of_rules))
    return LogThreshold(rules.names, rules.choice(), judgement, tuple(against))


@dataclass(frozen=True)
class _Prepared:
    """What the judgements of all policies on a log share."""

    log: Log
    how: Estimation
    resamples: Resamples
    design: Design
    predicted: DirectCosts

    @classmethod
    def of(cls, log: Log, seed: int, how: Estimation) -> _Prepared:
        rng = np.random.default_rng(seed)
        resamples = Resamples.of(log.cluster, rng)
        design = Design.of(log.x, log.action, log.known, len(KINDS), folds_of(log.cluster, rng))
        return cls(log, how, resamples, design, _predicted(design, log, how.limit_s))

    def records(self, target: Floats) -> Records:
        log = self.log
        return Records(
            target,
            log.probability,
            importance_weights(target, log.probability, log.action, log.known, log.known_share),
            log.cost_s,
            log.action,
            self.predicted.in_sample,
            self.predicted.cross_fitted,
            self.design.implied_weights(target),
            self.resamples.group,
        )

    def judgement(self, name: str, target: Floats, reasons: Sequence[str]) -> Judgement:
        """``reasons``: why the log supports no estimate at all."""
        log, records = self.log, self.records(target)
        supported = support(target, log.probability, records.weight, log.known_share, self.resamples)
        refused = (*reasons, *supported.refused)
        names = () if refused else self.how.estimators or tuple(ESTIMATORS)
        estimates = tuple(_estimate(estimator, records, log, self.resamples, self.how) for estimator in names)
        return Judgement(name, supported, estimates, refused)

    def difference(self, name: str, difference_s: Floats) -> Difference:
        """A policy compared with the best threshold. ``difference_s``: (n,) terms of its cost less the rule's."""
        terms = Terms(difference_s)
        if self.how.interval == "sequence":
            low, high = bounds.sequence(terms, self.log.cluster)
        else:
            low, high = bounds.bootstrap(terms, self.resamples)
        return Difference(name, terms.mean(), low, high, len(self.log), PREEMPTION)


def _predicted(design: Design, log: Log, limit_s: float | None) -> DirectCosts:
    predicted = design.predict(log.cost_s)
    if limit_s is None:
        return predicted
    return DirectCosts(
        np.clip(predicted.in_sample, -limit_s, limit_s), np.clip(predicted.cross_fitted, -limit_s, limit_s)
    )


def _estimate(name: str, records: Records, log: Log, resamples: Resamples, how: Estimation) -> Estimate:
    tuned = ESTIMATORS[name](records)
    low, high = _interval(name, tuned, records, log, resamples, how)
    squares = float((records.weight**2).sum())
    return Estimate(
        estimator=name,
        value_s=tuned.terms.mean(),
        low_s=None if low is None else low - tuned.bias_s,
        high_s=None if high is None else high + tuned.bias_s,
        n=len(log),
        effective=float(records.weight.sum()) ** 2 / squares if squares else 0.0,
        tuning=tuned.tuning,
        bias_s=tuned.bias_s,
    )


def _interval(
    name: str, tuned: TunedTerms, records: Records, log: Log, resamples: Resamples, how: Estimation
) -> tuple[float, float] | tuple[None, None]:
    terms: Terms = tuned.terms
    limit_s = how.limit_s
    if how.interval == "bootstrap":
        return bounds.bootstrap(terms, resamples)
    if how.interval == "sequence":
        return bounds.sequence(terms, log.cluster)
    if name not in BOUNDED or limit_s is None:
        return None, None
    if np.nanmax(np.abs(log.cost_s)) > limit_s:
        raise WrongValue("limit_s", f"is {limit_s:g}, a cost of {np.nanmax(np.abs(log.cost_s)):g} s exceeds it")
    heaviest = heaviest_weight(records.target, records.probability, log.known_share)
    limit = limit_s * (heaviest if name == "ips" else 1.0 + 2.0 * heaviest)
    return bounds.bernstein(terms, log.cluster, (-limit, limit))


def heaviest_weight(target: Floats, probability: Floats, known_share: Floats) -> float:
    """Largest possible weight of any action of any record, whichever action was drawn.

    ``target``, ``probability``: (n, K); ``known_share``: (K,), NaN for actions never taken, for which 1 is taken.
    """
    share = np.nan_to_num(known_share, nan=1.0)
    possible = (probability > 0) & (share > 0)
    return float(np.divide(target, probability * share, out=np.zeros_like(target), where=possible).max())


def _check_fit(policy: Policy, log: Log) -> None:
    if policy.cost_model is None:
        return
    for header in log.headers.values():
        policy.cost_model.check_fit(replace(header.engine_spec, pinned=log.pinned))


def _is_stateless(policy: Policy) -> bool:
    """Whether the policy has no state, so that its decisions do not change with time."""
    return initial_state_of(policy).to_json() == "{}"
