"""Which way policies are judged: by replay where both options were measured, by estimates where one was seen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvpolicy.datasets.logs import holds_logs
from kvpolicy.evaluation import offpolicy, replay
from kvpolicy.evaluation.offpolicy import OffPolicyReport
from kvpolicy.evaluation.replay import EvaluationReport
from kvpolicy.policy import Policy
from kvpolicy.policy.objective import ENGINE, Objective


def evaluate(
    traces: Sequence[Path | str],
    policies: Sequence[str | Policy],
    seed: int = 0,
    objective: Objective | str = ENGINE,
    estimators: Sequence[str] = (),
    interval: str = "bootstrap",
    cluster: str = "overflow",
    limit_s: float | None = None,
) -> EvaluationReport | OffPolicyReport:
    """Judge ``policies``, each by its name or itself, on ``traces``.

    Profiles are replayed (:func:`kvpolicy.evaluation.replay.evaluate`); logs of production or of a simulation give
    off-policy estimates (:func:`kvpolicy.evaluation.offpolicy.estimate`), which alone know ``estimators``,
    ``interval``, ``cluster`` and ``limit_s``. Raises TraceError for both kinds together, and as these two do.
    """
    if seed < 0:
        raise ValueError(f"seed is {seed}, should be 0 or above")
    if traces and holds_logs(traces):
        return offpolicy.estimate(traces, policies, seed, objective, estimators, interval, cluster, limit_s)
    if estimators or (interval, cluster, limit_s) != ("bootstrap", "overflow", None):
        raise ValueError(
            "a profile measured both options and is replayed; estimator, interval, cluster and limit are for logs"
        )
    return replay.evaluate(traces, policies, seed, objective)
