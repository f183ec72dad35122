"""Policies: from a situation and its options to probabilities, and the one place where chance comes in."""

from kvpolicy.policy.base import Assessment, Feedback, NoState, Policy, PolicyState
from kvpolicy.policy.decision import Decider, decide, feasible_options
from kvpolicy.policy.objective import Objective
from kvpolicy.policy.spec import COST_MODELS, FORMS, anchored, load, needs_engine

__all__ = [
    "COST_MODELS",
    "FORMS",
    "Assessment",
    "Decider",
    "Feedback",
    "NoState",
    "Objective",
    "Policy",
    "PolicyState",
    "anchored",
    "decide",
    "feasible_options",
    "load",
    "needs_engine",
]
