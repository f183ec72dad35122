"""Evaluate policies offline. Names are loaded on first use: the command line needs the options, not the estimators."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpolicy.lazy_names import lazy_names

if TYPE_CHECKING:
    from kvpolicy.evaluation.dispatch import evaluate
    from kvpolicy.evaluation.estimation import Estimation
    from kvpolicy.evaluation.offpolicy import OffPolicyReport
    from kvpolicy.evaluation.replay import EvaluationReport
    from kvpolicy.evaluation.shadow_run import ShadowSavings, shadow_savings

__all__ = ["Estimation", "EvaluationReport", "OffPolicyReport", "ShadowSavings", "evaluate", "shadow_savings"]
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Estimation": "kvpolicy.evaluation.estimation",
        "EvaluationReport": "kvpolicy.evaluation.replay",
        "OffPolicyReport": "kvpolicy.evaluation.offpolicy",
        "ShadowSavings": "kvpolicy.evaluation.shadow_run",
        "evaluate": "kvpolicy.evaluation.dispatch",
        "shadow_savings": "kvpolicy.evaluation.shadow_run",
    },
)
