"""Policies judged on a production log, in which every situation was met with one action only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvpolicy.arrays import Floats
from kvpolicy.evaluation import bounds
from kvpolicy.evaluation.bounds import Resampled, Terms
from kvpolicy.evaluation.decision_log import Log, logged
from kvpolicy.evaluation.diagnostics import Calibration, Support, calibration, log_refusals, support, told_by_action
from kvpolicy.evaluation.direct_model import Design, Predicted, folds_of
from kvpolicy.evaluation.estimation import Estimation
from kvpolicy.evaluation.estimators import ESTIMATORS, Records, Tuned, importance_weights
from kvpolicy.events import KINDS
from kvpolicy.fields import WrongValue, parsed
from kvpolicy.json_values import finite
from kvpolicy.policy import Policy, PolicyState, load_policies
from kvpolicy.policy.objective import ENGINE, Objective

BOUNDED = frozenset({"ips", "dr", "cross-fitted-dr", "switch-dr", "dros"})
"""Estimators whose terms have limits: not the ratio of SNIPS, nor the direct method, whose fit knows none."""
ESTIMAND = (
    "estimated: mean cost per preemption in the states that the log's policy brought about, by intended action; what "
    "an action does to later states is not in it, that takes a simulator"
)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Of a policy's mean cost per preemption, seconds."""

    estimator: str
    value_s: float
    low_s: float | None
    """95%; None where the interval is not defined for this estimator."""
    high_s: float | None
    n: int
    effective: float
    tuning: float | None
    """SWITCH's threshold or DRos's shrinkage; infinite where all weight is kept."""
    bias_s: float
    """Upper bound on the bias that the tuning lets in; the interval is wider by it to either side."""

    def line(self) -> str:
        span = "-" if self.low_s is None or self.high_s is None else f"[{_ms(self.low_s)}, {_ms(self.high_s)}]"
        tuned = "" if self.tuning is None else f"  tuned to {self.tuning:.3g}"
        return f"  {self.estimator:<18} {_ms(self.value_s):>9} ms  {span:<24} effective {self.effective:.0f}{tuned}"


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the log says of one policy."""

    policy: str
    support: Support
    estimates: tuple[Estimate, ...]
    """None of them where anything was refused."""
    refused: tuple[str, ...]

    def lines(self) -> list[str]:
        if self.refused:
            return [f"{self.policy}: refused", *(f"  because {why}" for why in self.refused)]
        return [
            f"{self.policy}: mean weight {self.support.mean_weight:.3f}, effective sample "
            f"{self.support.effective_share:.1%} of the records",
            *(one.line() for one in self.estimates),
        ]


@dataclass(frozen=True, slots=True)
class OffPolicyReport:
    """Policies side by side, on one log."""

    n: int
    clusters: int
    cluster: str
    interval: str
    objective: str
    logged: Estimate | None
    """The policy that wrote the log, as it was; None where the log is refused."""
    refused: tuple[str, ...]
    """What of the log itself forbids every estimate, of the logged policy's too."""
    policies: tuple[Judgement, ...]
    calibration: Calibration
    known: Mapping[str, tuple[int, int]]
    """By action: records, and those whose cost is known."""
    counts: Mapping[str, int]
    """See :class:`kvpolicy.evaluation.decision_log.Log`."""
    learning: tuple[str, ...]
    """Policies that change while they serve; asked in their first state throughout."""

    def to_dict(self) -> dict[str, Any]:
        return {name: finite(value) for name, value in asdict(self).items()}

    def text(self) -> str:
        took = ", ".join(f"{kind} {count} ({known} with a known cost)" for kind, (count, known) in self.known.items())
        lines = [
            f"{self.n} decisions in {self.clusters} clusters ({self.cluster}): {took}",
            ESTIMAND,
            *([] if self.objective == ENGINE.text else [f"judged by {self.objective}"]),
            f"brackets: 95%, {self.interval}",
            "",
            *self._logged_lines(),
            *(line for one in self.policies for line in one.lines()),
            "",
            *_calibration_lines(self.calibration),
        ]
        lines += [f"{count} {what}" for what, count in self.counts.items() if count]
        return "\n".join([*lines, *(f"{name}: asked in its first state throughout" for name in self.learning)])

    def _logged_lines(self) -> list[str]:
        if self.logged is None:
            return ["as logged: refused", *(f"  because {why}" for why in self.refused)]
        return ["as logged:", self.logged.line()]


def _calibration_lines(found: Calibration) -> list[str]:
    if found.chance is None:
        return ["logged probabilities: too few decisions were left to chance to check them"]
    lines = [f"logged probabilities beside how often swap was chosen (chance of such a miss {found.chance:.2g}):"]
    for one in found.bins:
        span = f"{one.low:.3g}" if one.low == one.high else f"{one.low:.3g} to {one.high:.3g}"
        lines.append(f"  {span:<16} {one.expected_share:.1%} {one.chosen_share:.1%} of {one.decisions}")
    return lines


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g}"


