"""kvpolicy: recompute or swap, decided by measured cost, for LLM servers that run out of KV memory.

The nouns first, then the steps of the loop as functions with the arguments of the commands. All are loaded on first
use: a server that only decides must not load the trainers. ``__init__.pyi`` has the same names for type checkers.
"""

from __future__ import annotations

from kvpolicy.lazy_names import lazy_names
from kvpolicy.version import __version__

_HOMES = {
    # What is known, what can be done, what it costs, what was decided and what became of it.
    "Preemption": "kvpolicy.events",
    "Option": "kvpolicy.events",
    "Cost": "kvpolicy.events",
    "Decision": "kvpolicy.events",
    "Outcome": "kvpolicy.events",
    "Trace": "kvpolicy.trace",
    "Policy": "kvpolicy.policy",
    "Order": "kvpolicy.order",
    "CostModel": "kvpolicy.cost",
    "Request": "kvpolicy.workload",
    "Workload": "kvpolicy.workload",
    "HardwareModel": "kvpolicy.simulator.hardware.table_times",
    "Server": "kvpolicy.simulator",
    "KVPolicyError": "kvpolicy.errors",
    "load_policy": "kvpolicy.policy",
    "load_order": "kvpolicy.order",
    "load_cost_model": "kvpolicy.cost",
    "read_trace": "kvpolicy.trace:read",
    "open_workload": "kvpolicy.workload",
    # What one's own policies, orders and families extend, and what they are given.
    "PricedPolicy": "kvpolicy.policy",
    "LearningPolicy": "kvpolicy.policy",
    "Feedback": "kvpolicy.policy",
    "Progress": "kvpolicy.order",
    "Rank": "kvpolicy.order",
    "View": "kvpolicy.order",
    "Family": "kvpolicy.training.family",
    # Arguments of the steps that are more than one value.
    "FittedModel": "kvpolicy.cost",
    "Objective": "kvpolicy.policy",
    "Estimation": "kvpolicy.evaluation",
    "Serving": "kvpolicy.study.config",
    "Run": "kvpolicy.study.config",
    "Criterion": "kvpolicy.study.config",
    "Question": "kvpolicy.explanation",
    "Measurement": "kvpolicy.settings",
    "ServerSettings": "kvpolicy.settings",
    # What the steps return.
    "TrainReport": "kvpolicy.training",
    "LogTrainReport": "kvpolicy.training.reports",
    "CalibrateReport": "kvpolicy.training",
    "EvaluationReport": "kvpolicy.evaluation",
    "OffPolicyReport": "kvpolicy.evaluation",
    "SweepReport": "kvpolicy.study.report",
    "Advice": "kvpolicy.study.recommend",
    "Explanation": "kvpolicy.explanation",
    "ShadowSavings": "kvpolicy.evaluation",
    # The steps of the loop.
    "train": "kvpolicy.training",
    "evaluate": "kvpolicy.evaluation",
    "simulate": "kvpolicy.study.grid",
    "recommend": "kvpolicy.study.recommend",
    "explain": "kvpolicy.explanation",
    "calibrate": "kvpolicy.training",
    "profile": "kvpolicy.integrations",
    "check": "kvpolicy.integrations",
    "serve": "kvpolicy.integrations",
    "demo": "kvpolicy.integrations",
    "offline_demo": "kvpolicy.study.offline_demo",
    "characterize": "kvpolicy.integrations",
    "report": "kvpolicy.reporting.pipeline",
    "import_profile": "kvpolicy.simulator.hardware.import_profile",
    "shadow_savings": "kvpolicy.evaluation",
}

__all__ = ["__version__", *_HOMES]
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
