"""Choice of the evaluation: replay if both options were measured, off-policy estimates if only one was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kvpolicy.datasets.logs import holds_logs
from kvpolicy.errors import InputError
from kvpolicy.evaluation import offpolicy, replay
from kvpolicy.evaluation.estimation import Estimation
from kvpolicy.evaluation.offpolicy import OffPolicyReport
from kvpolicy.evaluation.replay import EvaluationReport
from kvpolicy.fields import AMOUNT, WrongValue, refuse_no_paths, refuse_non_integer, refuse_other, refuse_single
from kvpolicy.policy import Policy, specs_by_label
from kvpolicy.policy.objective import ENGINE, Objective


def evaluate(
    traces: Sequence[Path | str],
    policies: Sequence[str | Policy],
    seed: int = 0,
    objective: Objective | str = ENGINE,
    how: Estimation = Estimation(),
    between: tuple[str, str] | None = None,
) -> EvaluationReport | OffPolicyReport:
    """Evaluate ``policies``, given by name or as objects, on ``traces``.

    Profiles are replayed (:func:`kvpolicy.evaluation.replay.evaluate`). Logs of production or of a simulation give
    off-policy estimates (:func:`kvpolicy.evaluation.offpolicy.estimate`); ``how`` and ``between``, what was
    recorded between two times such as ``("-2h", "end")`` (:mod:`kvpolicy.trace.window`), apply to these only.
    Raises TraceError for both kinds together, and the errors of these two functions.
    """
    refuse_no_paths("traces", traces)
    refuse_single(policies=policies)
    refuse_non_integer("seed", seed, AMOUNT)
    refuse_other("how", how, Estimation, "an Estimation")
    if traces and holds_logs(traces):
        report = offpolicy.estimate(traces, policies, seed, objective, how, between)
        return replace(report, specs=_specs(policies, report))
    if how != Estimation():
        raise InputError(
            "a profile measured both options and is replayed; estimator, interval, cluster, limit and slo are for logs"
        )
    if between is not None:
        raise WrongValue("between", "is given with a profile, which is judged as a whole; it is for logs")
    replayed = replay.evaluate(traces, policies, seed, objective)
    return replace(replayed, specs=_specs(policies, replayed))


def _specs(policies: Sequence[str | Policy], report: EvaluationReport | OffPolicyReport) -> dict[str, str]:
    return specs_by_label(policies, [judged.policy for judged in report.policies])
