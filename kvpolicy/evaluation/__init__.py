"""Judging policies offline."""

from kvpolicy.evaluation.replay import EvaluationReport, evaluate

__all__ = ["EvaluationReport", "evaluate"]