def estimate(
    traces: Sequence[Path | str],
    policies: Sequence[str | Policy],
    seed: int = 0,
    objective: Objective | str = ENGINE,
    how: Estimation = Estimation(),
) -> OffPolicyReport:
    """Estimate what ``policies``, each by its name or itself, would have cost in the states of production logs.

    Raises TraceError as :func:`kvpolicy.evaluation.decision_log.logged`, ModelError for
    a model that is not for these engines, ValueError for a wrong name.
    """
    if seed < 0:
        raise WrongValue("seed", f"is {seed}, should be 0 or above")
    judging = parsed("objective", objective, Objective)
    loaded = load_policies(policies)
    seen = frozenset().union(*(one.cost_model.state_ids for one in loaded if one.cost_model is not None))
    log = logged(traces, judging, how.cluster).without(seen, "records that a policy's model was trained on")
    for policy in loaded:
        _check_fit(policy, log)
    targets = {policy.label: log.targets(policy) for policy in loaded}
    learning = tuple(one.name for one in loaded if not _stays(one))
    return judge(log, targets, seed, how, judging.text, learning)


def judge(
    log: Log,
    targets: Mapping[str, Floats],
    seed: int,
    how: Estimation = Estimation(),
    objective: str = ENGINE.text,
    learning: tuple[str, ...] = (),
) -> OffPolicyReport:
    """As :func:`estimate`, for policies given by their probabilities, (n, K) each."""
    rng = np.random.default_rng(seed)
    drawn = Resampled.of(log.cluster, rng)
    design = Design.of(log.x, log.action, log.known, len(KINDS), folds_of(log.cluster, rng))
    predicted = _predicted(design, log, how.limit_s)
    calibrated = calibration(log.probability, log.action)
    told = log_refusals(calibrated, int(log.cluster.max()) + 1, log.known)
    as_logged = _records(log, log.probability, design, predicted, drawn)
    found = []
    for name, target in targets.items():
        records = _records(log, target, design, predicted, drawn)
        supported = support(target, log.probability, records.weight, log.known_share, drawn)
        refused = (*told, *supported.refused)
        made = (
            () if refused else tuple(_estimate(one, records, log, drawn, how) for one in how.estimators or ESTIMATORS)
        )
        found.append(Judgement(name, supported, made, refused))
    return OffPolicyReport(
        n=len(log),
        clusters=int(log.cluster.max()) + 1,
        cluster=how.cluster,
        interval=how.interval,
        objective=objective,
        logged=None if told else _estimate("ips", as_logged, log, drawn, how),
        refused=told,
        policies=tuple(found),
        calibration=calibrated,
        known=told_by_action(log.action, log.known),
        counts=log.counts,
        learning=learning,
    )


def _records(log: Log, target: Floats, design: Design, predicted: Predicted, drawn: Resampled) -> Records:
    return Records(
        target,
        log.probability,
        importance_weights(target, log.probability, log.action, log.known, log.known_share),
        log.cost_s,
        log.action,
        predicted.in_sample,
        predicted.cross_fitted,
        design.implied_weights(target),
        drawn.group,
    )


def _predicted(design: Design, log: Log, limit_s: float | None) -> Predicted:
    found = design.predict(log.cost_s)
    if limit_s is None:
        return found
    return Predicted(np.clip(found.in_sample, -limit_s, limit_s), np.clip(found.cross_fitted, -limit_s, limit_s))


def _estimate(name: str, records: Records, log: Log, drawn: Resampled, how: Estimation) -> Estimate:
    made = ESTIMATORS[name](records)
    low, high = _interval(name, made, records, log, drawn, how)
    squares = float((records.weight**2).sum())
    return Estimate(
        estimator=name,
        value_s=made.terms.mean(),
        low_s=None if low is None else low - made.bias_s,
        high_s=None if high is None else high + made.bias_s,
        n=len(log),
        effective=float(records.weight.sum()) ** 2 / squares if squares else 0.0,
        tuning=made.tuning,
        bias_s=made.bias_s,
    )


def _interval(
    name: str, made: Tuned, records: Records, log: Log, drawn: Resampled, how: Estimation
) -> tuple[float, float] | tuple[None, None]:
    terms: Terms = made.terms
    limit_s = how.limit_s
    if how.interval == "bootstrap":
        return bounds.bootstrap(terms, drawn)
    if how.interval == "sequence":
        return bounds.sequence(terms, log.cluster)
    if name not in BOUNDED or limit_s is None:
        return None, None
    if np.nanmax(np.abs(log.cost_s)) > limit_s:
        raise WrongValue("limit_s", f"is {limit_s:g}, a cost of {np.nanmax(np.abs(log.cost_s)):g} s exceeds it")
    heaviest = heaviest_weight(records.target, records.probability, log.known_share)
    reach = limit_s * (heaviest if name == "ips" else 1.0 + 2.0 * heaviest)
    return bounds.bernstein(terms, log.cluster, (-reach, reach))


def heaviest_weight(target: Floats, probability: Floats, known_share: Floats) -> float:
    """The largest that any action of any record could have had, taken or not: no matter of what chance chose.

    ``target``, ``probability``: (n, K); ``known_share``: (K,), NaN for actions never taken, which weigh as if known.
    """
    share = np.nan_to_num(known_share, nan=1.0)
    could = (probability > 0) & (share > 0)
    return float(np.divide(target, probability * share, out=np.zeros_like(target), where=could).max())


def _check_fit(policy: Policy, log: Log) -> None:
    if policy.cost_model is None:
        return
    for header in log.headers.values():
        policy.cost_model.check_fit(header.engine_spec)


def _stays(policy: Policy) -> bool:
    """Whether its state says nothing: it decides alike throughout."""
    state: PolicyState = policy.initial_state()
    return state.to_json() == "{}"
