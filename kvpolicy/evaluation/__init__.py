"""Judging policies offline."""

from kvpolicy.evaluation.choosing import evaluate
from kvpolicy.evaluation.offpolicy import OffPolicyReport
from kvpolicy.evaluation.replay import EvaluationReport

__all__ = ["EvaluationReport", "OffPolicyReport", "evaluate"]
